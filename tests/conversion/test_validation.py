"""Every text of two documents or more gets a document in each split, whatever the fraction and the number of workers."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from biphasic.config.convert import ConvertConfig
from biphasic.conversion import sources
from biphasic.conversion.convert import convert, inspect_sources
from biphasic.conversion.plan import plan_conversion
from biphasic.conversion.sources import draw_validation
from biphasic.conversion.train_tokenizer import train_tokenizer
from biphasic.conversion.verify import verify
from biphasic.data.packing import document_number, validation_end
from biphasic.errors import UserError
from helpers.outputs import same_bytes
from helpers.texts import sentences, write_parquet

Make = Callable[..., ConvertConfig]
ALONE = {"workers": 1}


@pytest.mark.parametrize(("share", "count"), [(1e-6, 401), (1e-6, 2), (0.999999, 2)])
def test_each_split_has_a_document(
    share: float, count: int, config_for: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = sentences(count)
    config = config_for(records, validation_fraction=share, cluster=ALONE)
    plan = plan_conversion(config)
    record = convert(config)
    held_out = record["splits"]["validation"]["documents"]
    assert (held_out, record["splits"]["train"]["documents"]) == ((1, count - 1) if share < 0.5 else (count - 1, 1))
    numbers = sorted(document_number(row["id"]) for row in records)
    assert record["validation_end"] == (numbers[0] + 1 if share < 0.5 else numbers[-1])
    message = f"{held_out} of {count} documents"
    assert plan.lines["validation"] == message
    assert f"validation: {message}\n" in capsys.readouterr().out
    assert verify(config.output).faults == []


def test_the_draw_does_not_depend_on_workers(config_for: Make, tmp_path: Path) -> None:
    text = tmp_path / "parts"
    text.mkdir()
    for part in range(3):
        write_parquet(text / f"{part}.parquet", sentences(900)[part * 300 : (part + 1) * 300])
    keys = {"validation_fraction": 1e-6, "unit_bytes": 2**16, "segments": {"kind": "documents"}}
    alone = config_for(str(text), output=str(tmp_path / "alone"), cluster=ALONE, **keys)
    assert convert(alone)["splits"]["validation"]["documents"] == 1
    together = config_for(str(text), output=str(tmp_path / "together"), cluster={"workers": 2}, **keys)
    convert(together)
    assert same_bytes(tmp_path / "alone", tmp_path / "together")


def test_large_texts_are_drawn_by_the_fraction_alone(config_for: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(sentences(500), validation_fraction=0.1)
    layouts = inspect_sources(config)[1]
    assert draw_validation(config, layouts)[1].endswith(" of 500 documents")
    monkeypatch.setattr(sources, "_COUNTED_ENTRIES", 100)
    assert draw_validation(config, layouts) == (validation_end(0.1), "about 50 of 500 documents")


def test_max_tokens_counts_only_documents_up_to_it(config_for: Make) -> None:
    """The document with the smallest hash of the text lies after the limit."""
    records = sentences(500)
    smallest = min(document_number(row["id"]) for row in records)
    records.sort(key=lambda row: document_number(row["id"]) == smallest)
    config = config_for(records, validation_fraction=1e-9, max_tokens=2000, cluster=ALONE)
    record = convert(config)
    assert record["splits"]["train"]["tokens"] == 2000
    assert 0 < record["splits"]["validation"]["documents"] < record["splits"]["train"]["documents"] / 2
    description = plan_conversion(config.model_copy(update={"output": f"{config.output}2"})).lines["validation"]
    assert description.startswith("1 of ") and description.endswith(" documents up to max_tokens")


def test_a_text_of_one_document_stops_before_any_work(config_for: Make, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("One paragraph.\n\nAnother paragraph.\n")
    config = config_for(str(book), validation_fraction=0.001, id_column=None)
    message = "the text is one document, which can't be in train/ and validation/: set source.text_files=paragraph"
    with pytest.raises(UserError, match=message):
        convert(config)
    assert not Path(config.output).exists()
    assert any(message in problem for problem in plan_conversion(config).problems)
    with pytest.raises(UserError, match=message):
        train_tokenizer(config, tmp_path / "trained", size=300)
    paragraphs = config.model_copy(update={"source": config.source.model_copy(update={"text_files": "paragraph"})})
    assert convert(paragraphs)["splits"]["validation"]["documents"] == 1
    twice = config_for([{"id": "1", "text": "a b"}, {"id": "1", "text": "a b"}], validation_fraction=0.5)
    with pytest.raises(UserError, match="all 2 documents have the same id or text"):
        convert(twice.model_copy(update={"output": str(tmp_path / "twice")}))


def test_a_tokenizer_is_trained_without_the_validation_document(config_for: Make, tmp_path: Path) -> None:
    config = config_for(sentences(20), validation_fraction=1e-6)
    assert train_tokenizer(config, tmp_path / "trained", size=300).documents == 19


@pytest.mark.parametrize(
    ("name", "on_bad_file", "message"),
    [
        ("a.txt", "stop", r"a\.txt: is empty \(0 bytes\); restore the file"),
        ("a.txt", "skip", "^source: expected documents; the source's files hold none$"),
        ("a.parquet", "stop", "^source: expected documents; the source's files hold none$"),
    ],
)
def test_a_source_without_text_leaves_the_output_free(
    config_for: Make, tmp_path: Path, name: str, on_bad_file: str, message: str
) -> None:
    (tmp_path / "source").mkdir()
    if name == "a.txt":
        (tmp_path / "source" / name).touch()
    else:
        pq.write_table(pa.table({"id": pa.array([], "string"), "text": pa.array([], "string")}), tmp_path / "source" / name)
    config = config_for(str(tmp_path / "source"), on_bad_file=on_bad_file)
    with pytest.raises(UserError, match=message):
        convert(config)
    assert not Path(config.output).exists()


def test_a_text_without_documents_stops_before_any_work(config_for: Make, tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("id,text\n1,\n2,\n")
    config = config_for(str(tmp_path / "empty.csv"), validation_fraction=0.001)
    with pytest.raises(UserError, match=r"nothing in it is a document: .*empty.csv, line 2 has no text, and so on"):
        convert(config)
    assert not Path(config.output).exists()
