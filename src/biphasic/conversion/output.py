"""A conversion's output: read its records, lock it for writing, and publish finished work units as one dataset."""

import errno
import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from biphasic.conversion.shard_writer import HASH
from biphasic.conversion.source_files import SourceFile
from biphasic.conversion.sources import Sources
from biphasic.conversion.tokenizer_checks import merge_checks
from biphasic.conversion.worker import FREE_KEYS, ConversionContext, Records, UnitRecord, WorkUnit, unit_record_file
from biphasic.data.mds_reader import shard_file
from biphasic.data.packing import token_dtype
from biphasic.data.streams import CONVERSION_RECORD, CONVERSION_STARTED, INDEX
from biphasic.data.tokenizer import Tokenizer
from biphasic.errors import UserError, first_line
from biphasic.grouping import mapped_ahead
from biphasic.storage import LOCK_FILE, LocalStore, Store, is_remote, join, json_bytes, open_store, user_errors

UnitRecords = list[tuple[WorkUnit, UnitRecord]]
_READERS = 32
_NAMED_UNITS = 3


def read_record(output: str) -> dict[str, Any] | None:
    """Return the record of the finished conversion at `output`, or None if it is empty or unfinished.

    Raises a UserError if `output` holds other files, is a conversion with missing or damaged shards, or can't be read.
    """
    store = open_store(output)
    files = _sizes(store)
    if CONVERSION_RECORD not in files:
        if files and CONVERSION_STARTED not in files:
            message = f"already holds files that do not belong to a conversion (e.g. {next(iter(files))})"
            raise UserError(f"output {output} {message}: choose another, or remove them")
        return None
    record = _read_json(store, CONVERSION_RECORD)
    for split in record["splits"]:
        for shard in _read_json(store, f"{split}/{INDEX}")["shards"]:
            name, size = f"{split}/{shard_file(shard)['basename']}", shard_file(shard)["bytes"]
            if files.get(name) == size:
                continue
            with user_errors(f"output {output}: can't be read"):
                stored = store.stat(name)  # a split may be a link, which the list of a local folder leaves out
            if stored is None or stored.bytes != size:
                problem = "is missing" if stored is None else f"has {stored.bytes} bytes instead of {size}"
                raise UserError(f"{output} is damaged: {name} {problem}; remove the folder and convert again")
    return record


def require_record(output: str) -> dict[str, Any]:
    """Return the record of a finished conversion. Raises a UserError if there is none, which names missing units."""
    store = open_store(output)
    with user_errors(f"{join(output, CONVERSION_RECORD)}: can't be read", ValueError):
        if store.stat(CONVERSION_RECORD) is not None:
            return json.loads(store.read(CONVERSION_RECORD))
    files = _sizes(store)
    if CONVERSION_STARTED not in files:
        raise UserError(f"{output}: holds no {CONVERSION_RECORD}, so it is not a finished conversion")
    units = _read_json(store, CONVERSION_STARTED)["units"]
    missing = [description for name, description in units.items() if unit_record_file(name) not in files]
    some = "; ".join(missing[:_NAMED_UNITS]) + (" and others" if len(missing) > _NAMED_UNITS else "")
    state = f"{len(missing)} work units are missing ({some})" if missing else "all work units are done, but not merged"
    raise UserError(f"{output}: is an unfinished conversion: {state}; run `biphasic convert` again to finish it")


