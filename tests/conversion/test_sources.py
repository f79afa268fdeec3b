import errno
import gzip
import io
import os
import posixpath
import sys
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

from biphasic.config.convert import FilesSource, HubSource
from biphasic.conversion import reading, source_files, sources
from biphasic.conversion.reading import Document, Skipped, read_documents
from biphasic.conversion.source_files import DamagedFileError
from biphasic.conversion.sources import find_files, find_hub_files, inspect_files
from biphasic.errors import Unavailable, UserError
from helpers.source_files import (
    OPTIONS,
    documents,
    lines,
    options,
    read,
    source,
    write,
)
from helpers.texts import sentences, write_parquet

RECORDS = sentences(250)


@pytest.mark.parametrize(
    "ending",
    [
        "parquet",
        "jsonl",
        "jsonl.gz",
        "jsonl.zst",
        "csv",
        "csv.gz",
        "json",
        "json.gz",
        "json.zst",
        "ndjson",
        "JSONL",
        "Csv",
    ],
)
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


HIDDEN = {
    "a.jsonl": RECORDS[0],
    ".texts/a.jsonl": RECORDS[5],
    ".b.jsonl": RECORDS[1],
    ".ipynb_checkpoints/a-checkpoint.jsonl": RECORDS[2],
    "more/.Trash-0/files/c.jsonl": RECORDS[3],
    "more/d.jsonl": RECORDS[4],
    "_temporary/0/part.jsonl": RECORDS[6],
    "more/_change_data/cdc.jsonl": RECORDS[7],
    "_date=2024-01-01/e.jsonl": RECORDS[8],
    "_part1.jsonl": RECORDS[9],
}
PARTITION = "_date=2024-01-01/e.jsonl"


def write_files(folder: Path, files: dict[str, Any]) -> Path:
    for name, record in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, [record])
    return folder


@pytest.mark.parametrize(
    ("path", "found", "unread"),
    [
        ("", [PARTITION, "a.jsonl", "more/d.jsonl"], 7),
        ("**/*.jsonl", [PARTITION, "a.jsonl", "more/d.jsonl"], 2),
        ("*.jsonl", ["a.jsonl"], 2),
        ("**/[.a]*.jsonl", ["a.jsonl"], 1),
        (".b.jsonl", [".b.jsonl"], 0),
        (".*.jsonl", [".b.jsonl"], 0),
        (".ipynb_checkpoints", [".ipynb_checkpoints/a-checkpoint.jsonl"], 0),
        ("**/.[!bt]*/**/*.jsonl", [".ipynb_checkpoints/a-checkpoint.jsonl", "more/.Trash-0/files/c.jsonl"], 0),
        ("_part1.jsonl", ["_part1.jsonl"], 0),
        ("_part[0-9].jsonl", ["_part1.jsonl"], 0),
        ("_temporary", ["_temporary/0/part.jsonl"], 0),
        ("_temporary/**/*.jsonl", ["_temporary/0/part.jsonl"], 0),
        ("*/_change*/*", ["more/_change_data/cdc.jsonl"], 0),
        ("more/.Trash-*/files/*", ["more/.Trash-0/files/c.jsonl"], 0),
    ],
)
def test_hidden_files_are_counted_and_read_only_if_the_path_names_them(
    path: str, found: list[str], unread: int, tmp_path: Path
) -> None:
    folder = write_files(tmp_path / ".texts", HIDDEN)
    files = find_files(source(folder / path))
    assert [Path(file.path).relative_to(folder).as_posix() for file in files.files] == found
    assert files.unread == ({"hidden": unread} if unread else {})


