import gzip
import json
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from biphasic.conversion import reading
from biphasic.conversion.reading import Document, Skipped, read_documents
from biphasic.conversion.source_files import DamagedFileError, SourceFile
from biphasic.conversion.sources import find_files, inspect_files
from biphasic.errors import UserError
from helpers.source_files import (
    OPTIONS,
    csv_lines,
    documents,
    lines,
    options,
    read,
    skipped,
    source,
    texts,
    write,
)
from helpers.texts import sentences, write_parquet

RECORDS = sentences(250)


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
    advice = "set source.separator, or source.text_files: line or paragraph"
    assert (whole.kind, whole.reason) == ("too long", f"{reason}; {advice}")
    entries = read(tmp_path / "a.txt", text_files="paragraph")
    assert texts(entries) == ["one", "ü" * 50]
    assert skipped(entries) == [(f"a.txt, line {line}: {reason}", "too long") for line in (3, 5, 15)]
    assert max(map(len, kept)) == 201
    records = [{"id": "1", "text": "a"}, {"id": "2", "text": "b", "other": "x" * 600}, {"id": "3", "text": "c"}]
    entries = read(write(tmp_path / "b.jsonl", records))
    assert texts(entries) == ["a", "c"]
    assert skipped(entries) == [("b.jsonl, line 2: has more than 600 bytes", "too long")]
    assert max(map(len, kept)) == 600


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


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
@pytest.mark.parametrize(
    ("column", "condition", "held", "written"),
    [
        ("language", {"any_of": [False, "sv"]}, "text", r"true and false \(false\)"),  # [no, sv] in YAML
        ("language", {"none_of": [750]}, "text", r"numbers \(750\)"),  # [12:30]
        ("year", {"none_of": ["2013"]}, "numbers", r'text \("2013"\)'),
        ("year", {"any_of": [True]}, "numbers", r"true and false \(true\)"),
    ],
)
def test_a_filter_s_values_are_of_the_column_s_type(
    column: str, condition: dict[str, Any], held: str, written: str, ending: str, tmp_path: Path
) -> None:
    """Files are inspected before the conversion begins. In CSV all columns are text, and numbers where they are compared."""
    file = write(tmp_path / f"a.{ending}", [{"id": "1", "text": "a", "language": "no", "year": 2013}])
    if ending == "csv" and held == "numbers" and "text" in written:
        assert texts(read(file, filters=[{"column": column, **condition}])) == []
        return
    message = rf"filters: column '{column}' holds {held}.*, and (any|none)_of has {written}: .* only in quotes"
    with pytest.raises(UserError, match=message):
        inspect_files(find_files(source(file)).files, options(id_column="id", filters=[{"column": column, **condition}]))


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_filters_of_lists_compare_their_elements(ending: str, tmp_path: Path) -> None:
    languages = {"a": ["fr", "en"], "b": ["de"], "c": [], "d": None, "e": ["fr", None]}
    records = [{"id": name, "text": name, "languages": value} for name, value in languages.items()]
    file = write(tmp_path / f"a.{ending}", records)
    kept = {key: texts(read(file, filters=[{"column": "languages", key: ["fr", "sv"]}])) for key in ("any_of", "none_of")}
    assert kept == {"any_of": ["a", "e"], "none_of": ["b", "c"]}
    with pytest.raises(UserError, match=r"column 'languages' holds text.*, and any_of has numbers \(1\)"):
        read(file, filters=[{"column": "languages", "any_of": [1]}])


@pytest.mark.parametrize("kind", [pa.binary(), pa.binary(2), pa.dictionary(pa.int8(), pa.binary()), pa.list_(pa.binary())])
def test_filters_of_text_that_is_stored_as_bytes(kind: pa.DataType, tmp_path: Path) -> None:
    """As Spark and Hive write it. What is not UTF-8 equals no text."""
    languages = [b"fr", b"en", b"\xff\xff", None]
    values = [each and [each] for each in languages] if pa.types.is_list(kind) else languages
    file, texts_of = tmp_path / "a.parquet", ["one", "two", "three", "four"]
    pq.write_table(pa.table({"text": texts_of, "language": pa.array(values, kind)}), file)
    kept = [texts(read(file, id=None, filters=[{"column": "language", key: ["fr"]}])) for key in ("any_of", "none_of")]
    assert kept == [["one"], ["two", "three"]]