def tokenizer_record(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what decides the ids in rows: the hash of `tokenizer.json`, and the ids of special tokens, by role."""
    return {"sha256": tokenizer.sha256, **{f"{role}_id": id for role, id in tokenizer.role_ids.items()}}


def require_same_settings(
    kind: str, config: dict[str, Any], tokenizer: dict[str, Any], context: ConversionContext, *free_keys: str
) -> None:
    """Raise a UserError, which names the keys, if an output was made with other settings than the requested ones.

    `free_keys` and `FREE_KEYS` may differ, and a hub dataset's revision, because its commit is compared.
    """
    current, config = (
        {**each, "source": {**each["source"], "revision": None}} for each in (context.config.model_dump(mode="json"), config)
    )
    different = [key for key in current if key not in (*FREE_KEYS, *free_keys) and config.get(key) != current[key]]
    own = tokenizer_record(context.tokenizer)
    different += ["tokenizer"] if {key: tokenizer.get(key) for key in own} != own else []
    if different:
        message = f"holds {kind} with other settings ({', '.join(different)})"
        raise UserError(f"output {context.config.output} {message}: choose another output, or remove it")


def require_same_files(record: dict[str, Any], output: str, files: list[SourceFile]) -> None:
    """Raise a UserError, which names a file, if a finished conversion has other files than the source."""
    current = {file.path: (file.bytes, file.version) for file in files}
    recorded = {file["path"]: (file["bytes"], file["version"]) for file in record["source"]["files"]}
    if changed := sorted(path for path in current | recorded if current.get(path) != recorded.get(path)):
        others = " and others" if len(changed) > 1 else ""
        message = f"holds a conversion of other files ({changed[0]}{others})"
        raise UserError(f"output {output} {message}: choose another output, or remove it")


@contextmanager
def lock_output(context: ConversionContext, units: list[WorkUnit], commit: str | None) -> Iterator[tuple[Store, Records]]:
    """Lock an output for this process, and yield its store and the records of units finished earlier, by unit name.

    `commit` is that of a hub dataset. A bucket is not locked, because two conversions with the same settings only do the
    same work twice and write the same bytes. Raises a UserError if another conversion is writing the output, or it holds
    an unfinished one with other settings, and an OSError if it can't be written.
    """
    output = context.config.output
    store = open_store(output)
    with ExitStack() as stack:
        if isinstance(store, LocalStore):
            try:
                # The lock ends with the process, so a killed conversion does not leave one.
                stack.enter_context(FileLock(Path(output) / LOCK_FILE, timeout=0))
            except Timeout:
                raise UserError(f"output {output}: another conversion is writing it at this moment") from None
            stack.callback((Path(output) / LOCK_FILE).unlink)
        store.remove_unfinished()
        # Workers that died have left files.
        stack.callback(store.remove_unfinished)
        if CONVERSION_STARTED in _sizes(store):
            started = _read_json(store, CONVERSION_STARTED)
            kind = "an unfinished conversion"
            require_same_settings(kind, started["config"], started["tokenizer"], context, "max_tokens")
            if (earlier := started["commit"]) != commit:
                message = f"holds an unfinished conversion of the hub dataset's commit {earlier}; now it is {commit}"
                raise UserError(f"output {output} {message}: set source.revision: {earlier} to finish it")
        started = {
            "config": context.config.model_dump(mode="json"),
            "tokenizer": tokenizer_record(context.tokenizer),
            "commit": commit,
            "units": {unit.name: unit.description for unit in units},
        }
        store.write(CONVERSION_STARTED, json_bytes(started))
        yield store, read_unit_records(store)


def write_error_message(output: str, error: OSError) -> str:
    """Return the message about an output that can't be written."""
    # Shards for a bucket are written to a temporary folder first.
    is_disk = error.errno == errno.ENOSPC and is_remote(output)
    place = f"temporary folder {tempfile.gettempdir()} (TMPDIR)" if is_disk else f"output {output}"
    advice = "finished work units are kept; fix the cause, and run the same command again"
    return f"{place}: can't be written ({first_line(error)}); {advice}"


def read_unit_records(store: Store) -> Records:
    """Return the records of the finished units, by unit name. Raises a UserError if one can't be read."""
    names = list(store.list("units"))
    records = mapped_ahead(lambda name: _read_json(store, name), names, _READERS)
    return {Path(name).stem: record for name, record in zip(names, records, strict=True)}


def publish(
    store: Store, context: ConversionContext, records: UnitRecords, sources: Sources, damaged: list[str], seconds: float
) -> dict[str, Any]:
    """Merge the units' records into the conversion's record (see `biphasic.conversion.convert`) and publish it.

    Removes files that are not part of the dataset, then writes the tokenizer, the indexes, and last the record. Raises
    a UserError if a split has no documents, and an OSError if the output can't be written.
    """
    config, tokenizer = context.config, context.tokenizer
    shards = {split: _shards(split, records) for split in config.splits}
    # Streaming's own merge of the units' indexes would give the same bytes.
    indexes = {split: json.dumps({"version": 2, "shards": shards[split]}, sort_keys=True).encode() for split in shards}
    record = {
        "config": config.model_dump(mode="json"),
        "source": {
            "commit": sources.commit,
            "files": [{"path": file.path, "bytes": file.bytes, "version": file.version} for file in sources.files],
            "left_out": damaged + [message for _, unit in records for message in unit["damaged"]],
            "unread": sources.unread,
        },
        "tokenizer": {**tokenizer_record(tokenizer), "vocab_size": tokenizer.vocab_size, "dropout": tokenizer.dropout},
        "sequence_length": config.sequence_length,
        "dtype": token_dtype(tokenizer.vocab_size),
        "hash": HASH,
        "validation_end": context.validation_end,
        **_merged_counts([unit for _, unit in records], config.splits),
        "backends": dict(Counter(unit["backend"] for _, unit in records)),
        "units": [unit.name for unit, _ in records],
        "seconds": round(seconds, 2),
    }
    for split, counts in record["splits"].items():
        counts["fill"] = counts["tokens"] / max(counts["rows"] * config.sequence_length, 1)
        counts |= {"shards": len(shards[split]), "index_sha256": hashlib.sha256(indexes[split]).hexdigest()}
    kept = {CONVERSION_STARTED, *map(unit_record_file, record["units"])}
    kept |= {f"{split}/{shard_file(shard)['basename']}" for split, listed in shards.items() for shard in listed}
    store.remove(set(store.list()) - kept)
    with tempfile.TemporaryDirectory() as folder:
        with user_errors(f"temporary folder {folder}: can't be written", Exception):  # the library raises bare ones
            tokenizer.save(Path(folder))
        for file in sorted(Path(folder).iterdir()):
            store.write(f"tokenizer/{file.name}", file.read_bytes())
    for split, index in sorted(indexes.items(), reverse=True):
        store.write(f"{split}/{INDEX}", index)
    store.write(CONVERSION_RECORD, json_bytes(record))
    store.remove([CONVERSION_STARTED])
    return record


def _merged_counts(units: list[UnitRecord], splits: list[str]) -> dict[str, Any]:
    documents = [unit["documents"] for unit in units]
    read, filtered = (sum(each[key] for each in documents) for key in ("read", "filtered"))
    skipped = sum((Counter(each["skipped"]) for each in documents), Counter[str]())
    merged = {}
    for split in splits:
        keys = ("documents", "tokens", "rows", "bytes")
        merged[split] = {key: sum(unit["splits"][split][key] for unit in units) for key in keys}
        if not merged[split]["documents"]:
            advice = "is the source empty, or its text in another column?"
            advice = "raise max_tokens or validation_fraction" if split == "validation" else advice
            left_out = f"{filtered:,} left out by filters, {skipped.total():,} skipped"
            raise UserError(f"{read:,} documents were read ({left_out}), and none is for {split}: {advice}")
    return {
        "splits": merged,
        "documents": {"read": read, "filtered": filtered, "skipped": dict(sorted(skipped.items()))},
        "checks": merge_checks(unit["checks"] for unit in units),
        "text_bytes": sum(unit["text_bytes"] for unit in units),
        "cpu_seconds": round(sum(unit["cpu_seconds"] for unit in units), 2),
    }


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


def _sizes(store: Store) -> dict[str, int]:
    with user_errors(f"output {store.root}: can't be read"):
        return {name: file.bytes for name, file in store.list().items()}


def _read_json(store: Store, name: str) -> dict[str, Any]:
    with user_errors(f"{join(store.root, name)}: can't be read", ValueError):
        return json.loads(store.read(name))
