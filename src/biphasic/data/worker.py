"""One task of a conversion: read, tokenize, split, pack, write its shards, and leave its record."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from biphasic.config.conversion import ConvertConfig
from biphasic.config.errors import UserError
from biphasic.data.reading import FILTERED, DamagedFile, Document, Reading, Skipped, read_documents
from biphasic.data.rows import (
    DocumentPacker,
    Row,
    RowMaker,
    SingleRows,
    StreamCutter,
    Tokens,
    columns,
    document_number,
    held_out,
    padded,
    token_dtype,
)
from biphasic.data.tokenizer import Tokenizer
from biphasic.data.work import Limit, Record, Task, Work, documents_name, pieces_as_json, record_name
from biphasic.storage import Store, as_bytes, store

HASH = "xxh64"
"""Hash of the shard files; Streaming compares it when it opens them."""
_BATCH_CHARACTERS = 2_000_000
_LONGEST_PART = 1 << 20
"""A longer text is tokenized in parts of so many characters: the tokenizer's memory grows with a text's length."""
_EXAMPLES = 5
_UPLOADS = 4

Report = Callable[[int, int], None]
"""Takes the tokens and the bytes of text that have been done since the last call."""


def convert_task(work: Work, task: Task, limit: Limit, report: Report) -> Record:
    """Convert one task into its shards.

    The bytes depend on the configuration, the tokenizer, the task's pieces and the limit, and on nothing else.

    Args:
        work: what to make of text.
        task: what to read.
        limit: where to stop.
        report: is told of progress, about every second.

    Returns:
        The task's record, which has been stored.

    Raises:
        DamagedFile: a file can't be read to its end, and the YAML says to stop.
        UserError: a document or a column stops the conversion.
        OSError: the output can't be written.
    """
    place = store(work.config.output)
    scratch = place.scratch()
    try:
        return _Conversion(work, task, limit, report, place, scratch).run()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def document_ends(config: ConvertConfig, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids to put before and after each document."""
    before = [tokenizer.require("bos")] if config.add_bos else []
    after = [tokenizer.require("eos")] if config.add_eos else []
    return before, after


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Token ids of each text. A very long text is cut before a line or a word, so that its tokens are nearly those of the
    whole."""
    parts: list[str] = []
    counts = []
    for text in texts:
        found = [text] if len(text) <= _LONGEST_PART else list(_parts(text))
        parts += found
        counts.append(len(found))
    encoded = iter(tokenizer.encode(parts))
    return [next(encoded) if count == 1 else [id for _ in range(count) for id in next(encoded)] for count in counts]


def _parts(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _LONGEST_PART:
        end = start + _LONGEST_PART
        for sign in ("\n", " "):
            if (found := text.rfind(sign, start + _LONGEST_PART // 2, end)) > 0:
                end = found
                break
        yield text[start:end]
        start = end
    yield text[start:]


def row_maker(config: ConvertConfig, task: str, split: str) -> RowMaker:
    """What turns a split's documents into rows, as the YAML's `segments:` says."""
    segments, size = config.segments, config.sequence_length
    if segments.kind == "stream":
        text = f"cuts {config.seed} {task} {split}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        return StreamCutter(size, segments.shortest, seed)
    if segments.kind == "single":
        return SingleRows(size, truncate=segments.longer == "truncate")
    return DocumentPacker(size, segments.window)


class _Conversion:
    """The state of a task while it runs."""

    def __init__(self, work: Work, task: Task, limit: Limit, report: Report, place: Store, scratch: Path):
        self.work, self.task, self.limit, self.report = work, task, limit, report
        self.config, self.place, self.scratch = work.config, place, scratch
        self.read = self.filtered = 0
        self.skipped: Counter[str] = Counter()
        self.examples: list[str] = []
        self.damaged: list[str] = []
        self.numbers: list[int] = []
        self.text_bytes = 0
        self.uploads = _Uploads(place, scratch)
        self.splits = {name: _Split(name, work, task, self.uploads) for name in self.config.splits}

    def run(self) -> Record:
        start, cpu = time.monotonic(), time.process_time()
        ends = document_ends(self.config, self.work.tokenizer)
        dtype = np.dtype(token_dtype(self.work.tokenizer.vocab_size))
        truncated = self.config.segments.kind == "single" and self.config.segments.longer == "truncate"
        longest = self.config.sequence_length if truncated else None
        full = False
        for batch, encoded in _encoded(_batches(self._documents()), self.work.tokenizer):
            done = size = 0
            for document, ids in zip(batch, encoded, strict=True):
                tokens: Tokens = np.array((ends[0] + ids + ends[1])[:longest], dtype=dtype)
                done += self._take(document, tokens)
                size += len(document.text.encode("utf-8", "surrogatepass"))
                if full := self._is_full():
                    break
            self.text_bytes += size
            self.report(done, size)
            if full:
                break
        for split in self.splits.values():
            split.finish()
        return self._finish(time.monotonic() - start, time.process_time() - cpu)

    def _documents(self) -> Iterator[Document]:
        """The task's documents; what gives none is counted."""
        reading = Reading.of(self.config)
        for piece in self.task.pieces:
            try:
                for found in read_documents(piece, reading):
                    if self.limit.documents is not None and self.read >= self.limit.documents:
                        return
                    self.read += 1
                    if isinstance(found, Document):
                        yield found
                    else:
                        self._skip(found)
            except DamagedFile as error:
                if self.config.on_bad_file == "stop":
                    raise
                self.damaged.append(str(error))

    def _skip(self, found: Skipped) -> None:
        if found.kind == FILTERED:
            self.filtered += 1
            return
        if self.config.on_bad_document == "stop":
            raise UserError(f"source {found.where}: {found.what}; mend it, or set on_bad_document: skip")
        self.skipped[found.kind] += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(f"{found.where}: {found.what}")

    def _take(self, document: Document, tokens: Tokens) -> int:
        """Give a document to its split; returns the tokens that were taken."""
        number = document_number(document.id)
        if held_out(number, self.config.validation_fraction):
            split = self.splits["validation"]
        else:
            split = self.splits["train"]
            if self.limit.tokens is not None:
                tokens = tokens[: self.limit.tokens - split.taken]
        split.add(tokens)
        self.numbers.append(number)
        return len(tokens)

    def _is_full(self) -> bool:
        return self.limit.tokens is not None and self.splits["train"].taken >= self.limit.tokens

    def _finish(self, seconds: float, cpu_seconds: float) -> Record:
        self.uploads.wait()
        numbers = np.sort(np.array(self.numbers, dtype="<u8"))
        self.place.write(documents_name(self.task.name), numbers.tobytes())
        skipped: dict[str, Any] = {"skipped": dict(sorted(self.skipped.items())), "examples": self.examples}
        record = {
            "settings": self.work.settings,
            "pieces": pieces_as_json(self.task),
            "limit": {"documents": self.limit.documents, "tokens": self.limit.tokens},
            "splits": {name: split.record() for name, split in self.splits.items()},
            "documents": {"read": self.read, "filtered": self.filtered, **skipped},
            "damaged": self.damaged,
            "text_bytes": self.text_bytes,
            "seconds": round(seconds, 3),
            "cpu_seconds": round(cpu_seconds, 3),
        }
        self.place.write(record_name(self.task.name), as_bytes(record))
        return record


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encoded(
    batches: Iterator[list[Document]], tokenizer: Tokenizer
) -> Iterator[tuple[list[Document], list[list[int]]]]:
    """Batches with their token ids. The next batch is encoded while the caller works on this one."""
    with ThreadPoolExecutor(1) as pool:
        ahead: tuple[list[Document], Future[list[list[int]]]] | None = None
        for batch in batches:
            coming = (batch, pool.submit(encode, tokenizer, [document.text for document in batch]))
            if ahead is not None:
                yield ahead[0], ahead[1].result()
            ahead = coming
        if ahead is not None:
            yield ahead[0], ahead[1].result()