def test_what_is_in_a_hidden_folder_does_not_affect_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link there may lead to a folder that is read, and another user's folder can't be listed."""
    folder = write_files(tmp_path, HIDDEN)
    (folder / ".latest").symlink_to(folder / "more")
    (folder / ".ipynb_checkpoints" / "link").symlink_to(folder / "more")
    assert read(folder) == documents([RECORDS[8], RECORDS[0], RECORDS[4]])
    with pytest.raises(UserError, match=r"no such file.*, except hidden ones \(. or _\), which the path has to name"):
        read(folder / "[.]b.jsonl")
    both = find_files(source(folder, folder / ".b.jsonl"))
    assert [Path(file.path).name for file in both.files] == [".b.jsonl", "e.jsonl", "a.jsonl", "d.jsonl"]
    assert both.unread == {"hidden": 7}
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith(".Trash-0"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert find_files(source(folder, folder / ".b.jsonl")).unread == {"hidden": 7}


def test_a_path_with_brackets_that_exists_is_no_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "my data [2024]" / "part"
    folder.mkdir(parents=True)
    write(folder / "a.jsonl", RECORDS[:1])
    write(folder / "b*.jsonl", RECORDS[1:2])
    write(tmp_path / "text[1].jsonl", RECORDS[2:3])
    write(tmp_path / "text1.jsonl", RECORDS[3:4])
    for path in (folder.parent, folder, f"{folder}/", folder.parent / "*" / "*.jsonl", folder.parent / "**" / "*"):
        assert read(path) == documents(RECORDS[:2])
    assert read(folder / "b*.jsonl") == documents(RECORDS[1:2])
    assert read(tmp_path / "text[1].jsonl") == documents(RECORDS[2:3])
    assert read(tmp_path / "text[0-9].jsonl") == documents(RECORDS[3:4])
    with pytest.raises(UserError, match="there is no such file"):
        read(folder.parent / "c.jsonl")


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


def test_a_pattern_takes_the_files_of_folders_named_like_a_file(tmp_path: Path) -> None:
    """As Spark, Dask and polars write a table."""
    names = ["one.jsonl", "two.jsonl/part-0.jsonl", "two.jsonl/day=1/part-0.jsonl", "two.jsonl/_SUCCESS", "other/a.jsonl"]
    write_files(tmp_path / "set", dict.fromkeys(names, RECORDS[0]))
    expected = {"set/*.jsonl": names[:3], "*/t*.jsonl": names[1:3], "set/*": names[:3], "*/*/*": names[1::3]}
    for pattern, files in expected.items():
        found = [posixpath.relpath(file.path, f"{tmp_path}/set") for file in find_files(source(tmp_path / pattern)).files]
        assert found == sorted(files), pattern


def test_a_broken_link_is_refused_if_it_would_be_read(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.jsonl": RECORDS[0]})
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "blobs" / "b")
    for path in (tmp_path, tmp_path / "*.jsonl"):
        with pytest.raises(UserError, match=r"b\.jsonl: is a link to .*blobs/b, which isn't there"):
            find_files(source(path))
    (tmp_path / "b.jsonl").rename(tmp_path / ".b.jsonl")
    (tmp_path / "c.doc").symlink_to("nowhere")
    sources = find_files(source(tmp_path))
    assert len(sources.files) == 1 and sources.unread == {"hidden": 1, ".doc": 1}


def test_paths_without_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.doc").write_text("no")
    for path in ("nowhere.parquet", "*.parquet", "."):
        with pytest.raises(UserError, match=r"there is no such file, and no folder or pattern with files in it \(\.parquet"):
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
    with pytest.raises(UserError, match=r"c\.jsonl, line 1: has no column 'id' \(it has: text\)"):
        read(write(tmp_path / "c.jsonl", [{"text": "no id"}, *RECORDS[:3]]))


def test_a_file_with_several_paths_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    write(tmp_path / "texts" / "a.jsonl", RECORDS[:3])
    (tmp_path / "link").symlink_to("texts")
    (tmp_path / "b.jsonl").symlink_to("texts/a.jsonl")
    for paths in (
        [""],
        ["texts", "link"],
        ["texts/a.jsonl", "./texts/a.jsonl", "link/../texts/a.jsonl"],
        ["**/*.jsonl"],
    ):
        assert read(*(f"{tmp_path}/{path}" for path in paths)) == documents(RECORDS[:3]), paths


def test_text_files_without_text_files(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", RECORDS[:3])
    with pytest.raises(UserError, match=r"source\.text_files: line has no effect, because the source has no plain text"):
        inspect_files(find_files(source(tmp_path)).files, options("line"))
    (tmp_path / "b.txt").write_text("a\nb\n")
    assert len(inspect_files(find_files(source(tmp_path)).files, options("line"))) == 2


def test_later_lines_of_json_without_a_key_or_a_text(tmp_path: Path) -> None:
    """The first object must have all columns. Lines that aren't objects don't count as the first."""
    file = tmp_path / "a.jsonl"
    others = [{"id": "7", "body": "x"}, {"id": "8", "text": 5}, {"text": "no id"}]
    file.write_bytes(b"no JSON\n" + lines([RECORDS[0], *others]))
    found = find_files(source(file)).files
    entries = [entry for each in found for entry in read_documents(each, OPTIONS)]
    skipped = [entry for entry in entries if isinstance(entry, Skipped)]
    assert [(entry.kind, entry.where.rpartition(" ")[2]) for entry in skipped] == [
        ("not JSON", "1"),
        ("without text", "3"),
        ("without text", "4"),
    ]
    texts = [entry.text for entry in entries if isinstance(entry, Document)]
    assert texts == [RECORDS[0]["text"], "no id"]


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
    (file := tmp_path / f"b.{ending}").write_bytes(content[:4])
    [layout] = inspect_files(find_files(source(file)).files, OPTIONS)
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
        (_BUSY, Unavailable),
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
    monkeypatch.setattr(source_files, "filesystem", lambda path: (system, path))
    message = rf"^source {file}: can't be read \(.*\); what is finished is kept; run the same command again when it can be"
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

    builder = SimpleNamespace(config=SimpleNamespace(data_files={"train": [f"{prefix}{n}.parquet" for n in range(1201)]}))
    monkeypatch.setattr("datasets.load_dataset_builder", lambda *names, **options: builder)
    monkeypatch.setattr(sources, "hub_commit", lambda *names: "c")
    monkeypatch.setattr(HfApi, "get_paths_info", get_paths_info)
    files = find_hub_files(HubSource(kind="hub", path="a/b")).files
    assert counts == [500, 500, 201] and len({file.path for file in files}) == 1201
    assert {(file.bytes, file.path.removeprefix(prefix) == file.version) for file in files} == {(5, True)}


def test_of_many_small_files_a_few_are_read_before_the_work_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand would take longer than the patience of a user whose id_column is wrong."""
    monkeypatch.setattr(sources, "_EXAMINED", 10)
    for number in range(45):
        write(tmp_path / f"{number:03}.jsonl", [{"id": str(number), "text": "text"}])
    (tmp_path / "001.jsonl").write_text("")
    files, opened = find_files(source(tmp_path)).files, list[str]()
    real = source_files.open_file

    def counted(file: source_files.SourceFile, *arguments: bool) -> Any:
        opened.append(Path(file.path).stem)
        return real(file, *arguments)

    monkeypatch.setattr(source_files, "open_file", lambda file, is_stream=False: counted(file, is_stream))
    layouts = inspect_files(files, OPTIONS)
    assert [layout.file for layout in layouts] == files
    assert [layout.fault for layout in layouts if layout.fault] == [f"source {tmp_path}/001.jsonl: is empty (0 bytes)"]
    # The first of each five that are not empty.
    assert sorted(opened) == ["000", "006", "011", "016", "021", "026", "031", "036", "041"]
    opened.clear()
    monkeypatch.setattr(sources, "_EXAMINED", 45)
    monkeypatch.setattr(sources, "_THREADS", 2)
    with pytest.raises(UserError, match=r"000\.jsonl, line 1: has no column 'key'"):
        inspect_files(files, options(id_column="key"))
    assert len(opened) <= 4
