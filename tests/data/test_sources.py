from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import zstandard

from biphasic.config.conversion import FilesSource, HubSource
from biphasic.config.errors import UserError
from biphasic.data.sources import Columns, Document, count_documents, find_files, read_files, read_hub
from texts import Records, sentences, write_parquet

COLUMNS = Columns("text", "id")
RECORDS = sentences(250)


def source(*paths: Path | str) -> FilesSource:
    return FilesSource(kind="files", paths=[str(path) for path in paths])


def read(*paths: Path | str, columns: Columns = COLUMNS) -> list[Document]:
    files = find_files(source(*paths))
    count_documents(files, columns)
    return list(read_files(files, columns))


def documents(records: Records) -> list[Document]:
    return [Document(record["id"], record["text"]) for record in records]


def lines(records: Records) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def write(path: Path, records: Records) -> Path:
    if path.suffix == ".parquet":
        return write_parquet(path, records)
    content = lines(records)
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = zstandard.compress(content)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "jsonl.gz", "jsonl.zst"])
def test_every_kind_of_file(tmp_path: Path, ending: str) -> None:
    assert read(write(tmp_path / f"a.{ending}", RECORDS)) == documents(RECORDS)


def test_several_compressed_parts_in_one_file(tmp_path: Path) -> None:
    """As `cat a.gz b.gz` and parallel compressors write them."""
    for name, compress in (("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstandard.compress)):
        (tmp_path / name).write_bytes(compress(lines(RECORDS[:9])) + compress(lines(RECORDS[9:20])))
        assert read(tmp_path / name) == documents(RECORDS[:20])


def test_folders_and_patterns_give_each_file_once_in_order(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    for number, name in enumerate(["b.parquet", "a.jsonl", "more/c.parquet", "more/_SUCCESS", "more/.hidden.jsonl"]):
        write(tmp_path / name, RECORDS[number : number + 1])
    expected = documents([RECORDS[1], RECORDS[0], RECORDS[2]])
    assert read(tmp_path) == expected
    assert read(tmp_path / "**" / "*.parquet", tmp_path / "a.jsonl", tmp_path) == expected
    assert read(f"{tmp_path}/*.parquet") == expected[1:2]


def test_only_the_columns_that_are_needed(tmp_path: Path) -> None:
    """Another column may even be damaged: it isn't read."""
    records = [{**record, "url": record["id"] * 20} for record in RECORDS]
    file = write_parquet(tmp_path / "a.parquet", records)
    group = pq.ParquetFile(file).metadata.row_group(0)
    [url] = [group.column(at) for at in range(3) if group.column(at).path_in_schema == "url"]
    content = bytearray(file.read_bytes())
    start = url.dictionary_page_offset
    content[start : start + url.total_compressed_size] = bytes(url.total_compressed_size)
    file.write_bytes(content)
    assert read(file) == documents(RECORDS)


def test_documents_are_counted_where_the_files_say_how_many(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", RECORDS)
    assert count_documents(find_files(source(file)), COLUMNS) == 250
    assert count_documents(find_files(source(file, write(tmp_path / "a.jsonl", RECORDS))), COLUMNS) is None


def test_without_an_id_column_the_text_names_the_document(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [{"body": "one"}, {"body": "two"}, {"body": "one"}])
    found = read(file, columns=Columns("body", None))
    assert [document.text for document in found] == ["one", "two", "one"]
    assert found[0].id == found[2].id != found[1].id


def test_ids_that_are_numbers_and_texts_that_are_null(tmp_path: Path) -> None:
    for ending in ("parquet", "jsonl"):
        file = write(tmp_path / f"a.{ending}", [{"id": 7, "text": "a"}, {"id": 8, "text": None}])
        assert read(file) == [Document("7", "a"), Document("8", "")]


def test_half_a_character_in_json(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"id": "1", "text": "half \\ud83d of one"}\n{"id": "2", "text": "whole \\ud83d\\ude00"}\n')
    assert [document.text for document in read(file)] == ["half ? of one", "whole 😀"]


def test_hub_reading_streams_a_dataset(tmp_path: Path) -> None:
    """The hub's own reader, on a folder in place of a repository."""
    write_parquet(tmp_path / "a.parquet", [{**record, "score": 1} for record in RECORDS])
    assert list(read_hub(HubSource(kind="hub", path=str(tmp_path)), COLUMNS)) == documents(RECORDS)
    with pytest.raises(UserError, match=r"has no column 'body' \(it has: id, score, text\)"):
        list(read_hub(HubSource(kind="hub", path=str(tmp_path)), Columns("body", None)))
    with pytest.raises(UserError, match="can't be read from the hub"):
        list(read_hub(HubSource(kind="hub", path=str(tmp_path), split="nope"), COLUMNS))


def test_nothing_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no")
    for path in ("nowhere.parquet", "*.parquet", "."):
        with pytest.raises(
            UserError, match=r"there is no such file, and no folder or pattern with files in it \(\.parquet"
        ):
            find_files(source(tmp_path / path))
    with pytest.raises(UserError, match=r"notes\.txt: expected a file that ends in \.parquet, \.jsonl"):
        find_files(source(tmp_path / "notes.txt"))
    with pytest.raises(UserError, match="gs:// can't be read here; expected a local path or s3://"):
        find_files(source("gs://bucket/a.parquet"))


def test_a_missing_column_is_found_before_anything_is_read(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", RECORDS)
    write_parquet(tmp_path / "b.parquet", [{"id": "1", "content": "x"}])
    with pytest.raises(UserError, match=r"b\.parquet: has no column 'text' \(it has: content, id\); set text_column"):
        count_documents(find_files(source(tmp_path)), COLUMNS)
    file = write(tmp_path / "c.jsonl", [*RECORDS[:3], {"text": "no id"}])
    with pytest.raises(UserError, match=r"c\.jsonl, line 4: has no column 'id' \(it has: text\)"):
        read(file)


def test_a_column_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.parquet: column 'text' holds int64, not text"):
        read(write_parquet(tmp_path / "a.parquet", [{"id": "1", "text": 5}]))
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: column 'text' holds int, not text"):
        read(write(tmp_path / "a.jsonl", [{"id": "1", "text": 5}]))


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "jsonl.gz", "jsonl.zst"])
def test_an_empty_file(tmp_path: Path, ending: str) -> None:
    write(tmp_path / "good.parquet", RECORDS)
    (tmp_path / f"x.{ending}").touch()
    with pytest.raises(UserError, match=rf"x\.{ending}: is empty \(0 bytes\)"):
        read(tmp_path)


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "jsonl.gz", "jsonl.zst"])
def test_a_file_cut_short(tmp_path: Path, ending: str) -> None:
    file = write(tmp_path / f"a.{ending}", sentences(2000))
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * 2 // 3 + 5])
    with pytest.raises(UserError, match=rf"source .*a\.{ending}(: is|, line \d+: is not JSON)"):
        read(file)


def test_a_parquet_file_that_is_damaged_inside(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", sentences(2000))
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 2000] = bytes(2000)
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.parquet: is damaged"):
        read(file)


def test_lines_that_are_no_records(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"id": "1", "text": "a"}\n\n[1]\n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 3: expected an object"):
        read(file)
    file.write_bytes(b'{"id": "1", "text": "\xff"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl: is damaged"):
        read(file)
