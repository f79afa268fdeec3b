"""A conversion's pieces of work: which tasks there are, what decides their result, and the record of a finished one.

A task is a few small files, or some row groups of a large one. Its shards, `documents/<task>.u64` and, last, its record
`tasks/<task>.json` lie in the output under a name that depends on its pieces alone:

    settings        sha256 of everything but the pieces that decides the bytes
    pieces          path, bytes, version and row groups of what was read
    limit           documents and tokens it was stopped at; null: none
    splits          for each split its documents, tokens, rows, bytes, and its shards as MDS describes them
    documents       read, filtered, skipped (by kind), and for a few of the skipped ones what was wrong (`examples`)
    damaged         what was wrong with files of which only a part was taken
    seconds, cpu_seconds, text_bytes
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from biphasic.config.conversion import ConvertConfig
from biphasic.data.reading import Piece
from biphasic.data.sources import Looked, SourceFile
from biphasic.data.tokenizer import Tokenizer

Record = dict[str, Any]
_PACKED, _UNPACKED = (".gz", ".zst"), 3
"""Compressed text is about a third of what it was; how much exactly is known once it has been read."""
_FORMAT = 1
"""Of the rows' bytes: a change to packing or storage that makes other bytes of the same text counts it up."""
FREE = ("output", "tokenizer", "cluster", "on_bad_document", "on_bad_file")
"""Keys that may change between two runs of one conversion: the tokenizer is known by its hash."""
LIMITS = ("max_documents", "max_tokens")
_NOT_BYTES = (*FREE, *LIMITS, "source", "task_bytes")
"""Keys that don't decide what a task's bytes are, or whose part in it its record holds apart."""


@dataclass(frozen=True)
class Limit:
    """How many documents may be read, and how many tokens go to `train`; None: any number."""

    documents: int | None
    tokens: int | None


@dataclass(frozen=True)
class Task:
    """A piece of work: what it reads, and how many bytes of text (as stored) that is."""

    name: str
    pieces: tuple[Piece, ...]
    bytes: int

    def what(self) -> str:
        """The files, for a person."""
        first = self.pieces[0]
        groups = "" if first.row_groups is None else f", row groups {first.row_groups[0]} to {first.row_groups[1] - 1}"
        more = f" and {len(self.pieces) - 1} more" if len(self.pieces) > 1 else ""
        return first.path + groups + more


@dataclass(frozen=True)
class Work:
    """Everything that a worker has to know beside its task; travels to other processes."""

    config: ConvertConfig
    tokenizer: Tokenizer
    settings: str

    @staticmethod
    def of(config: ConvertConfig, tokenizer: Tokenizer) -> Work:
        """What a configuration and its tokenizer make of text."""
        keys = {key: value for key, value in config.model_dump(mode="json").items() if key not in _NOT_BYTES}
        if config.source.kind == "files":
            keys["text_files"] = config.source.text_files
        text = json.dumps([_FORMAT, tokenizer.sha256, keys], sort_keys=True)
        return Work(config, tokenizer, hashlib.sha256(text.encode()).hexdigest())


def plan_tasks(files: list[SourceFile], looks: list[Looked], task_bytes: int) -> list[Task]:
    """Divide the files that can be read into tasks of about `task_bytes` of text, in the files' order.

    A function of the files alone, so that every run of a conversion finds the same tasks.
    """
    tasks: list[Task] = []
    waiting: list[tuple[Piece, int]] = []

    def close() -> None:
        if waiting:
            tasks.append(_task(tuple(piece for piece, _ in waiting), sum(size for _, size in waiting)))
            waiting.clear()

    for file, look in zip(files, looks, strict=True):
        if look.fault is not None:
            continue
        size = sum(look.text_bytes) if look.rows else file.bytes * (_UNPACKED if file.path.endswith(_PACKED) else 1)
        if size > task_bytes and look.rows:
            close()
            for first, end in _groups(look.text_bytes, task_bytes):
                tasks.append(_task((file.piece((first, end)),), sum(look.text_bytes[first:end])))
            continue
        if sum(held for _, held in waiting) + size > task_bytes:
            close()
        waiting.append((file.piece(), size))
    close()
    return tasks


def _groups(sizes: tuple[int, ...], limit: int) -> list[tuple[int, int]]:
    """Neighbouring row groups of at most `limit` bytes together, each the first and the one after the last."""
    found, first, held = [], 0, 0
    for number, size in enumerate(sizes):
        if held and held + size > limit:
            found.append((first, number))
            first, held = number, 0
        held += size
    return [*found, (first, len(sizes))]


def _task(pieces: tuple[Piece, ...], size: int) -> Task:
    text = json.dumps([[piece.path, piece.row_groups] for piece in pieces])
    return Task(hashlib.blake2b(text.encode(), digest_size=6).hexdigest(), pieces, size)


def record_name(task: str) -> str:
    """Where a task's record lies in the output."""
    return f"tasks/{task}.json"


def documents_name(task: str) -> str:
    """Where the numbers of a task's documents lie: `document_number` of each, uint64, little-endian, sorted."""
    return f"documents/{task}.u64"


def pieces_as_json(task: Task) -> list[dict[str, Any]]:
    """What a record says of a task's pieces."""
    return json.loads(json.dumps([asdict(piece) for piece in task.pieces]))


def is_of(record: Record, task: Task, work: Work) -> bool:
    """Whether a record is what `work` makes of this very task: same settings, same pieces in the same version, and
    nothing left out that the YAML does not allow any more."""
    if record.get("settings") != work.settings or record.get("pieces") != pieces_as_json(task):
        return False
    if record["damaged"] and work.config.on_bad_file == "stop":
        return False
    return not (record["documents"]["skipped"] and work.config.on_bad_document == "stop")
