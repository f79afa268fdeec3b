"""JSON arrays of objects, in place of an object in each line."""

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from biphasic.conversion.reading import Document, Skipped, read_documents
from biphasic.conversion.source_files import DamagedFileError
from biphasic.conversion.sources import find_files
from biphasic.errors import UserError
from helpers.source_files import OPTIONS, documents, read, source
from helpers.texts import sentences

RECORDS = sentences(250)
PRETTY = json.dumps(RECORDS, indent=2)
SPREAD = {
    "array on one line": json.dumps(RECORDS),
    "array of lines": "[\n" + ",\n".join(map(json.dumps, RECORDS)) + "\n]\n\n",
    "indented array": f"\ufeff{PRETTY}\n",
}


@pytest.mark.parametrize("ending", ["json", "jsonl", "JSON", "ndjson", "json.gz", "jsonl.zst"])
@pytest.mark.parametrize("layout", SPREAD)
def test_a_json_array(layout: str, ending: str, tmp_path: Path) -> None:
    for repeats in (1, 3):
        text = SPREAD[layout] if repeats == 1 else json.dumps([{**RECORDS[0], "text": "é" * 2**20}] * repeats)
        content = text.encode()
        packed = {"gz": gzip.compress, "zst": zstandard.compress}.get(ending.rpartition(".")[2], bytes)(content)
        (tmp_path / f"a.{ending}").write_bytes(packed)
        expected = documents(RECORDS) if repeats == 1 else [Document(RECORDS[0]["id"], "é" * 2**20)] * repeats
        assert read(tmp_path / f"a.{ending}") == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"id": "1", "text": "one"}', "Expecting ',' delimiter"),
        ('[{"id": "1", "text": "one"}, {"id": "2", "te', "Unterminated string"),
        ('[{"id": "1", "text": "one"}]\n{"id"', "Extra data"),
        ('[\n{"id": "1", "text": "one"},\n{"id": "2", "text": "\udce9"}]', "'utf-8' codec"),
    ],
)
def test_a_json_array_that_is_damaged(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    [source_file] = find_files(source(file)).files
    with pytest.raises(DamagedFileError, match=rf"^source {file}: is damaged: it begins as a JSON array \({message}"):
        list(read_documents(source_file, OPTIONS))


def test_an_array_of_something_else_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('["one", "two"]')
    with pytest.raises(UserError, match=rf"^source {file}: is a JSON array of text; expected objects such as \{{\"text\""):
        read(file)


@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_an_object_over_several_lines_is_refused(ending: str, tmp_path: Path) -> None:
    file = tmp_path / f"a.{ending}"
    file.write_text('\n{\n "id": "1"}\n')
    message = rf"^source {file}, line 2: begins an object over several lines; expected a line such as \{{.*array"
    with pytest.raises(UserError, match=message):
        read(file)


def test_a_first_line_that_is_cut_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"id": "1", "text": "He came, saw,\n{"id": "2", "text": "two"}\n')
    cut, document = read(file)
    assert isinstance(cut, Skipped) and cut.kind == "not JSON" and document == Document("2", "two")
