"""From finished tasks to one dataset: the merged indexes, the record, and a look for repeated documents."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from biphasic.config.errors import UserError
from biphasic.data.output import LOG, RECORD, STARTED, Claim
from biphasic.data.rows import token_dtype
from biphasic.data.sources import SourceFile
from biphasic.data.tokenizer import ROLES, Tokenizer
from biphasic.data.work import Record, Task, Work, documents_name, record_name
from biphasic.data.worker import HASH
from biphasic.storage import Store, as_bytes

_IN_MEMORY = 1 << 24
_READERS = 16
_SLOWEST = 3


def merged(
    work: Work, records: list[tuple[Task, Record]], files: list[SourceFile], damaged: list[str], seconds: float
) -> dict[str, Any]:
    """The conversion's record, from those of its tasks (see `biphasic.data.convert`).

    Raises:
        UserError: a split has got no documents.
    """
    config, tokenizer = work.config, work.tokenizer
    skipped: Counter[str] = Counter()
    for _, record in records:
        skipped.update(record["documents"]["skipped"])
    read, filtered = (sum(record["documents"][key] for _, record in records) for key in ("read", "filtered"))
    splits = {name: _split(name, records, config.sequence_length) for name in config.splits}
    for name, split in splits.items():
        if not split["documents"]:
            hint = "raise validation_fraction or add documents" if name == "validation" else "is the source empty?"
            left = f"{filtered:,} left out by filters, {sum(skipped.values()):,} skipped"
            raise UserError(f"{read:,} documents were read ({left}), and none is for {name}: {hint}")
    slow = sorted(records, key=lambda pair: -pair[1]["seconds"])[:_SLOWEST]
    task_seconds = sum(record["seconds"] for _, record in records)
    return {
        "config": config.model_dump(mode="json"),
        "source": {
            "commit": None,
            "files": [asdict(file) for file in files],
            "left_out": damaged + [fault for _, record in records for fault in record["damaged"]],
        },
        "tokenizer": {
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            **{f"{role}_id": getattr(tokenizer, f"{role}_id") for role in ROLES},
        },
        "sequence_length": config.sequence_length,
        "dtype": token_dtype(tokenizer.vocab_size),
        "hash": HASH,
        "splits": splits,
        "documents": {"read": read, "filtered": filtered, "skipped": dict(sorted(skipped.items()))},
        "tasks": [task.name for task, _ in records],
        "text_bytes": sum(record["text_bytes"] for _, record in records),
        "cpu_seconds": round(sum(record["cpu_seconds"] for _, record in records), 2),
        "seconds": round(seconds, 2),
        "slowest": [{"what": task.what(), "seconds": found["seconds"]} for task, found in slow],
        "tokens_per_second": round(sum(split["tokens"] for split in splits.values()) / max(task_seconds, 1e-9)),
    }


def _split(name: str, records: list[tuple[Task, Record]], sequence_length: int) -> dict[str, Any]:
    parts = [(task, record["splits"][name]) for task, record in records]
    counts = {key: sum(part[key] for _, part in parts) for key in ("documents", "tokens", "rows", "bytes")}
    shards = []
    for task, part in parts:
        for shard in part["shards"]:
            file = shard["zip_data"] or shard["raw_data"]
            shards.append({"file": f"{task.name}/{file['basename']}", "bytes": file["bytes"], "rows": shard["samples"],
                           "hash": file["hashes"][HASH]})  # fmt: skip
    fill = counts["tokens"] / max(counts["rows"] * sequence_length, 1)
    index = hashlib.sha256(_index(name, records)).hexdigest()
    return {**counts, "fill": fill, "index_sha256": index, "shards": shards}


def _index(name: str, records: list[tuple[Task, Record]]) -> bytes:
    """The split's `index.json`, as Streaming's own merging of the tasks' indexes writes it."""
    shards = []
    for task, record in records:
        for shard in deepcopy(record["splits"][name]["shards"]):
            for file in (shard["raw_data"], shard["zip_data"]):
                if file is not None:
                    file["basename"] = f"{task.name}/{file['basename']}"
            shards.append(shard)
    return json.dumps({"version": 2, "shards": shards}, sort_keys=True).encode()


def publish(place: Claim, record: dict[str, Any], records: list[tuple[Task, Record]], tokenizer: Tokenizer) -> None:
    """Make the dataset appear: what is no part of it goes, then come the tokenizer, the indexes, and last the record.

    Adds `documents.repeated` to the record.
    """
    target = place.store
    tasks = [task.name for task, _ in records]
    record["documents"]["repeated"] = repeated(numbers_of(target, tasks))
    wanted = {f"{split}/{shard['file']}" for split, part in record["splits"].items() for shard in part["shards"]}
    wanted |= {name for task in tasks for name in (record_name(task), documents_name(task))} | {STARTED, LOG}
    target.remove([name for name in target.list() if name not in wanted])
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        for file in sorted(Path(folder).iterdir()):
            target.write(f"tokenizer/{file.name}", file.read_bytes())
    for split in sorted(record["splits"], reverse=True):
        target.write(f"{split}/index.json", _index(split, records))
    target.write(RECORD, as_bytes(record))
    target.remove([STARTED])


def numbers_of(place: Store, tasks: Iterable[str]) -> Iterator[np.ndarray]:
    """The numbers of each task's documents: uint64 [documents], sorted."""
    names = iter([documents_name(task) for task in tasks])
    with ThreadPoolExecutor(_READERS) as pool:
        while some := list(islice(names, _READERS)):
            for content in pool.map(place.read, some):
                yield np.frombuffer(content, "<u8")


def repeated(numbers: Iterable[np.ndarray]) -> int:
    """How many documents have an id that came before; memory stays flat, beyond 16 million documents by way of the disk.

    Args:
        numbers: uint64 [documents] each, sorted.
    """
    with tempfile.TemporaryDirectory() as folder:
        total, held, count, files = 0, 0, 0, 256
        parts: list[np.ndarray] = []
        for some in numbers:
            total += len(some)
            parts.append(some)
            held += len(some)
            if held > _IN_MEMORY:
                _spread(parts, Path(folder), files)
                parts, held = [], 0
        if held == total:
            return total - len(np.unique(np.concatenate(parts))) if total else 0
        _spread(parts, Path(folder), files)
        for file in Path(folder).iterdir():
            found = np.fromfile(file, "<u8")
            count += len(found) - len(np.unique(found))
        return count


def _spread(parts: list[np.ndarray], folder: Path, files: int) -> None:
    """Add numbers to files by their highest bits."""
    every = np.sort(np.concatenate(parts)) if parts else np.empty(0, "<u8")
    edges = np.searchsorted(every >> np.uint64(56), np.arange(files + 1))
    for number in range(files):
        with (folder / f"{number:03d}").open("ab") as file:
            every[edges[number] : edges[number + 1]].tofile(file)
