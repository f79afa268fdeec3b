from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError, Response
from huggingface_hub.hf_api import RepoFile

from biphasic.config.convert import ConvertConfig, FilesSource, HubSource
from biphasic.conversion import reading, sources
from biphasic.conversion.reading import DamagedFileError, Document, Skipped, SourceFile, read_documents
from biphasic.conversion.sources import find_files, find_hub_files, inspect_files
from biphasic.errors import Unavailable, UserError
from helpers.texts import Records, sentences, write_parquet

RECORDS = sentences(250)


def options(text_files: str = "file", **keys: Any) -> ConvertConfig:
    source = {"kind": "files", "paths": ["x"], "text_files": text_files}
    return ConvertConfig.model_validate({"job": "convert", "source": source, "output": "x", "tokenizer": "x", **keys})


OPTIONS = options()


def source(*paths: Path | str) -> FilesSource:
    return FilesSource(kind="files", paths=[str(path) for path in paths])


def read(*paths: Path | str, text: str = "text", id: str | None = "id", **keys: Any) -> list[Document | Skipped]:
    files, config = find_files(source(*paths)).files, options(text_column=text, id_column=id, **keys)
    assert not [layout.fault for layout in inspect_files(files, config) if layout.fault]
    return [entry for file in files for entry in read_documents(file, config)]


def texts(entries: list[Document | Skipped]) -> list[str]:
    return [entry.text for entry in entries if isinstance(entry, Document)]


def skipped(entries: list[Document | Skipped]) -> list[tuple[str, str]]:
    return [
        (f"{Path(entry.where).name}: {entry.reason}", entry.kind) for entry in entries if isinstance(entry, Skipped)
    ]


def documents(records: Records) -> list[Document]:
    return [Document(record["id"], record["text"]) for record in records]


def lines(records: Records) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def csv_lines(records: Records) -> bytes:
    content = io.StringIO()
    writer = csv.DictWriter(content, list(records[0]))
    writer.writeheader()
    writer.writerows(records)
    return content.getvalue().encode()


def write(path: Path, records: Records) -> Path:
    if path.suffix == ".parquet":
        return write_parquet(path, records)
    content = csv_lines(records) if ".csv" in path.name else lines(records)
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = zstandard.compress(content)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "jsonl.gz", "jsonl.zst", "csv", "csv.gz"])
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


