"""Divide a conversion into work units, and convert one: read, tokenize, split, pack, write shards, and last its record.

A work unit is a few small files, or some row groups of a large one. The output holds its shards and, written last, its
record `units/<unit>.json`. The unit's name depends only on its files. The record:

    settings        sha256 of what determines the bytes, apart from the files
    files           path, bytes, version and row groups of each file that was read
    stopped_at      number of training tokens at which the unit was stopped; null if it was read to its end
    splits          documents, tokens, rows and bytes of each split, and its shards' entries in the MDS index
    documents       read, filtered, skipped (by kind), and the reasons for a few of the skipped ones (`examples`)
    damaged         messages about files that were read only in part
    backend         library that encoded the text: tokenizers or gigatoken
    difference      null, or what gigatoken encoded otherwise in this conversion, which therefore uses tokenizers
    checks          counts of `TextChecks`: names of special tokens in the text, and what the tokenizer doesn't know
    seconds, cpu_seconds, text_bytes
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain, groupby, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from biphasic.config.convert import ConvertConfig
from biphasic.conversion.reading import FILTERED, Document, Skipped, read_up_to_damage
from biphasic.conversion.shard_writer import ShardWriter
from biphasic.conversion.source_files import SourceFile, compression_of, read_ahead, require_unchanged
from biphasic.conversion.sources import FileLayout
from biphasic.conversion.tokenizer_checks import TextChecks
from biphasic.data.bulk_encoding import Backend, BulkEncoder
from biphasic.data.mds_reader import shard_file
from biphasic.data.packing import (
    DocumentPacker,
    Row,
    StreamCutter,
    Tokens,
    document_number,
    token_dtype,
    validation_end,
)
from biphasic.data.tokenizer import Tokenizer
from biphasic.errors import UserError
from biphasic.grouping import groups_up_to
from biphasic.storage import Store, json_bytes, open_store

UnitRecord = dict[str, Any]
Records = dict[str, UnitRecord]
"""Records of work units by the units' names."""
_COMPRESSION_RATIO = 3
"""Compressed text is estimated at three times its stored size, because its true size is known only after reading it."""
_FORMAT = 3
"""Version of the row format. Increment it when reading, packing or storage gives other bytes for the same text."""
FREE_KEYS = ("output", "tokenizer", "tokenizer_backend", "cluster", "on_bad_document", "on_bad_file")
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

    Documents whose `document_number` is below `validation_end` are for validation. `backend` encodes the text; `difference`
    says what gigatoken encoded otherwise, so that its units are not valid.
    """

    config: ConvertConfig
    tokenizer: Tokenizer
    settings: str
    validation_end: int
    backend: Backend = "tokenizers"
    difference: str | None = None

    @staticmethod
    def of(config: ConvertConfig, tokenizer: Tokenizer, end: int | None = None) -> ConversionContext:
        """Build the context, and hash the settings. By default `validation_fraction` gives `validation_end`.

        Raises a UserError if the tokenizer lacks a token that `add_bos` or `add_eos` needs.
        """
        boundary_tokens(config, tokenizer)
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
    if context.difference is not None and record["backend"] != "tokenizers":
        return False
    return not (record["documents"]["skipped"] and context.config.on_bad_document == "stop")


_BATCH_CHARACTERS = 2_000_000
_PART_CHARACTERS = 1 << 20
"""Longer texts are tokenized in parts of this length, because the tokenizer's memory grows with a text's length."""
_COMPARED = 100
"""One document in so many, chosen by its number, is encoded by `tokenizers` too."""
_EXAMPLES = 5
_UPLOADS = 4

Report = Callable[[int, int], None]
"""Progress callback that takes the tokens and text bytes converted since the last call."""


def convert_unit(
    context: ConversionContext, encoder: BulkEncoder, unit: WorkUnit, max_tokens: int | None, report: Report
) -> UnitRecord:
    """Convert one work unit into its shards, store its record and return it.

    The bytes depend only on the configuration, the tokenizer, the unit's files and `max_tokens`, the number of training
    tokens at which to stop. A unit with fewer gives the same bytes and record as without a limit (None).
    `report` is called after each batch of documents.

    Raises:
        DamagedFileError: a file can't be read to its end, and the YAML says to stop.
        DifferentIdsError: gigatoken encodes one of the documents that are compared otherwise than tokenizers.
        UserError: a document can't be used and the YAML says to stop, or a column is missing or of the wrong type.
        OSError: the output can't be written.
    """
    conversion = _UnitConversion(context, encoder, unit, max_tokens)
    try:
        return conversion.run(report)
    finally:
        shutil.rmtree(conversion.uploads.scratch, ignore_errors=True)


def boundary_tokens(config: ConvertConfig, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the token ids to add before and after each document."""
    before = [tokenizer.require("bos")] if config.add_bos else []
    after = [tokenizer.require("eos")] if config.add_eos else []
    return before, after


