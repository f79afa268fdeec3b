"""What evaluation sets share with training text: planted copies are found, others are not, as by brute force."""

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from biphasic.config.convert import ConvertConfig
from biphasic.conversion.convert import convert
from biphasic.downstream.prepare import prepare_task
from helpers.downstream_sets import jsonl, one_task, rows_of
from helpers.texts import write_parquet

# Its processes import it by its name.
sys.path.append(str(Path(__file__).parents[2] / "recipes/overlap"))
overlap = importlib.import_module("overlap")
CHINESE = "今天天气很好我们一起去公园散步看花然后回家吃饭"


def sentence(generator: np.random.Generator, count: int) -> str:
    return " ".join(f"word{number}" for number in generator.integers(0, 400, count))


def texts() -> tuple[list[str], dict[str, str]]:
    """Return training documents, and evaluation texts by id, in some of which a part of a document is planted."""
    generator = np.random.default_rng(1)
    training = [sentence(generator, 60) for _ in range(60)] + [f"开始。{CHINESE}。结束"]
    words = [text.split() for text in training]
    examples = {f"other{at}": sentence(generator, 40) for at in range(12)}
    examples |= {
        "whole": ", ".join(word.upper() for word in words[3]) + "!",
        "part": f"{sentence(generator, 30)} {' '.join(words[4][10:30])} {sentence(generator, 9)}",
        "two parts": f"{' '.join(words[5][:14])} {sentence(generator, 3)} — “{' '.join(words[6][20:37])}”",
        "twelve": f"{sentence(generator, 5)} {' '.join(words[7][:12])} {sentence(generator, 5)}",
        "short": " ".join(words[8][:12]),
        "reversed": " ".join(reversed(words[9])),
        "chinese": f"问题。{CHINESE[:15]}。",
        "end to start": f"{' '.join(words[10][-7:])} {' '.join(words[11][:7])}",
    }
    return training, examples


@pytest.fixture
def folder(tmp_path: Path, config_for: Callable[..., ConvertConfig]) -> Path:
    """Return a folder with a conversion of the training documents, `out`, and a set, `tasks/out/it`."""
    training, examples = texts()
    records = [{"id": f"doc{number}", "text": text} for number, text in enumerate(training)]
    source = write_parquet(tmp_path / "text.parquet", records)
    config = config_for(source, id_column="id", sequence_length=1024, shard_bytes=16384, cluster={"workers": 1})
    convert(config)
    rows = [{"id": id, "a": text, "b": "a short second text", "y": 0} for id, text in examples.items()]
    rows += [{"id": "pair", "a": examples["other0"], "b": examples["part"], "y": 1}]
    (tmp_path / "tasks").mkdir()
    files = {split: [jsonl(tmp_path / f"{split}.jsonl", part)] for split, part in (("train", rows[:2]), ("test", rows))}
    task = {"kind": "classification", "source": {"files": files}, "splits": {split: split for split in files},
            "text_column": "a", "text_pair_column": "b", "label_column": "y", "id_column": "id",
            "label_names": ["no", "yes"]}  # fmt: skip
    prepare_task("it", one_task(tmp_path / "tasks", task))
    return tmp_path


def reference(examples: list[dict[str, Any]], training: list[str], words: int = 13) -> dict[str, tuple[float, int]]:
    """Return the share of the n-grams and the longest run of each example that shares an n-gram, by brute force."""

    def split(text: str) -> list[str]:
        return re.findall(r"[\u4e00-\u9fff]|[a-z0-9]+", text.lower())

    def grams(text: list[str], length: int) -> list[tuple[str, ...]]:
        return [tuple(text[at : at + length]) for at in range(len(text) - length + 1)]

    documents = [split(text) for text in training]
    known = {gram for document in documents for gram in grams(document, words)}
    result = {}
    for row in examples:
        columns = [split(row[name]) for name in ("text", "text_pair")]
        of_row = [gram for text in columns for gram in grams(text, words)]
        if not known.intersection(of_row):
            continue
        longest = words
        while any(gram in grams(document, longest + 1) for text in columns for gram in grams(text, longest + 1)
                  for document in documents):  # fmt: skip
            longest += 1
        result[row["id"]] = (sum(gram in known for gram in of_row) / len(of_row), longest)
    return result


def report_of(folder: Path, *options: str) -> dict[str, Any]:
    out = folder / "report.json"
    assert overlap.main([str(folder / "out"), str(folder / "tasks/out/it"), f"--out={out}", *options]) == 0
    return json.loads(out.read_text())


@pytest.mark.parametrize(("words", "cores"), [(13, 2), (8, 1)])
def test_shared_passages_are_those_of_brute_force(
    folder: Path, words: int, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "available_cores", lambda: cores)
    training, examples = texts()
    report = report_of(folder, "--words", str(words))
    row = report["sets"][-1]
    expected = reference(rows_of(folder / "tasks/out/it", "test"), training, words)
    assert {example["id"]: (example["share"], example["run"]) for example in row["found"]} == expected
    assert [example["run"] for example in row["found"]] == sorted((run for _, run in expected.values()), reverse=True)
    assert report["read"] == sum(len(overlap.words_of(text)) for text in training)
    assert row["examples"] == len(examples) + 1 and row["shared"] == len(expected)
    if words == 13:
        assert set(expected) == {"whole", "part", "two parts", "chinese", "pair"}
        assert (row["under 13 words"], row["run of 50"], row["copied 80%"], row["longest run"]) == (1, 1, 1, 60)
        found = {example["id"]: example for example in row["found"]}
        assert found["two parts"]["passage"] == " ".join(texts()[0][6].split()[20:37])
        assert found["pair"]["column"] == "text_pair" and found["part"]["column"] == "text"


def test_the_place_is_that_of_the_passage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from biphasic.data.mds_reader import read_rows

    report = report_of(folder, "--examples", "1")
    printed = capsys.readouterr().out
    assert "| it     | test       |" in printed
    assert printed.count("consecutive words") == 1 and report["sets"][-1]["found"][0]["passage"] in printed
    rows = dict(read_rows(str(folder / "out/train"), range(1000)))
    assert len(rows) > 3
    from biphasic.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(folder / "out/tokenizer")).tokenizer
    for example in report["sets"][-1]["found"]:
        match = re.fullmatch(r"row ([\d,]+), segment (\d+) \(train/.+\)", example["place"])
        assert match is not None
        row, segment = rows[int(match[1].replace(",", ""))], int(match[2])
        part = np.split(row["tokens"], row["lengths"].cumsum())[segment - 1]
        assert example["passage"] in " ".join(overlap.words_of(tokenizer.decode(part.tolist())))


def test_only_a_finished_conversion_is_searched(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "out/conversion.json").unlink()
    assert overlap.main([str(folder / "out"), str(folder / "tasks/out/it")]) == 2
    assert "is not a finished conversion" in capsys.readouterr().err
