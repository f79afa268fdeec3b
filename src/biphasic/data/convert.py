"""Text to MDS shards of packed rows: read, tokenize, split, pack, write, publish.

The output holds `train/`, `validation/` (with a validation_fraction), `tokenizer/`, and `conversion.json`, the record:

    config              the whole configuration
    source_files        path and bytes of each file that was read
    tokenizer           sha256, vocab_size, pad_id, bos_id, eos_id, mask_id
    sequence_length, dtype, hash
    splits.<split>      documents, tokens, rows, fill (tokens over positions), bytes, index_sha256, and for each shard
                        its file, bytes, rows and hash
    empty_documents     documents without text, left out
    seconds, tokens_per_second
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np

from biphasic.config.conversion import ConvertConfig, FilesSource
from biphasic.config.errors import UserError
from biphasic.data.rows import (
    DocumentPacker,
    Row,
    RowMaker,
    StreamCutter,
    Tokens,
    columns,
    in_validation,
    padded,
    token_dtype,
)
from biphasic.data.sources import Columns, Document, SourceFile, count_documents, find_files, read_files, read_hub
from biphasic.data.storage import Destination, destination, read_record, short
from biphasic.data.tokenizer import Tokenizer, load_tokenizer

HASH = "xxh64"
"""Hash of the shard files; Streaming compares it when it opens them."""
_BATCH_CHARACTERS = 2_000_000


def convert(config: ConvertConfig) -> dict[str, Any]:
    """Convert as a `job: convert` YAML says; when that has been done already, do nothing.

    Returns:
        The record (see the module's docstring).

    Raises:
        UserError: source, tokenizer or output can't be used. Nothing that looks finished is left.
    """
    done = read_record(config.output)
    tokenizer = load_tokenizer(config.tokenizer)
    ends = _ends(config, tokenizer)
    files = find_files(config.source) if isinstance(config.source, FilesSource) else []
    if done is not None:
        _require_same(done, config, tokenizer, files)
        print(f"{config.output}: already converted from the same text with the same settings; nothing to do")
        return done
    names = Columns(config.text_column, config.id_column)
    if isinstance(config.source, FilesSource):
        count, documents = count_documents(files, names), read_files(files, names)
        what = f"{len(files)} file{'s' * (len(files) > 1)} ({sum(file.bytes for file in files) / 1e6:,.1f} MB)"
    else:
        count, documents, what = None, read_hub(config.source, names), config.source.path
    if config.max_documents is not None:
        documents = islice(documents, config.max_documents)
        count = None if count is None else min(count, config.max_documents)
    print(f"converting {what} to {config.output}: MDS shards of rows of {config.sequence_length} tokens")

    place = destination(config.output)
    try:
        record = _write(config, tokenizer, ends, documents, count, place)
        record["source_files"] = [{"path": file.path, "bytes": file.bytes} for file in files]
        place.publish(record)
    except OSError as error:
        place.abandon()
        raise UserError(f"output {config.output}: can't be written ({short(error)})") from error
    except BaseException:
        place.abandon()
        raise
    return record


def summary(output: str, record: dict[str, Any]) -> str:
    """What a conversion gave, for the terminal: a line for each split."""
    lines = [
        f"{name}: {split['documents']:,} documents, {split['tokens']:,} tokens in {split['rows']:,} rows of "
        f"{record['sequence_length']} ({100 * split['fill']:.2f}% filled), {len(split['shards'])} shards, "
        f"{split['bytes'] / 1e6:,.1f} MB"
        for name, split in record["splits"].items()
    ]
    speed = f"{record['seconds']:.1f} s, {record['tokens_per_second']:,.0f} tokens/s"
    return "\n".join([*lines, f"{output}: {speed}"])


def _ends(config: ConvertConfig, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids to put before and after each document."""
    before = [tokenizer.require("bos")] if config.add_bos else []
    after = [tokenizer.require("eos")] if config.add_eos else []
    return before, after


def _require_same(done: dict[str, Any], config: ConvertConfig, tokenizer: Tokenizer, files: list[SourceFile]) -> None:
    """Raise a UserError that names what differs between a finished conversion and the one that is asked for."""
    old, new = dict(done["config"]), config.model_dump(mode="json")
    different = [key for key in new if key not in ("output", "tokenizer") and old.get(key) != new[key]]
    if done["tokenizer"]["sha256"] != tokenizer.sha256:
        different.append("tokenizer")
    if done["source_files"] != [{"path": file.path, "bytes": file.bytes} for file in files] and not different:
        different.append("the files of the source")
    if different:
        message = f"output {config.output} holds a conversion with other settings ({', '.join(different)})"
        raise UserError(f"{message}: choose another output, or remove it")


def _write(
    config: ConvertConfig,
    tokenizer: Tokenizer,
    ends: tuple[list[int], list[int]],
    documents: Iterator[Document],
    count: int | None,
    place: Destination,
) -> dict[str, Any]:
    """Convert all documents into files at `place`; returns the record."""
    from tqdm import tqdm

    dtype = token_dtype(tokenizer.vocab_size)
    splits = {"train": _Split("train", config, tokenizer, place)}
    if config.validation_fraction:
        splits["validation"] = _Split("validation", config, tokenizer, place)
    start = time.monotonic()
    seen = empty = tokens = 0
    with tqdm(desc="tokens", unit="tok", unit_scale=True, smoothing=0.05) as bar:
        for batch, encoded in _encoded(documents, tokenizer):
            before = tokens
            for document, ids in zip(batch, encoded, strict=True):
                if not ids:
                    empty += 1
                    continue
                array: Tokens = np.array(ends[0] + ids + ends[1], dtype=dtype)
                held_out = in_validation(document.id, config.validation_fraction)
                splits["validation" if held_out else "train"].add(array)
                tokens += len(array)
            seen += len(batch)
            # The files say how many documents there are: what they will give in tokens is an estimate that improves.
            bar.total = None if count is None else max(tokens, round(tokens * count / seen))
            bar.update(tokens - before)
    for split in splits.values():
        split.finish()
        if not split.documents:
            hint = (
                "raise validation_fraction or add documents" if split.name == "validation" else "is the source empty?"
            )
            raise UserError(f"{seen:,} documents were read ({empty:,} empty), and none is for {split.name}: {hint}")
    tokenizer.save(place.folder / "tokenizer")
    seconds = time.monotonic() - start
    return {
        "config": config.model_dump(mode="json"),
        "tokenizer": {
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            **{f"{role}_id": getattr(tokenizer, f"{role}_id") for role in ("pad", "bos", "eos", "mask")},
        },
        "sequence_length": config.sequence_length,
        "dtype": dtype,
        "hash": HASH,
        "splits": {name: split.record() for name, split in splits.items()},
        "empty_documents": empty,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(tokens / seconds),
    }


def _encoded(documents: Iterator[Document], tokenizer: Tokenizer) -> Iterator[tuple[list[Document], list[list[int]]]]:
    """Documents in batches, with their token ids. The next batch is encoded while the caller works on this one."""
    with ThreadPoolExecutor(1) as pool:
        ahead: tuple[list[Document], Future[list[list[int]]]] | None = None
        for batch in _batches(documents):
            coming = (batch, pool.submit(tokenizer.encode, [document.text for document in batch]))
            if ahead is not None:
                yield ahead[0], ahead[1].result()
            ahead = coming
        if ahead is not None:
            yield ahead[0], ahead[1].result()


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


def row_maker(config: ConvertConfig) -> RowMaker:
    """What turns documents into rows, as the YAML's `segments:` says."""
    segments = config.segments
    if segments.kind == "stream":
        return StreamCutter(config.sequence_length, segments.shortest, config.seed)
    return DocumentPacker(config.sequence_length, segments.window)


class _Split:
    """One split's rows on their way into shards, and their counts."""

    def __init__(self, name: str, config: ConvertConfig, tokenizer: Tokenizer, place: Destination):
        from streaming import MDSWriter

        self.name = name
        self.documents = self.tokens = self.rows = 0
        self._length, self._pad = config.sequence_length, tokenizer.pad_id
        self._place = place
        self._maker = row_maker(config)
        # Not as a context manager: leaving that by an error would write an index, as if all were well.
        self._writer = MDSWriter(
            columns=columns(config.sequence_length, token_dtype(tokenizer.vocab_size)),
            out=str(place.folder / name),
            compression=config.compression,
            hashes=[HASH],
            size_limit=config.shard_bytes,
        )
        self._announced = 0

    def add(self, tokens: Tokens) -> None:
        """Take one document."""
        self.documents += 1
        self._store(self._maker.add(tokens))

    def finish(self) -> None:
        """Write the last rows and the index."""
        self._store(self._maker.finish())
        self._writer.finish()
        self._announce()
        index = (self._place.folder / self.name / "index.json").read_bytes()
        self._index_sha256 = hashlib.sha256(index).hexdigest()
        self._place.written(f"{self.name}/index.json")

    def record(self) -> dict[str, Any]:
        """What the conversion's record says of this split."""
        shards = []
        for shard in self._writer.shards:
            file = shard["zip_data"] or shard["raw_data"]
            shards.append({"file": file["basename"], "bytes": file["bytes"], "rows": shard["samples"],
                           "hash": file["hashes"][HASH]})  # fmt: skip
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "rows": self.rows,
            "fill": self.tokens / (self.rows * self._length),
            "bytes": sum(shard["bytes"] for shard in shards),
            "index_sha256": self._index_sha256,
            "shards": shards,
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
            file = shard["zip_data"] or shard["raw_data"]
            self._place.written(f"{self.name}/{file['basename']}")
            self._announced += 1