def encode_texts(encoder: BulkEncoder, texts: Sequence[str], compared: Iterable[int] = ()) -> list[NDArray[np.integer]]:
    """Return the token ids [tokens] of each text. A very long text is cut between lines or words, which changes few tokens.

    The texts with the numbers `compared` are encoded by both libraries: raises a DifferentIdsError if one differs.
    """
    parts = [list(_parts(text)) for text in texts]
    encoded = iter(encoder.encode([part for text in parts for part in text]))
    encoded = [list(islice(encoded, len(text))) for text in parts]
    for number in compared:
        for part, ids in zip(parts[number], encoded[number], strict=True):
            encoder.compare(part, ids)
    return [ids[0] if len(ids) == 1 else np.concatenate(ids) for ids in encoded]


def _parts(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _PART_CHARACTERS:
        end = start + _PART_CHARACTERS
        breaks = (text.rfind(character, start + _PART_CHARACTERS // 2, end) for character in "\n ")
        end = next((position for position in breaks if position > 0), end)
        yield text[start:end]
        start = end
    yield text[start:]


class _UnitConversion:
    def __init__(self, context: ConversionContext, encoder: BulkEncoder, unit: WorkUnit, max_tokens: int | None):
        self.context, self.encoder, self.unit, self.max_tokens = context, encoder, unit, max_tokens
        self.config, self.store = context.config, open_store(context.config.output)
        self.read = self.filtered = self.text_bytes = 0
        self.skipped: Counter[str] = Counter()
        self.examples, self.damaged = list[str](), list[str]()
        self.checks = TextChecks(context.tokenizer)
        self.stopped = False
        # Remove an earlier record, because this conversion replaces the shards that it describes.
        self.store.remove([unit_record_file(unit.name)])
        self.uploads = _Uploads(self.store)
        self.splits = {name: _Split(name, context, unit, self.uploads) for name in self.config.splits}

    def run(self, report: Report) -> UnitRecord:
        start, cpu = time.monotonic(), time.process_time()
        for batch in self._encoded():
            earlier, text_bytes = sum(split.tokens for split in self.splits.values()), self.text_bytes
            for document, number, tokens in batch:
                self._add(document, number, tokens)
                if self.stopped:
                    break
            report(sum(split.tokens for split in self.splits.values()) - earlier, self.text_bytes - text_bytes)
            if self.stopped:
                break
        for split in self.splits.values():
            split.finish()
        self.uploads.wait()
        return self._store_record(time.monotonic() - start, time.process_time() - cpu)

    def _encoded(self) -> Iterator[list[tuple[Document, int, Tokens]]]:
        """Yield batches of documents with their numbers and tokens. The next batch is encoded while one is used."""
        batches = groups_up_to(_BATCH_CHARACTERS, self._documents(), lambda document: len(document.text))
        with ThreadPoolExecutor(1) as pool:
            submitted = (pool.submit(self._encode, batch) for batch in chain(batches, [[]]))  # the last is not yielded
            for encoded, _ in pairwise(submitted):
                yield encoded.result()

    def _encode(self, batch: list[Document]) -> list[tuple[Document, int, Tokens]]:
        dtype = token_dtype(self.context.tokenizer.vocab_size)
        first, last = (np.array(ids, dtype) for ids in boundary_tokens(self.config, self.context.tokenizer))
        numbers = [document_number(document.id) for document in batch]
        compared = [place for place, number in enumerate(numbers) if number % _COMPARED == 0]
        encoded = encode_texts(self.encoder, [document.text for document in batch], compared)
        return [
            (document, number, np.concatenate((first, ids, last), dtype=dtype, casting="unsafe"))
            for document, number, ids in zip(batch, numbers, encoded, strict=True)
        ]

    def _documents(self) -> Iterator[Document]:
        for file in read_ahead(self.unit.files):
            for entry in read_up_to_damage(file, self.config, self.damaged):
                self.read += 1
                if isinstance(entry, Document):
                    yield entry
                else:
                    self._skip(entry)
            require_unchanged(file)

    def _skip(self, entry: Skipped) -> None:
        if entry.kind == FILTERED:
            self.filtered += 1
            return
        if self.config.on_bad_document == "stop":
            raise UserError(f"source {entry.where}: {entry.reason}; fix the file, or set on_bad_document: skip")
        self.skipped[entry.kind] += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"{entry.where}: {entry.reason}")

    def _add(self, document: Document, number: int, tokens: Tokens) -> None:
        """Add a document to its split. In `train`, it is cut where the limit is reached."""
        split = self.splits["validation" if number < self.context.validation_end else "train"]
        if split.name == "train" and self.max_tokens is not None:
            room = self.max_tokens - split.tokens
            tokens, self.stopped = tokens[:room], len(tokens) >= room
        split.add(tokens)
        text = document.text
        self.checks.add(text, tokens)
        self.text_bytes += len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))

    def _store_record(self, seconds: float, cpu_seconds: float) -> UnitRecord:
        skipped: dict[str, Any] = {"skipped": dict(sorted(self.skipped.items())), "examples": self.examples}
        record = {
            "settings": self.context.settings,
            "files": self.unit.files_as_json,
            "stopped_at": self.max_tokens if self.stopped else None,
            "splits": {name: split.record() for name, split in self.splits.items()},
            "documents": {"read": self.read, "filtered": self.filtered, **skipped},
            "damaged": self.damaged,
            "backend": self.context.backend,
            "difference": self.context.difference,
            "checks": self.checks.record(),
            "text_bytes": self.text_bytes,
            "seconds": round(seconds, 3),
            "cpu_seconds": round(cpu_seconds, 3),
        }
        self.store.write(unit_record_file(self.unit.name), json_bytes(record))
        return record


