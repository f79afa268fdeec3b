"""Compressed files that are padded, cut short or damaged inside."""

import gzip
import random
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from biphasic.conversion.reading import Entry, read_up_to_damage
from biphasic.conversion.sources import find_files
from helpers.source_files import documents, lines, options, read, source
from helpers.texts import sentences

RECORDS = sentences(3000)
COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "zst": zstandard.compress}
_DECOMPRESS = {"gz": lambda: zlib.decompressobj(31), "zst": lambda: zstandard.ZstdDecompressor().decompressobj()}


def read_damaged(file: Path) -> tuple[list[Entry], str]:
    faults: list[str] = []
    [source_file] = find_files(source(file)).files
    entries = list(read_up_to_damage(source_file, options(id_column="id", on_bad_file="skip"), faults))
    [fault] = faults
    return entries, fault


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("count", [50, 3000])
def test_all_documents_before_a_cut_are_read(kind: str, count: int, tmp_path: Path) -> None:
    first, second = (COMPRESS[kind](lines(part)) for part in (RECORDS[:20], RECORDS[20:count]))
    file = tmp_path / f"a.jsonl.{kind}"
    for cut in (len(second) - 1, len(second) * 9 // 10, 7):
        file.write_bytes(first + second[:cut])
        content = lines(RECORDS[:20]) + _DECOMPRESS[kind]().decompress(second[:cut])
        entries, fault = read_damaged(file)
        assert entries == documents(RECORDS[: content.count(b"\n")])
        assert fault == f"source {file}: is damaged after line {len(entries)} (the compressed data ends early)"


@pytest.mark.parametrize(("kind", "lost"), [("gz", 1000), ("zst", 200_000)])
def test_documents_before_damaged_bytes_are_read(kind: str, lost: int, tmp_path: Path) -> None:
    """A block of zstd has up to 128 KiB of text. Without a checksum, only the head of a block shows damage."""
    words = random.Random(1)
    records = [{"id": str(at), "text": words.randbytes(400).hex()} for at in range(2000)]
    packed, file = COMPRESS[kind](lines(records)), tmp_path / f"a.jsonl.{kind}"
    for place in (len(packed) // 2, len(packed) * 3 // 4):
        file.write_bytes(packed[:place] + b"\xff" * 100_000 + packed[place + 100_000 :])
        entries, fault = read_damaged(file)
        good = [entry for entry, expected in zip(entries, documents(records), strict=False) if entry == expected]
        before = len(_DECOMPRESS[kind]().decompress(packed[:place]))
        assert len(lines(records[: len(good) + 1])) > before - lost
        assert f"is damaged after line {len(entries)} (" in fault


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("zeros", [1, 1024, 3 << 20])
def test_zeros_after_the_end_are_padding(kind: str, zeros: int, tmp_path: Path) -> None:
    """As tapes, block devices and some stores leave behind; also between the parts of a file."""
    first, second = (COMPRESS[kind](lines(part)) for part in (RECORDS[:20], RECORDS[20:]))
    file = tmp_path / f"a.jsonl.{kind}"
    file.write_bytes(first + bytes(zeros) + second + bytes(zeros))
    assert read(file) == documents(RECORDS)


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize(("before", "after"), [(b"\0" * 1024, b""), (b"", b"\0\0x"), (b"", b"<html>")])
def test_other_bytes_are_damage(kind: str, before: bytes, after: bytes, tmp_path: Path) -> None:
    file = tmp_path / f"a.jsonl.{kind}"
    file.write_bytes(before + COMPRESS[kind](lines(RECORDS[:20])) + after)
    entries, fault = read_damaged(file)
    assert entries == ([] if before else documents(RECORDS[:20]))
    assert f"is damaged after line {len(entries)} (" in fault


@pytest.mark.parametrize("kind", COMPRESS)
def test_a_file_of_zeros_is_damaged(kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"a.jsonl.{kind}"
    file.write_bytes(bytes(1000))
    assert "is damaged after line 0 (" in read_damaged(file)[1]
