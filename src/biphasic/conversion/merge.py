"""Merge finished work units into one dataset: the indexes, the record, and the count of repeated documents."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from biphasic.config.stream_record import CONVERSION_RECORD, CONVERSION_STARTED
from biphasic.conversion.output import CONVERSION_LOG, LockedOutput
from biphasic.conversion.packing import token_dtype
from biphasic.conversion.sources import Sources
from biphasic.conversion.work_units import (
    ConversionContext,
    UnitRecord,
    WorkUnit,
    document_numbers_file,
    unit_record_file,
)
from biphasic.conversion.worker import HASH
from biphasic.data.mds_reader import INDEX, shard_file
from biphasic.errors import UserError
from biphasic.storage import Store, json_bytes

UnitRecords = list[tuple[WorkUnit, UnitRecord]]
_READERS = 16


def publish(
    output: LockedOutput,
    context: ConversionContext,
    records: UnitRecords,
    sources: Sources,
    damaged: list[str],
    seconds: float,
) -> dict[str, Any]:
    """Merge the units' records into the conversion's record (see `biphasic.conversion.convert`), and make it the dataset.

    Removes files that are not part of the dataset, then writes the tokenizer, the indexes, and last the record.

    Raises:
        UserError: a split has no documents.
        OSError: the output can't be written.
    """
    config, tokenizer, store = context.config, context.tokenizer, output.store
    units = [unit.name for unit, _ in records]
    skipped: Counter[str] = Counter()
    for _, record in records:
        skipped.update(record["documents"]["skipped"])
    read, filtered = (sum(record["documents"][key] for _, record in records) for key in ("read", "filtered"))
    kept = {name for unit in units for name in (unit_record_file(unit), document_numbers_file(unit))}
    splits, indexes = {}, {}
    for name in config.splits:
        parts = [record["splits"][name] for _, record in records]
        counts = {key: sum(part[key] for part in parts) for key in ("documents", "tokens", "rows", "bytes")}
        if not counts["documents"]:
            hint = "raise validation_fraction or add documents" if name == "validation" else "is the source empty?"
            left_out = f"{filtered:,} left out by filters, {sum(skipped.values()):,} skipped"
            raise UserError(f"{read:,} documents were read ({left_out}), and none is for {name}: {hint}")
        shards = _shards(name, records)
        kept |= {f"{name}/{shard_file(shard)['basename']}" for shard in shards}
        # Streaming's own merge of the units' indexes would give the same bytes.
        indexes[name] = json.dumps({"version": 2, "shards": shards}, sort_keys=True).encode()
        fill = counts["tokens"] / max(counts["rows"] * config.sequence_length, 1)
        index_hash = hashlib.sha256(indexes[name]).hexdigest()
        splits[name] = {**counts, "fill": fill, "shards": len(shards), "index_sha256": index_hash}
    repeated = count_repeated(document_numbers(store, units))
    record = {
        "config": config.model_dump(mode="json"),
        "source": {
            "commit": sources.commit,
            "files": [{"path": file.path, "bytes": file.bytes, "version": file.version} for file in sources.files],
            "left_out": damaged + [message for _, record in records for message in record["damaged"]],
            "unread": sources.unread,
        },
        "tokenizer": {
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            **{f"{role}_id": token_id for role, token_id in tokenizer.role_ids.items()},
        },
        "sequence_length": config.sequence_length,
        "dtype": token_dtype(tokenizer.vocab_size),
        "hash": HASH,
        "splits": splits,
        "documents": {
            "read": read,
            "filtered": filtered,
            "skipped": dict(sorted(skipped.items())),
            "repeated": repeated,
        },
        "units": units,
        "text_bytes": sum(record["text_bytes"] for _, record in records),
        "cpu_seconds": round(sum(record["cpu_seconds"] for _, record in records), 2),
        "seconds": round(seconds, 2),
    }
    store.remove(set(store.list()) - kept - {CONVERSION_STARTED, CONVERSION_LOG})
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        for file in sorted(Path(folder).iterdir()):
            store.write(f"tokenizer/{file.name}", file.read_bytes())
    for name, index in sorted(indexes.items(), reverse=True):
        store.write(f"{name}/{INDEX}", index)
    store.write(CONVERSION_RECORD, json_bytes(record))
    store.remove([CONVERSION_STARTED])
    return record


def _shards(split: str, records: UnitRecords) -> list[dict[str, Any]]:
    """Return the entries of a split's index, with file names relative to the split's folder."""
    shards = []
    for unit, record in records:
        for shard in deepcopy(record["splits"][split]["shards"]):
            for file in (shard["raw_data"], shard["zip_data"]):
                if file is not None:
                    file["basename"] = f"{unit.name}/{file['basename']}"
            shards.append(shard)
    return shards


def document_numbers(store: Store, units: Iterable[str]) -> Iterator[np.ndarray]:
    """Yield the numbers of each unit's documents: uint64 [documents], sorted."""
    names = iter([document_numbers_file(unit) for unit in units])
    with ThreadPoolExecutor(_READERS) as pool:
        while some := list(islice(names, _READERS)):
            for content in pool.map(store.read, some):
                yield np.frombuffer(content, "<u8")


def count_repeated(numbers: Iterable[np.ndarray]) -> int:
    """Count the documents that have the number of an earlier one. The numbers are sorted on disk to save memory."""
    with tempfile.TemporaryFile() as file:
        for part in numbers:
            file.write(part.astype("<u8").tobytes())
        file.flush()
        if not file.tell():
            return 0
        merged = np.memmap(file, "<u8", "r+")
        merged.sort()
        return int((merged[1:] == merged[:-1]).sum())