class _Uploads:
    """Moves finished files from the scratch folder to the output in the background, a few at a time."""

    def __init__(self, store: Store):
        self.store, self.scratch = store, store.scratch()
        self._pool = ThreadPoolExecutor(_UPLOADS)
        self._running: list[Future[None]] = []

    def add(self, file: Path, name: str) -> None:
        """Start to move a file, and raise the error of an earlier move, if any."""
        # Only a few files may wait on the local disk.
        while self._running and (self._running[0].done() or len(self._running) >= 2 * _UPLOADS):
            self._running.pop(0).result()
        self._running.append(self._pool.submit(self.store.move, file, name))

    def wait(self) -> None:
        for upload in self._running:
            upload.result()
        self._pool.shutdown()


class _Split:
    """One split's packer, shard writer and counts. `tokens` counts those added: all of them are written at the end."""

    def __init__(self, name: str, context: ConversionContext, unit: WorkUnit, uploads: _Uploads):
        config, tokenizer, segments = context.config, context.tokenizer, context.config.segments
        self.name, self._unit, self._uploads = name, unit.name, uploads
        self.documents = self.tokens = self.rows = self._uploaded = 0
        length = config.sequence_length
        if segments.kind == "stream":
            seed = document_number(f"cuts {config.seed} {unit.name} {name}")
            self._packer = StreamCutter(length, segments.shortest, seed)
        else:
            self._packer = DocumentPacker(length, 0 if segments.kind == "single" else segments.window)
        folder, dtype = uploads.scratch / name, token_dtype(tokenizer.vocab_size)
        self._writer = ShardWriter(folder, length, dtype, tokenizer.pad_id, config.compression, config.shard_bytes)

    def add(self, tokens: Tokens) -> None:
        self.documents += 1
        self.tokens += len(tokens)
        self._write(self._packer.add(tokens))

    def finish(self) -> None:
        self._write(self._packer.finish())
        self._writer.finish()
        self._upload_shards()

    def record(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("documents", "tokens", "rows")}
        stored = sum(shard_file(shard)["bytes"] for shard in self._writer.shards)
        return {**counts, "bytes": stored, "shards": self._writer.shards}

    def _write(self, rows: list[Row]) -> None:
        for row in rows:
            self._writer.write(row)
            self.rows += 1
        self._upload_shards()

    def _upload_shards(self) -> None:
        for shard in self._writer.shards[self._uploaded :]:
            file = shard_file(shard)["basename"]
            self._uploads.add(self._uploads.scratch / self.name / file, f"{self.name}/{self._unit}/{file}")
            self._uploaded += 1