def test_linked_folders_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, record in (("text", RECORDS[0]), ("elsewhere", RECORDS[1])):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "a.jsonl", [record])
    (tmp_path / "text" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "text")
    assert read(tmp_path / "text") == documents(RECORDS[:2])
    scan = os.scandir

    def refuse(path: str) -> Any:
        if path.rstrip("/").endswith("linked"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    for path in ("text", "text/**/*.jsonl", "text/*/*.jsonl", "text/linked/*.jsonl"):
        with pytest.raises(UserError, match=r"^source .*/text/linked/?: can't be read \(Permission denied\)"):
            read(tmp_path / path)
    assert read(tmp_path / "text/*.jsonl") == documents(RECORDS[:1])


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
    [layout] = inspect_files(find_files(source(file)).files, OPTIONS)
    assert layout.rows == (100, 100, 50)
    size = sum(len(record["text"]) for record in RECORDS)
    assert size <= sum(layout.text_bytes) < 1.2 * size + 1000
    assert inspect_files(find_files(source(write(tmp_path / "a.jsonl", RECORDS))).files, OPTIONS)[0].rows == ()


def test_without_an_id_column_the_text_names_the_document(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", [{"body": "one"}, {"body": "two"}, {"body": "one"}])
    entries = read(file, text="body", id=None)
    assert texts(entries) == ["one", "two", "one"]
    one, two, again = (document.id for document in entries if isinstance(document, Document))
    assert one == again != two


def test_ids_that_are_numbers_and_texts_that_are_null(tmp_path: Path) -> None:
    for ending in ("parquet", "jsonl"):
        file = write(tmp_path / f"a.{ending}", [{"id": 7, "text": "a"}, {"id": 8, "text": None}])
        entries = read(file)
        assert entries[0] == Document("7", "a")
        assert skipped(entries)[0][1] == "without text"
        assert skipped(entries)[0][0].endswith("2: has no text")


def test_half_of_a_surrogate_pair_in_json(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    halves = ["\\ud83d", "\\uD83D", "\\udE00"]
    lines = [f'{{"id": "{half}", "text": "half {half} of one"}}' for half in halves]
    file.write_text("\n".join([*lines, '{"id": "2", "text": "whole \\ud83d\\uDE00"}']))
    assert texts(read(file)) == 3 * ["half ? of one"] + ["whole 😀"]


def test_files_of_a_hub_dataset(tmp_path: Path) -> None:
    """The hub's own reader of a dataset's card, on a folder in place of a repository."""
    (tmp_path / "sample").mkdir()
    for number in range(2):
        write_parquet(tmp_path / "sample" / f"{number}.parquet", RECORDS[number : number + 1])
    write_parquet(tmp_path / "other.parquet", RECORDS)
    card = "configs:\n- config_name: small\n  data_files:\n  - split: train\n    path: sample/*.parquet\n"
    (tmp_path / "README.md").write_text(f"---\n{card}---\n")
    sources = find_hub_files(HubSource(kind="hub", path=str(tmp_path), name="small"))
    assert sources.commit is None
    assert [Path(file.path).name for file in sources.files] == ["0.parquet", "1.parquet"]
    with pytest.raises(UserError, match=r"small: has no split 'nope' \(it has: train\); set source.split"):
        find_hub_files(HubSource(kind="hub", path=str(tmp_path), name="small", split="nope"))
    with pytest.raises(UserError, match="can't be read from the hub"):
        find_hub_files(HubSource(kind="hub", path=str(tmp_path), name="large"))


def test_paths_without_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.doc").write_text("no")
    for path in ("nowhere.parquet", "*.parquet", "."):
        with pytest.raises(
            UserError, match=r"there is no such file, and no folder or pattern with files in it \(\.parquet"
        ):
            find_files(source(tmp_path / path))
    with pytest.raises(UserError, match=r"notes\.doc: expected a file that ends in \.parquet, \.jsonl"):
        find_files(source(tmp_path / "notes.doc"))
    with pytest.raises(UserError, match="ftpx:// is not supported; expected a local path, s3://"):
        find_files(FilesSource.model_construct(kind="files", paths=["ftpx://bucket/a.parquet"]))
    with pytest.raises(UserError, match="oci:// needs a package that is not installed"):
        find_files(source("oci://bucket@space/a.parquet"))


def test_a_missing_column_is_found_before_anything_is_read(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", RECORDS)
    write_parquet(tmp_path / "b.parquet", [{"id": "1", "content": "x"}])
    with pytest.raises(UserError, match=r"b\.parquet: has no column 'text' \(it has: content, id\); set text_column"):
        inspect_files(find_files(source(tmp_path)).files, OPTIONS)
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
    good, empty = inspect_files(find_files(source(tmp_path)).files, OPTIONS)
    assert (good.fault, empty.fault) == (None, f"source {empty.file.path}: is empty (0 bytes)")


@pytest.mark.parametrize("ending", ["jsonl.gz", "jsonl.zst", "csv.gz"])
def test_a_file_cut_short(tmp_path: Path, ending: str) -> None:
    file = write(tmp_path / f"a.{ending}", sentences(2000))
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * 2 // 3 + 5])
    [source_file] = find_files(source(file)).files
    with pytest.raises(DamagedFileError, match=rf"source .*a\.{ending}: is damaged after line \d+"):
        list(read_documents(source_file, OPTIONS))
    [layout] = inspect_files([source_file], OPTIONS)
    assert str(layout.fault).startswith(f"source {file}: is damaged after line 0")


def test_a_parquet_file_cut_short(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", sentences(2000))
    file.write_bytes(file.read_bytes()[:-100])
    [layout] = inspect_files(find_files(source(file)).files, OPTIONS)
    assert layout.fault is not None
    assert layout.fault.startswith(f"source {file}: is not a complete Parquet file")


def test_a_parquet_file_that_is_damaged_inside(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", sentences(2000))
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 2000] = bytes(2000)
    file.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"a\.parquet: is damaged after row \d+00 "):
        read(file)


def test_lines_that_are_not_json_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines = [
        b'{"id": "1", "text": "a"}',
        b"",
        b"[1]",
        b'{"id": "2", "text": "\xff"}',
        b'{"id": "3"',
        b'{"id": "4", "text": "b"}',
    ]
    file.write_bytes(b"\n".join(lines))
    entries = read(file)
    assert texts(entries) == ["a", "b"]
    assert [(message.split(" (")[0], kind) for message, kind in skipped(entries)] == [
        ("a.jsonl, line 3: is not JSON of the form {'text': …}", "not JSON"),
        ("a.jsonl, line 4: is not UTF-8", "not UTF-8"),
        ("a.jsonl, line 5: is not JSON", "not JSON"),
    ]


def test_text_in_parquet_that_is_not_utf_8(tmp_path: Path) -> None:
    texts_ = pa.array([b"good", b"bad \xff", None, b"fine"], pa.binary()).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"id": ["a", "b", "c", "d"], "text": texts_}), tmp_path / "a.parquet")
    entries = read(tmp_path / "a.parquet")
    assert texts(entries) == ["good", "fine"]
    assert skipped(entries) == [
        ("a.parquet, row 2: its text is not UTF-8", "not UTF-8"),
        ("a.parquet, row 3: has no text", "without text"),
    ]


def test_a_text_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MAX_CHARACTERS", 50)
    records = [{"id": "1", "text": "x" * 50}, {"id": "2", "text": "x" * 51}]
    for ending in ("parquet", "jsonl"):
        entries = read(write(tmp_path / f"a.{ending}", records))
        assert texts(entries) == ["x" * 50]
        assert skipped(entries)[0][0].endswith("2: its text has 51 characters; the limit is 50")


def test_the_rest_of_a_text_that_is_too_long_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a line of JSON, too, which holds at most 12 bytes for a character; a text file's have at most 4."""
    monkeypatch.setattr(reading, "_MAX_CHARACTERS", 50)
    kept, read_lines, decode = list[bytes](), reading._lines, reading._decode

    def lines(*arguments: Any) -> Iterator[bytes]:
        for line in read_lines(*arguments):
            kept.append(line)
            yield line

    monkeypatch.setattr(reading, "_lines", lines)
    monkeypatch.setattr(reading, "_decode", lambda text: kept.append(text) or decode(text))
    parts = [b"one", b"x" * 51, b"\n".join([b"y" * 40] * 9), b"z" * 999, "ü".encode() * 50]
    (tmp_path / "a.txt").write_bytes(b"\n\n".join(parts))
    reason = "its text has more than 50 characters"
    [whole] = read(tmp_path / "a.txt")
    assert isinstance(whole, Skipped)
    assert (whole.kind, whole.reason) == ("too long", f"{reason}; set source.text_files: line or paragraph")
    entries = read(tmp_path / "a.txt", text_files="paragraph")
    assert texts(entries) == ["one", "ü" * 50]
    assert skipped(entries) == [(f"a.txt, line {line}: {reason}", "too long") for line in (3, 5, 15)]
    assert max(map(len, kept)) == 201
    records = [{"id": "1", "text": "a"}, {"id": "2", "text": "b", "other": "x" * 600}, {"id": "3", "text": "c"}]
    entries = read(write(tmp_path / "b.jsonl", records))
    assert texts(entries) == ["a", "c"]
    assert skipped(entries) == [("b.jsonl, line 2: has more than 600 bytes", "too long")]
    assert max(map(len, kept)) == 600


_NO_HOST = sys.modules[HTTPError.__module__].ConnectError("no route to host")
_BUSY = HfHubHTTPError("429 Too Many Requests", response=Response(429, request=SimpleNamespace()))  # pyright: ignore
_S3 = "When reading information for key 'a' in bucket 'b': AWS Error NETWORK_CONNECTION during HeadObject operation"


@pytest.mark.parametrize("ending", ["parquet", "jsonl.gz"])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.EIO, "Input/output error"), UserError),
        (PermissionError(errno.EACCES, "Permission denied"), UserError),
        (OSError(_S3), UserError),
        (ConnectionError("reset"), Unavailable),
        (_BUSY, UserError),
        (_NO_HOST, Unavailable),
    ],
)
def test_a_file_that_can_t_be_reached_is_not_damaged(
    tmp_path: Path, ending: str, error: Exception, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With on_bad_file: skip, its documents would be left out for good."""
    file = write(tmp_path / f"a.{ending}", RECORDS)
    [source_file] = find_files(source(file)).files
    kept = options(on_bad_file="skip")

    class Unreadable(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise error

    def opened(name: str, compression: str = "") -> pa.PythonFile:
        return pa.PythonFile(Unreadable(file.read_bytes()), "r")

    system = SimpleNamespace(open_input_file=opened, open_input_stream=opened)
    for module in (reading, sources):
        monkeypatch.setattr(module, "filesystem", lambda path: (system, path))
    message = (
        rf"^source {file}: can't be read \(.*\); what is finished is kept; run the same command again when it can be"
    )
    for call in (
        lambda: inspect_files([source_file], kept),
        lambda: list(reading.read_up_to_damage(source_file, kept, [])),
    ):
        with pytest.raises(UserError, match=message) as caught:
            call()
        assert type(caught.value) is kind
    monkeypatch.undo()
    file.unlink()
    with pytest.raises(DamagedFileError, match="is not there any more"):
        list(read_documents(source_file, OPTIONS))
    [layout] = inspect_files([source_file], OPTIONS)
    assert layout.fault == f"source {file}: is not there any more"


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", RECORDS)
    (tmp_path / os.fsdecode(b"b.\xe9")).touch()
    assert find_files(source(tmp_path)).unread == {r".\udce9": 1}
    write(tmp_path / os.fsdecode(b"caf\xe9.jsonl"), RECORDS)
    with pytest.raises(UserError, match=r"^source .*/caf\\udce9\.jsonl: its name is not UTF-8: rename it$"):
        find_files(source(tmp_path))


def test_sizes_of_many_hub_files_are_asked_for_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub refuses more than 1,000 paths in a request."""
    prefix, counts = "hf://datasets/a/b@c/", []

    def get_paths_info(self: HfApi, repo: str, paths: list[str], **options: Any) -> list[RepoFile]:
        counts.append(len(paths))
        return [RepoFile(path=path, size=5, oid=path) for path in paths]

    builder = SimpleNamespace(
        config=SimpleNamespace(data_files={"train": [f"{prefix}{n}.parquet" for n in range(1201)]})
    )
    monkeypatch.setattr("datasets.load_dataset_builder", lambda *names, **options: builder)
    monkeypatch.setattr(sources, "hub_commit", lambda *names: "c")
    monkeypatch.setattr(HfApi, "get_paths_info", get_paths_info)
    files = find_hub_files(HubSource(kind="hub", path="a/b")).files
    assert counts == [500, 500, 201] and len({file.path for file in files}) == 1201
    assert {(file.bytes, file.path.removeprefix(prefix) == file.version) for file in files} == {(5, True)}


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_filters(tmp_path: Path, ending: str) -> None:
    records = [
        {"id": str(number), "text": f"{score} {language}", "int_score": score, "language": language}
        for number, (score, language) in enumerate(
            [(2, "en"), (3, "en"), (5, "fr"), (4, "de"), (None, "en"), (3, None), (0, "fr")]
        )
    ]
    file = write(tmp_path / f"a.{ending}", records)

    def kept(*filters: dict[str, Any]) -> list[str]:
        entries = read(file, filters=list(filters))
        assert {entry.kind for entry in entries if isinstance(entry, Skipped)} <= {"filtered"}
        return texts(entries)

    assert kept({"column": "int_score", "min": 3}) == ["3 en", "5 fr", "4 de", "3 None"]
    assert kept({"column": "int_score", "min": 3, "max": 4}, {"column": "language", "any_of": ["en", "fr"]}) == ["3 en"]
    assert kept({"column": "language", "none_of": ["en"]}) == ["5 fr", "4 de", "0 fr"]
    assert kept({"column": "int_score", "max": 2}) == ["2 en", "0 fr"]
    with pytest.raises(UserError, match=r"filters: column 'language' holds 'en'; min and max need numbers"):
        kept({"column": "language", "min": 3})
    with pytest.raises(UserError, match=r"has no column 'dump' \(it has: .*\); set text_column, id_column or filters"):
        kept({"column": "dump", "any_of": ["x"]})


def test_csv_s_true_and_false(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,copy\none,true\ntwo,False\nthree,\n")
    for value, expected in ((True, "one"), (False, "two")):
        entries = read(tmp_path, id=None, filters=[{"column": "copy", "any_of": [value]}])
        assert texts(entries) == [expected]


def test_text_files_have_nothing_to_filter_by(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One.\n")
    with pytest.raises(UserError, match=r"a\.txt: a text file has no columns to filter by; remove filters, or"):
        read(tmp_path / "a.txt", filters=[{"column": "language", "any_of": ["en"]}])


def test_csv_with_bad_rows(tmp_path: Path) -> None:
    """As spreadsheets write it: a byte order mark, quoted line ends and delimiters."""
    rows = [
        '\ufeffid,"the text"\r\n',
        '1,"one, ""quoted""\nin two lines"\r\n',
        "\r\n",
        "2\r\n",
        "3,x,y\r\n",
        '4,"a"b\r\n',
        "5,\r\n",
        "6,caf\udce9\r\n",
        "7,end",
    ]
    file = tmp_path / "a.csv"
    file.write_bytes("".join(rows).encode("utf-8", "surrogateescape"))
    entries = read(file, text="the text")
    assert [entry for entry in entries if isinstance(entry, Document)] == [
        Document("1", 'one, "quoted"\nin two lines'),
        Document("7", "end"),
    ]
    assert [(message.split(" (")[0], kind) for message, kind in skipped(entries)] == [
        ("a.csv, line 5: has 1 field, and the header has 2", "not CSV"),
        ("a.csv, line 6: has 3 fields, and the header has 2", "not CSV"),
        ("a.csv, line 7: is not CSV", "not CSV"),
        ("a.csv, line 8: has no text", "without text"),
        ("a.csv, line 9: its text is not UTF-8", "not UTF-8"),
    ]
    with pytest.raises(
        UserError, match=r"a\.csv, line 1: has no column 'text' \(it has: id, the text\); set text_column"
    ):
        read(file)


def test_csv_with_a_quotation_mark_that_is_not_closed(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('id,text\n1,one\n2,"two\n3,three\n')
    with pytest.raises(DamagedFileError, match=r"a\.csv, line 3: is damaged: a quotation mark"):
        read(file)


def test_tsv(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('id\ttext\n1\tone, "two"\n2\t"three\t3"\n')
    assert texts(read(tmp_path)) == ['one, "two"', "three\t3"]


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_plain_text(tmp_path: Path, packed: str) -> None:
    content = b"One line.\nAnother.\n\n  \nA paragraph\nof two lines.\n\n\nThe end"
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[packed]
    (tmp_path / f"a.txt{packed}").write_bytes(compress(content))
    assert texts(read(tmp_path, text_files="file")) == [content.decode()]
    assert texts(read(tmp_path, text_files="paragraph")) == [
        "One line.\nAnother.",
        "A paragraph\nof two lines.",
        "The end",
    ]
    lines = ["One line.", "Another.", "A paragraph", "of two lines.", "The end"]
    assert texts(read(tmp_path, text_files="line")) == lines
    ids = [document.id for document in read(tmp_path, text_files="line") if isinstance(document, Document)]
    assert len(set(ids)) == 5


@pytest.mark.parametrize("ending", ["md", "markdown", "rst", "md.gz", "rst.zst"])
def test_markdown_and_restructuredtext_are_text(tmp_path: Path, ending: str) -> None:
    content = b"# A heading\n\nA *word*.\n"
    compress = {"gz": gzip.compress, "zst": zstandard.compress}.get(ending.rpartition(".")[2], bytes)
    (tmp_path / f"a.{ending}").write_bytes(compress(content))
    assert texts(read(tmp_path)) == ["# A heading\n\nA *word*."]
    assert texts(read(tmp_path, text_files="paragraph")) == ["# A heading", "A *word*."]


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_a_byte_order_mark_is_removed(tmp_path: Path, packed: str) -> None:
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[packed]
    contents = {
        "jsonl": b'{"id": "1", "text": "one"}\n{"id": "2", "text": "two \xef\xbb\xbf"}\n',
        "csv": b'"id","text"\n1,one\n2,two \xef\xbb\xbf\n',
        "txt": b"one\ntwo \xef\xbb\xbf",
        "md": b"one\ntwo \xef\xbb\xbf",
    }
    for kind, content in contents.items():
        file = tmp_path / f"a.{kind}{packed}"
        file.write_bytes(compress(b"\xef\xbb\xbf" + content))
        assert texts(read(file, text_files="line")) == ["one", "two \ufeff"], kind


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf_16_is_named(tmp_path: Path, encoding: str) -> None:
    for kind, content in {"jsonl": '{"id": "1", "text": "one"}\n', "csv": "id,text\n1,one\n", "txt": "one"}.items():
        file = tmp_path / f"a.{kind}"
        file.write_bytes(content.encode(encoding))
        with pytest.raises(DamagedFileError, match=rf"a\.{kind}: is UTF-16 or UTF-32; expected UTF-8"):
            list(read_documents(SourceFile(str(file), 1, ""), OPTIONS))


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_a_document_without_an_id_is_named_by_its_text(tmp_path: Path, ending: str) -> None:
    records = [{"id": None, "text": "one"}, {"id": "", "text": "two"}, {"id": "7", "text": "one"}]
    records += [{"id": None, "text": "one"}]
    entries = [entry for entry in read(write(tmp_path / f"a.{ending}", records)) if isinstance(entry, Document)]
    one, two, named, again = (entry.id for entry in entries)
    assert named == "7"
    assert (one, two) == tuple(entry.id for entry in read(tmp_path, id=None)[:2] if isinstance(entry, Document))
    assert one == again != two


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_ids_that_are_nan_or_zero(tmp_path: Path, ending: str) -> None:
    records = [{"id": number, "text": str(number)} for number in (float("nan"), 0.0)]
    [nan, zero] = [entry for entry in read(write(tmp_path / f"a.{ending}", records)) if isinstance(entry, Document)]
    assert (len(nan.id), zero.id) == (32, "0.0")
