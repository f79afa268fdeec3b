"""Verify a conversion by reading everything again and comparing it with the record and the sources."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import xxhash
from tqdm import tqdm

from biphasic.config.convert import ConvertConfig
from biphasic.conversion.convert import source_files
from biphasic.conversion.output import read_unit_records, require_record
from biphasic.conversion.source_files import SourceFile
from biphasic.conversion.sources import describe_unread
from biphasic.conversion.worker import unit_record_file
from biphasic.data.mds_reader import StoredRow, decode_rows, shard_file
from biphasic.data.packing import mds_columns
from biphasic.data.streams import CONVERSION_RECORD, INDEX
from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import UserError, first_line
from biphasic.processes import available_cores
from biphasic.storage import Store, is_inside, join, open_store, user_errors
from biphasic.workers.local import parallel_map

_WORTH_PROCESSES = 32
"""Minimum number of shards for which several processes are worth their start-up time."""


def verify(output: str, *, sources: bool = True) -> Verification:
    """Read a finished conversion and compare it with its record.

    Checks the presence, bytes and hash of every file; the length, segments, padding and ids of each row; the counts of
    rows, tokens and documents; that no text was converted twice, and no text contains a mask token; the tokenizer; and
    with `sources`, that the source files are unchanged. If there are many shards, one process per core reads them. Raises
    a UserError if there is no finished conversion, or it can't be listed.
    """
    verification = Verification(output)
    verification.check_tokenizer()
    for split in verification.record["splits"]:
        verification.check_split(split)
    verification.check_units()
    if sources:
        verification.check_sources()
    return verification


class Verification:
    """Checks of a conversion. `faults` has a line for each fault, `summary` one for each part that was read."""

    def __init__(self, output: str):
        self.output, self.record = output, require_record(output)
        self.faults, self.summary = list[str](), list[str]()
        for name in (*self.record["units"], *self.record["splits"]):
            if not is_inside(name):
                raise UserError(f"{join(output, CONVERSION_RECORD)}: names {name!r}, which leads out of its folder")
        self.store = open_store(output)
        with user_errors(f"{output}: can't be listed"):
            self.files = set(self.store.list())

    def check_tokenizer(self) -> None:
        try:
            tokenizer = load_tokenizer(join(self.output, "tokenizer"))
        except (UserError, OSError) as error:
            self.faults.append(f"tokenizer/: can't be loaded ({first_line(error)})")
            return
        if tokenizer.sha256 != self.record["tokenizer"]["sha256"]:
            self.faults.append("tokenizer/: is not the tokenizer that the record names (another sha256)")

    def check_split(self, split: str) -> None:
        expected = self.record["splits"][split]
        try:
            content = self.store.read(f"{split}/{INDEX}")
            index = json.loads(content)
        except (OSError, ValueError) as error:
            self.faults.append(f"{split}/{INDEX}: can't be read ({first_line(error)})")
            return
        faults = []
        if hashlib.sha256(content).hexdigest() != expected["index_sha256"]:
            faults.append(f"{INDEX}: is not the one that the record names (another sha256)")
        shards = index["shards"]
        # Streaming unpacks the shards of a local dataset beside the compressed ones.
        listed = {INDEX, *(file["basename"] for shard in shards for file in (shard["raw_data"], shard_file(shard)))}
        present = {name.removeprefix(f"{split}/") for name in self.files if name.startswith(f"{split}/")}
        faults += [f"{name}: is not in the record" for name in sorted(present - listed)]
        row_format = {key: self.record[key] for key in ("sequence_length", "dtype", "hash", "tokenizer")}
        check = partial(_check_shard, join(self.output, split), row_format)
        counts: Counter[str] = Counter()
        processes = available_cores() if len(shards) >= _WORTH_PROCESSES else 1
        with parallel_map(processes, [__name__]) as map_shards:
            checks = map_shards(check, shards, [shard["raw_data"]["basename"] in present for shard in shards])
            for fault, counted in tqdm(checks, f"{split} shards", len(shards)):
                counts.update(counted)
                faults += [fault] if fault else []
        self.faults += [f"{split}/{fault}" for fault in faults]
        if faults:
            self.summary.append(f"{split}: {counts['rows']:,} of {expected['rows']:,} rows were read without fault")
            return
        config, tokenizer = self.record["config"], self.record["tokenizer"]
        counts_eos = not (config["add_bos"] and tokenizer["bos_id"] == tokenizer["eos_id"])
        each_ends_with_eos = config["add_eos"] and config["max_tokens"] is None and counts_eos
        for name in ("rows", "tokens", "bytes", *(["documents"] if each_ends_with_eos else [])):
            if counts[name] != expected[name]:
                self.faults.append(f"{split}: holds {counts[name]:,} {name}, but the record says {expected[name]:,}")
        rows = f"{counts['rows']:,} rows, {counts['tokens']:,} tokens, {expected['documents']:,} documents"
        stored = f"{counts['segments']:,} segments, {len(shards)} shards, {counts['bytes'] / 1e6:,.1f} MB"
        self.summary.append(f"{split}: {rows}, {stored}")

    def check_units(self) -> None:
        """Check that the record of each work unit is there, and no file or row group is in two of them."""
        units = self.record["units"]
        if missing := [name for name in map(unit_record_file, units) if name not in self.files]:
            self.faults.append(f"{missing[0]}: is missing")
            return
        try:
            records = read_unit_records(self.store)
        except UserError as error:
            self.faults.append(str(error).removeprefix(join(self.output, "")))
            return
        parts = Counter(
            (file["path"], group)
            for unit in units
            for file in records[unit]["files"]
            for group in (range(*file["row_groups"]) if file["row_groups"] else [None])
        )
        if twice := [path for (path, _), count in parts.items() if count > 1]:
            self.faults.append(f"units/: {twice[0]} was converted twice")

    def check_sources(self) -> None:
        config = ConvertConfig.model_validate(self.record["config"])
        files = [SourceFile(**file) for file in self.record["source"]["files"]]
        try:
            sources = source_files(config, self.record["source"]["commit"])
        except UserError as error:
            self.summary.append(f"sources: not compared ({error})")
            return
        current = {file.path: file for file in sources.files}
        if changed := [file.path for file in files if current.get(file.path) != file]:
            state = "has changed since" if changed[0] in current else "is not there any more"
            more = f" ({len(changed)} files)" if changed[1:] else ""
            self.faults.append(f"source {changed[0]}: {state}{more}")
            return
        self.summary.append(f"sources: {len(files)} files, unchanged")
        if sources.unread:
            self.summary.append(f"not read: {describe_unread(sources.unread)}")


def _check_shard(
    folder: str, row_format: dict[str, Any], entry: dict[str, Any], is_unpacked: bool
) -> tuple[str | None, Counter[str]]:
    """Read the shard with this entry in the index, and return its first fault, or its counts if there is none."""
    counts: Counter[str] = Counter()
    try:
        fault = _read_shard(open_store(folder), row_format, entry, is_unpacked, counts)
    except FileNotFoundError:
        fault = "is missing"
    except OSError as error:
        fault = f"can't be read ({first_line(error)})"
    except Exception as error:  # a damaged file can make the decoder raise anything
        fault = f"can't be decoded ({first_line(error)})"
    return (f"{shard_file(entry)['basename']}: {fault}", Counter()) if fault else (None, counts)


def _read_shard(
    store: Store, row_format: dict[str, Any], entry: dict[str, Any], is_unpacked: bool, counts: Counter[str]
) -> str | None:
    stored, raw, algorithm = shard_file(entry), entry["raw_data"], row_format["hash"]
    hash_of = getattr(xxhash, algorithm)
    content = store.read(stored["basename"])
    if len(content) != stored["bytes"]:
        return f"has {len(content):,} bytes instead of {stored['bytes']:,}"
    if hash_of(content).hexdigest() != stored["hashes"][algorithm]:
        return "its content has changed (another hash)"
    columns = dict(zip(entry["column_names"], entry["column_encodings"], strict=True))
    if columns != mds_columns(row_format["sequence_length"], row_format["dtype"]):
        return f"holds the columns {columns}"
    for number, row in enumerate(decode_rows(entry, content, range(entry["samples"]))):
        if fault := _check_row(row, row_format, counts):
            return f"row {number}: {fault}"
    counts["bytes"] += len(content)
    if stored is raw or not is_unpacked:
        return None
    # Streaming reads the unpacked copy of a local dataset.
    same = hash_of(store.read(raw["basename"])).hexdigest() == raw["hashes"][algorithm]
    return None if same else f"its unpacked copy {raw['basename']} has changed; remove it"


def _check_row(row: StoredRow, row_format: dict[str, Any], counts: Counter[str]) -> str | None:
    """Return the first fault of a row. If there is none, add the row to the counts."""
    tokens, lengths, tokenizer = row["tokens"], row["lengths"].astype(np.int64), row_format["tokenizer"]
    filled = int(lengths.sum())
    if len(tokens) != row_format["sequence_length"]:
        return f"has {len(tokens)} tokens instead of {row_format['sequence_length']}"
    if lengths.ndim != 1 or not len(lengths) or lengths.min() < 1 or filled > len(tokens):
        return f"its segment lengths are impossible: {lengths.tolist()[:8]}"
    if (largest := int(tokens.max())) >= tokenizer["vocab_size"]:
        return f"holds id {largest}, and the vocabulary has {tokenizer['vocab_size']}"
    if (tokens[filled:] != tokenizer["pad_id"]).any():
        return "holds something other than padding after its last segment"
    if (tokens[:filled] == tokenizer["mask_id"]).any():
        return "holds a mask token"
    documents = 0 if tokenizer["eos_id"] is None else int((tokens[:filled] == tokenizer["eos_id"]).sum())
    counts.update(rows=1, tokens=filled, documents=documents, segments=len(lengths))
    return None