@pytest.mark.parametrize(
    "kind", [pa.float32(), pa.float64(), pa.decimal128(5, 2), pa.decimal256(60, 20), pa.dictionary(pa.int8(), pa.float32())]
)
@pytest.mark.parametrize("in_lists", [False, True])
def test_filters_compare_numbers_as_they_are_written(kind: pa.DataType, in_lists: bool, tmp_path: Path) -> None:
    """Whatever their type: 0.7 of 32 bits is 0.699999988 in a float's 64."""
    exact = pa.types.is_decimal(kind)
    scores: list[Any] = [None if each == 5 else Decimal(each) / 10 if exact else each / 10 for each in range(20)]
    values = pa.array([[score] for score in scores], pa.list_(kind)) if in_lists else pa.array(scores, kind)
    pq.write_table(pa.table({"text": [str(each) for each in range(20)], "score": values}), tmp_path / "a.parquet")

    def kept(**condition: Any) -> list[int]:
        return [int(text) for text in texts(read(tmp_path, id=None, filters=[{"column": "score", **condition}]))]

    assert kept(any_of=[0.1, 0.7, 1]) == [1, 7, 10]
    assert kept(none_of=[0.7, 1.0]) == [each for each in range(20) if each not in (7, 10, *[5] * (not in_lists))]
    if not in_lists:
        assert kept(min=0.7) == [*range(7, 20)]
        assert kept(min=0.1, max=0.7) == [1, 2, 3, 4, 6, 7]


def test_filters_know_every_digit_of_whole_numbers(tmp_path: Path) -> None:
    number = 2**53 + 1
    pq.write_table(pa.table({"text": ["a"], "n": pa.array([Decimal(number)], pa.decimal128(38, 0))}), tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text(f"text,n\nb,{number}\n")
    for shift, expected in ((0, ["a", "b"]), (-1, [])):
        assert texts(read(tmp_path, id=None, filters=[{"column": "n", "any_of": [number + shift]}])) == expected
    for condition, expected in (
        ({"min": number}, 2),
        ({"min": number + 1}, 0),
        ({"max": number - 1}, 0),
        ({"max": number}, 2),
    ):
        assert len(texts(read(tmp_path, id=None, filters=[{"column": "n", **condition}]))) == expected


def test_a_filter_leaves_the_ids_of_its_column(tmp_path: Path) -> None:
    """They decide what is held out for validation."""
    ids = pa.array([Decimal("5.00"), Decimal("7.25")])
    pq.write_table(pa.table({"text": ["a", "b"], "id": ids}), tmp_path / "a.parquet")
    for filters in ([], [{"column": "id", "min": 5}]):
        assert [entry.id for entry in read(tmp_path, filters=filters) if isinstance(entry, Document)] == ["5.00", "7.25"]


def test_a_parquet_file_whose_texts_are_all_null_has_no_documents(tmp_path: Path) -> None:
    """Its column has the type null. A filter on such a column keeps nothing."""
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": ["1"], "text": pa.nulls(1), "language": pa.nulls(1)}), file)
    (entry,) = read(file)
    assert isinstance(entry, Skipped) and entry.kind == "without text"
    assert texts(read(file, filters=[{"column": "language", "any_of": ["en"]}])) == []


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["1"]), pa.array(["a"]), pa.array(["b"])], ["id", "text", "text"]), file)
    with pytest.raises(UserError, match=r"a\.parquet: has several columns 'text': rename them, or remove all but one"):
        read(file)
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        (tmp_path / name).write_text("id,text,n,n,text\n1,a,2,3,b\n".replace(",", delimiter))
        with pytest.raises(UserError, match=rf"{name}, line 1: has several columns 'text': rename them, or remove"):
            read(tmp_path / name)
    (tmp_path / "b.csv").write_text("id,text,n,n\n1,a,2,3\n")
    assert texts(read(tmp_path / "b.csv")) == ["a"]  # this column is not read
    with pytest.raises(UserError, match=r"b\.csv, line 1: has several columns 'n'"):
        read(tmp_path / "b.csv", filters=[{"column": "n", "min": 1}])


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
    with pytest.raises(UserError, match=r"a\.csv, line 1: has no column 'text' \(it has: id, the text\); set text_column"):
        read(file)


@pytest.mark.parametrize(("ending", "separator"), [("csv", ";"), ("csv", "\t"), ("csv", "|"), ("tsv", ";"), ("tsv", ",")])
def test_a_table_with_another_separator_is_refused(tmp_path: Path, ending: str, separator: str) -> None:
    """Also with the name of its one column, which would make whole lines texts."""
    file, header = tmp_path / f"a.{ending}", separator.join(["ID", "text", "Lang"])
    file.write_text("\n".join([header, separator.join(["1", "hello, you", "en"])]))
    expected = "commas between the columns of a .csv file" if ending == "csv" else "tabs in a .tsv file"
    message = f"a.{ending}, line 1: has one column, {header!r}; expected {expected}, found {separator!r}"
    for text in ("text", header):
        with pytest.raises(UserError, match=re.escape(message)):
            read(file, text=text)


