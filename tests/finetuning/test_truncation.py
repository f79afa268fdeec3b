"""Texts beyond the maximum length: what is cut, what is counted, and windows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from biphasic.config.finetune import AnswerTokensConfig, ClassificationConfig, QuestionAnsweringConfig
from biphasic.data.tokenizer import load_tokenizer
from biphasic.downstream.prepare import prepare_task
from biphasic.errors import UserError
from biphasic.finetuning.classification import Classification
from biphasic.finetuning.question_answering import AnswerTokens, QuestionAnswering
from biphasic.finetuning.run import run
from biphasic.finetuning.truncation import format_and_cut, longest_first, windows
from biphasic.model.text_tokenizer import TextTokenizer
from helpers.downstream_sets import jsonl, one_task, rows_of
from helpers.toy_sets import config_of


@pytest.fixture(scope="module")
def tokenizer(toy: Path) -> TextTokenizer:
    return TextTokenizer(load_tokenizer(str(toy / "tokenizer")), 64)


def words(first: int, count: int) -> str:
    return " ".join(f"w{at % 60}" for at in range(first, first + count))


@pytest.mark.parametrize(("first", "second"), [(40, 3), (3, 40), (30, 30), (31, 30), (30, 31), (5, 6), (200, 1)])
def test_a_pair_is_cut_as_by_transformers(toy: Path, tokenizer: TextTokenizer, first: int, second: int) -> None:
    library = AutoTokenizer.from_pretrained(toy / "tokenizer")
    row = {"text": words(0, first), "text_pair": words(7, second)}
    expected = library(row["text"], row["text_pair"], truncation="longest_first", max_length=21, add_special_tokens=False)[
        "input_ids"
    ]
    texts, lost = format_and_cut(tokenizer, "{text} {text_pair}", [row], 21, "")
    assert texts[0].tolist() == expected
    assert lost[0].tolist() == [max(first + second - 21, 0), 0]


def test_the_text_of_the_template_is_kept(tokenizer: TextTokenizer) -> None:
    row = {"text": words(0, 50), "text_pair": words(7, 2)}
    encode = tokenizer.tokenizer.encode
    texts, _ = format_and_cut(tokenizer, "w1 {text} w2 {text_pair} w3 w4", [row], 12, "")
    [expected] = encode([f"w1 {words(0, 6)} w2 {words(7, 2)} w3 w4"])
    assert texts[0].tolist() == expected
    texts, _ = format_and_cut(tokenizer, "{text}", [row], 12, "")
    assert texts[0].tolist() == encode([words(0, 12)])[0]
    texts, lost = format_and_cut(tokenizer, "w1 w2 w3 {text}", [row], 2, "")
    assert texts[0].tolist() == encode(["w1 w2"])[0] and lost[0].tolist() == [51, 0]


def test_longest_first_of_three() -> None:
    assert longest_first([10, 2, 10], 12) == [5, 2, 5]
    assert longest_first([1, 1, 1], 12) == [1, 1, 1]
    assert longest_first([9, 9], 0) == [0, 0]


def test_windows_cover_every_token() -> None:
    assert windows(0, 8, 2) == [(0, 0)]
    assert windows(20, 8, 2) == [(0, 8), (6, 14), (12, 20)]
    assert windows(5, 8, 9) == [(0, 5)]
    for length in range(40):
        covered = {at for first, last in windows(length, 7, 128) for at in range(first, last)}
        assert covered == set(range(length))


def prepared(folder: Path, kind: str, rows: list[dict[str, Any]], **keys: Any) -> str:
    source = {"files": {"train": [jsonl(folder / f"{kind}.jsonl", rows)]}}
    splits = dict.fromkeys(("train", "validation", "test"), "train")
    prepare_task("it", one_task(folder, {"kind": kind, "source": source, "splits": splits, **keys}))
    return str(folder / "out" / "it")


def test_a_model_of_long_pairs_sees_both_texts(toy: Path, tmp_path: Path) -> None:
    """Only the second text decides the label, and the first one alone fills the model's length: cut at the end of the pair,
    every pair would look alike."""
    generator = np.random.default_rng(0)
    rows = [
        {
            "text": words(int(generator.integers(20, 60)), 80),
            "second": "w1 w1 w1" if at % 2 else "w2 w2 w2",
            "label": at % 2,
        }
        for at in range(320)
    ]
    data = prepared(tmp_path, "classification", rows, text_column="text", text_pair_column="second")
    task = {"kind": "classification", "name": "it", "data": data, "text": "{text} {text_pair}"}
    changes: dict[str, Any] = {"task": task, "max_duration": "6ep", "run_name": "long"}
    config = config_of("sst2", toy / "tasks", toy / "start", tmp_path, **changes)
    run(config)
    [predictions] = [rows_of(tmp_path / "runs" / "long" / "predictions", "test")]
    assert np.mean([row["gold"] == row["predicted"] for row in predictions]) == 1.0
    record = json.loads((tmp_path / "runs" / "long" / "record.json").read_text())
    assert record["about"]["cut"]["test"] == {
        "max_length": 63, "texts": 320, "cut": 320, "tokens": 6400, "answers": 0
    }  # fmt: skip


def test_lost_answers_and_questions_are_counted(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    context = words(0, 50)
    answers = {"text": ["w40"], "answer_start": [context.index("w40")]}
    rows = [
        {"question": "w1 w2", "context": context, "answers": answers},
        {"question": "w1", "context": "w1", "answers": []},
    ]
    data = prepared(tmp_path, "question_answering", rows)
    config = AnswerTokensConfig(kind="answer_tokens", name="it", data=data, max_length=20, text="{question} ")
    task = AnswerTokens(config, tokenizer, str(tmp_path / "cache"))
    task.examples("test")
    cut = task.cut["test"]
    assert (cut.texts, cut.cut, cut.tokens, cut.answers) == (2, 1, 32, 1)
    spans = QuestionAnsweringConfig(kind="question_answering", name="it", data=data, max_length=20, stride=4)
    task = QuestionAnswering(spans, tokenizer, str(tmp_path / "cache"))
    task.examples("test")
    cut = task.cut["test"]
    assert (cut.texts, cut.cut, cut.answers) == (2, 0, 0) and len(task.examples("test")["texts"]) > 2


def test_lowercased_texts_are_cut_by_their_own_characters(tokenizer: TextTokenizer) -> None:
    """`İ` becomes two characters: offsets are those of the text before that."""
    lower = replace(tokenizer, tokenizer=tokenizer.tokenizer.lowercasing())
    row = {"text": "İ" * 9 + " " + words(0, 40).upper(), "text_pair": "W3 W4"}
    texts, _ = format_and_cut(lower, "{text} {text_pair}", [row], 10, "")
    assert texts[0][-2:].tolist() == tokenizer.tokenizer.encode(["w3 w4"])[0]


def test_single_texts_for_a_template_of_pairs_are_refused(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    data = prepared(tmp_path, "classification", [{"text": "w1", "label": at % 2} for at in range(4)], text_column="text")
    config = ClassificationConfig(kind="classification", name="it", data=data, text="{text}{text_pair}")
    with pytest.raises(UserError, match="single texts"):
        Classification(config, tokenizer, str(tmp_path / "cache")).check_data()
