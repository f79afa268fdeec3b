"""The files of text that a conversion reads: their names, their compression, and the errors of reading them."""

import codecs
import io
import posixpath
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO, NoReturn

from biphasic.errors import UserError, first_line
from biphasic.grouping import mapped_ahead
from biphasic.storage import StoredFile, filesystem, is_remote, is_unreachable, open_store, user_error, user_errors
from biphasic.storage.hub import hub_errors

READ_BYTES = 1 << 20
JSON_KINDS = ("jsonl", "ndjson", "json")
"""Suffixes of files of JSON: an object in each line, or an array of objects."""
TEXT_KINDS = ("txt", "md", "markdown", "rst")
"""Suffixes of plain text files. Markdown and reStructuredText are read as they are, markup included."""
KINDS = ("parquet", *JSON_KINDS, "csv", "tsv", *TEXT_KINDS)
"""Suffixes of files that are read, in upper or lower case."""
COMPRESSIONS = (".gz", ".zst")
"""Suffixes of compressed files; Parquet compresses by itself."""
_PIECE_BYTES = {".gz": 1 << 16, ".zst": 1 << 13}
"""Compressed bytes that are unpacked at once. Of a piece with an error zstd gives nothing; small ones make zlib slow."""
_UNPACKED_BYTES = 1 << 16
_READS = 32
"""Number of small files of a bucket that are read at the same time."""
_TINY_BYTES = 1 << 13
_MAX_WINDOW = 2**31
"""Largest window of zstd, that of `--long=31`: a file that was written with it needs this memory in bytes."""


class DamagedFileError(UserError):
    """A file can't be read completely."""


def require_separator(where: str, header: list[str], separator: str) -> None:
    """Raise a UserError if the only column's name has another separator: whole lines would be read as its texts."""
    if len(header) == 1 and (found := [other for other in ",;\t|" if other != separator and other in header[0]]):
        expected = "commas between the columns of a .csv file" if separator == "," else "tabs in a .tsv file"
        raise UserError(f"{where}: has one column, {header[0]!r:.100}; expected {expected}, found {found[0]!r}")


@dataclass(frozen=True)
class SourceFile:
    """A file to read, or a part of a Parquet file if `row_groups` (start, end) is given; `end` is excluded.

    `version` changes with the content. It is an ETag or the time of the last change.
    """

    path: str
    bytes: int
    version: str
    row_groups: tuple[int, int] | None = None


def compression_of(path: str) -> str:
    """Return the suffix of a compressed file, in lower case, or an empty text."""
    suffix = path[path.rfind(".") :].lower()
    return suffix if suffix in COMPRESSIONS else ""


def kind_of(path: str) -> str:
    """Return the suffix of a file's name without a compression's, in lower case: `jsonl` for `a.JSONL.gz`."""
    return path.lower().removesuffix(compression_of(path)).rpartition(".")[2]


def is_readable(path: str) -> bool:
    """Return whether a file has a name of a kind that is read."""
    return "." in path and (kind := kind_of(path)) in KINDS and not (kind == "parquet" and compression_of(path))


def _is_read_whole(file: SourceFile) -> bool:
    """Return whether a file is a bucket's, and small: it is read with one request, whose answer also says its version."""
    return is_remote(file.path) and not file.path.startswith("hf://") and file.bytes <= READ_BYTES


def _content(file: SourceFile) -> bytes:
    bucket: Any = open_store(posixpath.dirname(file.path))
    content, version = bucket.read_version(posixpath.basename(file.path))
    return content if version == file.version else _refuse_changed(file)


# Content that is read ahead waits here, and that of tiny files, read to look at them, for their conversion: 40 MiB each.
_tiny, _small = lru_cache(5000)(_content), lru_cache(_READS + 8)(_content)


def read_ahead(files: Iterable[SourceFile]) -> Iterator[SourceFile]:
    """Yield the files in order, while the content of small ones in buckets is read, many at a time."""

    def read(file: SourceFile) -> SourceFile:
        with suppress(Exception):  # whoever reads this file meets the error again
            _ = _is_read_whole(file) and open_file(file)
        return file

    return mapped_ahead(read, files, _READS)


def require_unchanged(file: SourceFile) -> None:
    """Raise a UserError if a file that was read has changed since it was listed. The hub's files are those of one commit."""
    if file.path.startswith("hf://") or _is_read_whole(file):
        return
    folder, name = posixpath.split(file.path)
    with user_errors(f"source {file.path}: can't be read"):
        now = open_store(folder or ".").stat(name)
    if now != StoredFile(file.bytes, file.version):
        _refuse_changed(file)