def test_csv_with_a_quotation_mark_that_is_not_closed(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('id,text\n1,one\n2,"two\n3,three\n')
    with pytest.raises(DamagedFileError, match=r"a\.csv, line 3: is damaged: a quotation mark"):
        read(file)


_BROKEN = {
    "a pair in the first line": '2,"two "inside" the field\nbut this line, is inside the field\nlast line, end"\n',
    "one in the first line": '2,"a 5" pipe\nand, more"\n',
    "a dialogue": '2,"He asked.\n"Is it?"\nAnd so, they left.\n"No, never," she said.\n"\n',
    "backslashes": '2,"he said \\"hi\\" and, \\"yes\nthat is, all\\" of it"\n',
    "more fields": '2,"No", he said, "is\nnot, closed"\n',
}


@pytest.mark.parametrize("broken", _BROKEN)
def test_the_rest_of_a_broken_field_is_no_row(broken: str, tmp_path: Path) -> None:
    for ending, separator in (("csv", ","), ("tsv", "\t")):
        file = tmp_path / f"a.{ending}"
        file.write_text(f"id,text\n1,one\n{_BROKEN[broken]}3,three\n".replace(",", separator))
        with pytest.raises(DamagedFileError, match=rf"a\.{ending}, line 3: is damaged: a quotation mark"):
            read(file)


def test_rows_after_a_broken_one_whose_marks_are_paired(tmp_path: Path) -> None:
    """A mark in a field without quotes is text."""
    (tmp_path / "a.csv").write_text('id,text\n1,"two "inside" it"\n2,"two ""here"" of it"\n3,5" pipe\n4,"x" y\n5,five\n')
    assert texts(read(tmp_path)) == ['two "here" of it', '5" pipe', "five"]


def test_an_open_quotation_mark_does_not_take_the_rest_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MAX_FIELD", 20)
    file = tmp_path / "a.csv"
    file.write_text('id,text\n1,one\n2,"two\n' + "3,three\n" * 10 + '4,"four"\n')
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
        unit = "line" if kind in ("txt", "md") else "file"
        assert texts(read(file, text_files=unit)) == ["one", "two \ufeff"], kind


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


@pytest.mark.parametrize("separator", ["<|endoftext|>", "---"])
@pytest.mark.parametrize("ending", ["txt", "TXT", "md.gz", "jsonl", "parquet"])
def test_a_separator_divides_texts(separator: str, ending: str, tmp_path: Path) -> None:
    text = f"One.\n\nStill one.\n{separator}\n\nTwo.{separator}Three.\n{separator}\n{separator}\n"
    file = tmp_path / f"a.{ending}"
    if ending == "parquet":
        write_parquet(file, [{"id": "x", "text": text}, {"id": "y", "text": "Four."}])
    elif ending == "jsonl":
        file.write_bytes(lines([{"id": "x", "text": text}, {"id": "y", "text": "Four."}]))
    else:
        file.write_bytes(gzip.compress(text.encode()) if ending.endswith("gz") else text.encode())
    config = options(source={"kind": "files", "paths": ["x"], "separator": separator})
    entries = list(read_documents(find_files(source(file)).files[0], config))
    expected = ["One.\n\nStill one.", "Two.", "Three."]
    is_plain = ending not in ("jsonl", "parquet")
    assert texts(entries) == (expected if is_plain else [*expected, "Four."])
    if not is_plain:
        assert [entry.id for entry in entries if isinstance(entry, Document)] == ["x-0", "x-1", "x-2", "y"]


def test_a_text_of_separators_only_has_no_text(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(lines([{"id": "x", "text": "--\n--"}, {"id": "y", "text": "--one"}]))
    config = options(source={"kind": "files", "paths": ["x"], "separator": "--"})
    entries = list(read_documents(find_files(source(file)).files[0], config))
    assert [type(entry) for entry in entries] == [Skipped, Document]
    assert entries[1] == Document("y", "one")


def test_windows_of_zstd_above_128_mib(tmp_path: Path) -> None:
    """As the Reddit dumps have, of two frames. Cut short, it is damaged."""
    content = lines(RECORDS)
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    frames = []
    for _ in range(2):
        frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        frames.append(frame.compress(content) + frame.flush())
    file = tmp_path / "RC_2010-01.jsonl.zst"
    file.write_bytes(b"".join(frames))
    assert zstandard.get_frame_parameters(frames[0]).window_size == 2**31
    assert read(file) == documents([*RECORDS, *RECORDS])
    file.write_bytes(b"".join(frames)[:-1])
    with pytest.raises(DamagedFileError, match=r"is damaged after line \d+ \(the compressed data ends early\)"):
        list(read_documents(find_files(source(file)).files[0], OPTIONS))


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    """Other characters that `str.splitlines` takes for a line's end, and Unicode's spaces, are text."""
    odd = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\u3000\u200b\u200c\u200d\xa0\ufeff"
    records = [{"id": str(number), "text": f"{odd}東京{odd}ที่นี่ क्\u200dष{odd}"} for number in range(3)]
    text = "".join(record["text"] + "\n" for record in records)
    raw = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    for name, content in (("a.jsonl", raw), ("b.csv", csv_lines(records).decode()), ("c.txt", text)):
        file = tmp_path / name
        file.write_bytes(content.encode())
        entries = read_documents(*find_files(source(file)).files, options("line", id_column=None))
        assert texts(list(entries)) == [record["text"] for record in records]
