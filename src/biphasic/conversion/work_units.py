"""Divide a conversion into work units, and define the records of finished units.

A work unit is a few small files, or some row groups of a large one. The output holds its shards and, written last, its
record `units/<unit>.json`. The unit's name depends only on its files. The record:

    settings        sha256 of what determines the bytes, apart from the files
    files           path, bytes, version and row groups of each file that was read
    stopped_at      number of training tokens at which the unit was stopped; null if it was read to its end
    splits          documents, tokens, rows and bytes of each split, and its shards' entries in the MDS index
    documents       read, filtered, skipped (by kind), and the reasons for a few of the skipped ones (`examples`)
    damaged         messages about files that were read only in part
    checks          counts of `TextChecks`: names of special tokens in the text, and what the tokenizer doesn't know
    seconds, cpu_seconds, text_bytes
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from biphasic.config.convert import ConvertConfig
from biphasic.conversion.source_files import SourceFile, compression_of
from biphasic.conversion.sources import FileLayout
from biphasic.data.packing import validation_end
from biphasic.data.tokenizer import Tokenizer
from biphasic.grouping import groups_up_to

UnitRecord = dict[str, Any]
_COMPRESSION_RATIO = 3
"""Compressed text is estimated at three times its stored size, because its true size is known only after reading it."""
_FORMAT = 3
"""Version of the row format. Increment it when reading, packing or storage gives other bytes for the same text."""
FREE_KEYS = ("output", "tokenizer", "cluster", "on_bad_document", "on_bad_file")
"""Keys that may change between two starts of a conversion, whose finished units stay valid. The tokenizer's path may
change, but not its hash."""
_NO_BYTES_KEYS = (*FREE_KEYS, "max_tokens", "source", "unit_bytes")
"""Keys that are left out of the settings' hash: they don't affect a unit's bytes, or its record stores them separately."""


@dataclass(frozen=True)
class WorkUnit:
    """The files that a unit reads, and an estimate of the bytes of text in them."""

    files: tuple[SourceFile, ...]
    bytes: int

    @cached_property
    def name(self) -> str:
        """The unit's name, a hash of its files' names and row groups."""
        text = json.dumps([[file.path, file.row_groups] for file in self.files])
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    @property
    def description(self) -> str:
        """Return a description of the files, for messages."""
        first = self.files[0]
        groups = "" if first.row_groups is None else f", row groups {first.row_groups[0]} to {first.row_groups[1] - 1}"
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return first.path + groups + more

    @property
    def files_as_json(self) -> list[dict[str, Any]]:
        """Return the files as a record lists them."""
        return json.loads(json.dumps([asdict(file) for file in self.files]))


@dataclass(frozen=True)
class ConversionContext:
    """The configuration and tokenizer that all units share, and the hash of the settings that affect the bytes.

    Documents whose `document_number` is below `validation_end` are for validation.
    """

    config: ConvertConfig
    tokenizer: Tokenizer
    settings: str
    validation_end: int

    @staticmethod
    def of(config: ConvertConfig, tokenizer: Tokenizer, end: int | None = None) -> ConversionContext:
        """Build the context, and hash the settings. By default `validation_fraction` gives `validation_end`."""
        default = validation_end(config.validation_fraction)
        end = default if end is None else end
        keys = {key: value for key, value in config.model_dump(mode="json").items() if key not in _NO_BYTES_KEYS}
        keys["separator"] = config.source.separator
        if config.source.kind == "files":
            keys["text_files"] = config.source.text_files
        keys |= {"validation_end": end} if end != default else {}
        text = json.dumps([_FORMAT, tokenizer.sha256, tokenizer.role_ids, keys], sort_keys=True)
        return ConversionContext(config, tokenizer, hashlib.sha256(text.encode()).hexdigest(), end)


def plan_work_units(layouts: list[FileLayout], unit_bytes: int) -> list[WorkUnit]:
    """Divide the readable files into units of about `unit_bytes` of text, in the files' order.

    The units depend only on the files and `unit_bytes`, so all starts of a conversion plan the same ones.
    """
    units: list[WorkUnit] = []

    def size_of(layout: FileLayout) -> int:
        ratio = _COMPRESSION_RATIO if compression_of(layout.file.path) else 1
        return sum(layout.text_bytes) if layout.text_bytes else layout.file.bytes * ratio

    readable = (layout for layout in layouts if layout.fault is None)
    for is_divided, group in groupby(readable, lambda layout: bool(layout.text_bytes) and size_of(layout) > unit_bytes):
        if not is_divided:
            for small in groups_up_to(unit_bytes, group, size_of):
                units.append(WorkUnit(tuple(layout.file for layout in small), sum(map(size_of, small))))
            continue
        for layout in group:
            sizes = layout.text_bytes
            for groups in groups_up_to(unit_bytes, range(len(sizes)), sizes.__getitem__):
                part = replace(layout.file, row_groups=(groups[0], groups[-1] + 1))
                units.append(WorkUnit((part,), sum(sizes[number] for number in groups)))
    return units


def unit_record_file(unit: str) -> str:
    """Return the name of a unit's record in the output."""
    return f"units/{unit}.json"


def is_valid(record: UnitRecord, unit: WorkUnit, context: ConversionContext) -> bool:
    """Return whether a record describes this unit with the same settings and the same versions of its files.

    If documents were skipped or files read only in part, the record is valid only if the YAML's `on_bad_document` and
    `on_bad_file` allow it.
    """
    if record.get("settings") != context.settings or record.get("files") != unit.files_as_json:
        return False
    if record["damaged"] and context.config.on_bad_file == "stop":
        return False
    return not (record["documents"]["skipped"] and context.config.on_bad_document == "stop")