def _refuse_changed(file: SourceFile) -> NoReturn:
    raise UserError(f"source {file.path}: has changed since this command began: run it again once it stays as it is")


def open_file(file: SourceFile, is_stream: bool = False) -> Any:
    """Open a file's bytes, to read any part or only in order. Raises an OSError or, if it has changed, a UserError."""
    import pyarrow as pa

    if _is_read_whole(file):
        return pa.BufferReader((_tiny if file.bytes <= _TINY_BYTES else _small)(file))
    system, name = filesystem(file.path)
    return system.open_input_stream(name, compression=None) if is_stream else system.open_input_file(name)


@contextmanager
def open_text(file: SourceFile, position: Callable[[], str]) -> Iterator[BinaryIO]:
    """Open a file's content, decompressed. An error of the content is raised as `is damaged after {position()}`."""
    import pyarrow as pa
    import zstandard

    try:
        compression = compression_of(file.path)
        with hub_errors(), open_file(file, is_stream=True) as handle:
            reader = io.BufferedReader(handle, READ_BYTES)
            yield io.BufferedReader(_Unpacked(reader, compression), _UNPACKED_BYTES) if compression else reader
    except (OSError, EOFError, zlib.error, zstandard.ZstdError, pa.ArrowException) as error:
        raise read_error(file, f"is damaged after {position()}", error) from error


def without_byte_order_mark(start: bytes, file: SourceFile) -> bytes:
    """Return a file's start without UTF-8's byte order mark. Raises a DamagedFileError if the file is UTF-16."""
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in start[:2]:
        raise DamagedFileError(f"source {file.path}: is UTF-16 or UTF-32; expected UTF-8: convert it with iconv")
    return start.removeprefix(codecs.BOM_UTF8)


def read_error(file: SourceFile, problem: str, error: Exception) -> UserError:
    """Return the error for a file that can't be read: a DamagedFileError with the `problem` only if its content is why."""
    from huggingface_hub.errors import HfHubHTTPError

    folder, _, name = file.path.rpartition("/")
    kinds = "AWS Error|Azure Error|google::cloud|when calling the .* operation"
    of_bucket = isinstance(error, HfHubHTTPError) or re.search(kinds, str(error))
    try:
        # pyarrow also raises OSErrors for errors in a file's content; these have no number.
        is_missing = isinstance(error, FileNotFoundError)
        if isinstance(error, OSError) and not is_missing and (error.errno or of_bucket or is_unreachable(error)):
            raise error
        with hub_errors():
            exists = open_store(folder or ".").stat(name) is not None
    except OSError as cause:
        advice = "what is finished is kept; run the same command again when it can be read"
        return user_error(f"source {file.path}: can't be read ({first_line(cause)}); {advice}", cause)
    problem = f"{problem} ({first_line(error)})" if exists else "is not there any more"
    return DamagedFileError(f"source {file.path}: {problem}")


class _Unpacked(io.RawIOBase):
    """The content of a stream of one or several compressed parts, which zeros may follow, as some stores pad files.

    A read returns what one piece of the stream holds, so that an error takes nothing away from what stands before it.
    pyarrow reads neither such zeros nor the windows of `zstd --long`. Raises an EOFError if the stream ends within a part.
    """

    def __init__(self, stream: BinaryIO, compression: str):
        self._blocks, self._block = _unpacked(stream, compression), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._block = self._block or memoryview(next(self._blocks, b""))
        size = min(len(buffer), len(self._block))
        buffer[:size], self._block = self._block[:size], self._block[size:]
        return size


def _unpacked(stream: BinaryIO, compression: str) -> Iterator[bytes]:
    """Yield what is in the stream, in blocks that are not empty."""
    import zstandard

    is_gzip, is_start = compression == ".gz", True
    part: Any = None
    while packed := stream.read(_PIECE_BYTES[compression]):
        # Zeros at the start are no padding: a file of zeros alone is damaged.
        while packed := packed if part or is_start else packed.lstrip(b"\0"):
            if part is None:
                zstd = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
                part, is_start = zlib.decompressobj(16 + zlib.MAX_WBITS) if is_gzip else zstd.decompressobj(), False
            before = part.copy() if is_gzip else part
            try:
                block = part.decompress(packed)
            except zlib.error:
                # zlib gives nothing of a piece with an error in it, so that it is repeated up to the error.
                yield from filter(None, (before.decompress(bytes([byte])) for byte in packed))
                raise
            if block:
                yield block
            packed, part = (part.unused_data, None) if part.eof else (b"", part)
    if part is not None:
        raise EOFError("the compressed data ends early")