class _Uploads:
    """Moves finished files from the scratch folder to the output, a few at a time, while the work goes on."""

    def __init__(self, place: Store, scratch: Path):
        self.place, self.scratch = place, scratch
        self._pool = ThreadPoolExecutor(_UPLOADS)
        self._running: list[Future[None]] = []

    def add(self, file: Path, name: str) -> None:
        """Move a file; raises what an earlier one ran into."""
        for upload in [upload for upload in self._running if upload.done()]:
            upload.result()
            self._running.remove(upload)
        # No more than a few files wait on this machine's disk.
        while len(self._running) >= 2 * _UPLOADS:
            self._running.pop(0).result()
        self._running.append(self._pool.submit(self.place.take, file, name))

    def wait(self) -> None:
        """Until everything is moved."""
        for upload in self._running:
            upload.result()
        self._pool.shutdown()


class _Split:
    """One split's rows on their way into shards, and their counts. `taken` counts tokens that came in, `tokens` those
    that were written."""

    def __init__(self, name: str, work: Work, task: Task, uploads: _Uploads):
        from streaming import MDSWriter

        config, tokenizer = work.config, work.tokenizer
        self.name = name
        self.documents = self.taken = self.tokens = self.rows = 0
        self._task, self._uploads = task.name, uploads
        self._length, self._pad = config.sequence_length, tokenizer.pad_id
        self._maker = row_maker(config, task.name, name)
        self._folder = uploads.scratch / name
        # Not as a context manager: leaving that by an error would write an index, as if all were well.
        self._writer = MDSWriter(
            columns=columns(config.sequence_length, token_dtype(tokenizer.vocab_size)),
            out=str(self._folder),
            compression=config.compression,
            hashes=[HASH],
            size_limit=config.shard_bytes,
        )
        self._announced = 0

    def add(self, tokens: Tokens) -> None:
        """Take one document."""
        self.documents += 1
        self.taken += len(tokens)
        self._store(self._maker.add(tokens))

    def finish(self) -> None:
        """Write the last rows."""
        self._store(self._maker.finish())
        if self.rows:
            self._writer.finish()
        self._announce()

    def record(self) -> dict[str, Any]:
        """What the task's record says of this split."""
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "rows": self.rows,
            "bytes": sum((shard["zip_data"] or shard["raw_data"])["bytes"] for shard in self._writer.shards),
            "shards": self._writer.shards,
        }

    def _store(self, rows: list[Row]) -> None:
        for row in rows:
            self._writer.write(padded(row, self._length, self._pad))
            self.tokens += len(row.tokens)
            self.rows += 1
        if rows:
            self._announce()

    def _announce(self) -> None:
        for shard in self._writer.shards[self._announced :]:
            file = (shard["zip_data"] or shard["raw_data"])["basename"]
            self._uploads.add(self._folder / file, f"{self.name}/{self._task}/{file}")
            self._announced += 1
