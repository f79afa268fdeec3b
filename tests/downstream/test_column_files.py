"""What the columns of files with a word in each line are."""

from pathlib import Path
from typing import Any

import pytest

from biphasic.config.tasks import DatasetConfig
from biphasic.downstream.prepare import prepare_task
from biphasic.downstream.tables import open_table
from biphasic.errors import UserError
from helpers.downstream_sets import one_task, rows_of


def read(folder: Path, text: str, **source: Any) -> list[tuple[list[str], list[str]]]:
    """The words and labels of a prepared file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.conll").write_text(text)
    task = {"kind": "tokens", "labels_column": "labels", "splits": {"test": "a"}}
    config = one_task(folder, {**task, "source": {"files": {"a": [str(folder / "a.conll")]}, **source}})
    names = prepare_task("it", config)["label_names"]
    rows = rows_of(folder / "out" / "it", "test")
    return [(row["tokens"], [names[number] for number in row["labels"]]) for row in rows]


EXPECTED = [(["Ann", "left"], ["B-PER", "O"]), (["Paris"], ["B-LOC"])]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("from 0", "0\tAnn\tB-PER\n1\tleft\tO\n\n0\tParis\tB-LOC\n"),
        ("from 1", "1 Ann B-PER\n2 left O\n\n1 Paris B-LOC\n"),
        ("through the file", "5 Ann B-PER\n6 left O\n\n7 Paris B-LOC\n"),
        ("ranges", "1-2\tAnnleft\t_\t_\n1\tAnn\tB-PER\t_\n2\tleft\tO\t_\n\n1\tParis\tB-LOC\t_\n1.1\tgone\t_\t_\n"),
        ("a part of speech between", "1 Ann NNP B-PER\n2 left VBD O\n\n1 Paris NNP B-LOC\n"),
        ("comments of as many fields", "# newdoc\nAnn B-PER\nleft O\n\n#newdoc 1\nParis B-LOC\n"),
        ("comments in tabs", "# sent_id = 1\nAnn\tB-PER\nleft\tO\n\n# id 2\tdomain=en\nParis\tB-LOC\n"),
        ("Windows", "Ann B-PER\r\nleft O\r\n\r\nParis B-LOC\r\n"),
        ("a document's start", "-DOCSTART- O\n\nAnn B-PER\nleft O\n\nParis B-LOC\n"),
    ],
)
def test_the_columns_are_recognized(tmp_path: Path, name: str, text: str) -> None:
    assert read(tmp_path, text) == EXPECTED


def test_words_that_begin_with_a_number_sign(tmp_path: Path) -> None:
    text = "# O\n1 O\nfan O\n\n#Paris B-LOC\n# newdoc\nburns O\n"
    assert read(tmp_path, text) == [(["#", "1", "fan"], ["O"] * 3), (["#Paris", "burns"], ["B-LOC", "O"])]


def test_a_no_break_space_is_part_of_a_word(tmp_path: Path) -> None:
    assert read(tmp_path, "10\u00a0000 O\nfans B-PER\n") == [(["10\u00a0000", "fans"], ["O", "B-PER"])]


def test_names_decide(tmp_path: Path) -> None:
    text = "0\tO\tAnn\n1\tB-PER\tleft\n"
    assert read(tmp_path, text, columns=["number", "labels", "tokens"]) == [(["Ann", "left"], ["O", "B-PER"])]


@pytest.mark.parametrize(
    ("text", "source", "message"),
    [
        ("0 O\n1 B-PER\n", {}, "has 2 columns, the first of which numbers the words; expected a word and its label"),
        ("Ann\nleft\n", {}, "has 1 column, so there are no labels; expected a word and its label"),
        ("0 Ann O\n1 left O\n", {"columns": ["tokens", "x", "labels"]}, "column 1 of 3, are all numbers .0, 1."),
        ("Ann O\n", {"columns": ["tokens", "x", "labels"]}, "has 2 columns; expected 3 columns, the names in source"),
        ("Ann O\nleft\n", {}, "a.conll:2: has 1 columns; expected 2 columns|so there are no labels"),
    ],
)
def test_columns_that_are_refused(tmp_path: Path, text: str, source: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, text, **source)


def test_words_alone_can_be_predicted(tmp_path: Path) -> None:
    path = tmp_path / "words.conll"
    path.write_text("Alice\n#\nBob\n\nCarol\n")
    table = open_table(DatasetConfig(files={"texts": [str(path)]}), "texts", ["tokens"])
    assert table.rows["tokens"] == [["Alice", "#", "Bob"], ["Carol"]]
