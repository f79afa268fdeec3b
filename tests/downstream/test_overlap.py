"""What evaluation sets share with training text: planted copies are found, others are not, as by brute force."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from biphasic.commands import main
from biphasic.config.convert import ConvertConfig
from biphasic.conversion.convert import convert
from biphasic.downstream import overlap
from biphasic.downstream.overlap import NgramIndex, Run, describe, find_overlap, words_of
from biphasic.downstream.prepare import prepare_task
from biphasic.errors import UserError
from helpers.downstream_sets import jsonl, one_task, rows_of
from helpers.texts import write_parquet

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
    """Return a folder with a conversion of the training documents, `out`, its YAML, and a set, `tasks/out/it`."""
    training, examples = texts()
    records = [{"id": f"doc{number}", "text": text} for number, text in enumerate(training)]
    source = write_parquet(tmp_path / "text.parquet", records)
    config = config_for(source, id_column="id", sequence_length=1024, shard_bytes=16384, cluster={"workers": 1})
    convert(config)
    (tmp_path / "convert.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)))
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


@pytest.mark.parametrize("words", [13, 8])
def test_shared_passages_are_those_of_brute_force(folder: Path, words: int) -> None:
    training, examples = texts()
    report = find_overlap(str(folder / "out"), [str(folder / "tasks/out/it")], words, str(folder / "cache"))
    row = report["sets"][-1]
    expected = reference(rows_of(folder / "tasks/out/it", "test"), training, words)
    assert {example["id"]: (example["share"], example["run"]) for example in row["found"]} == expected
    assert [example["run"] for example in row["found"]] == sorted((run for _, run in expected.values()), reverse=True)
    assert report["read"] == sum(len(words_of(text)) for text in training)
    assert row["examples"] == len(examples) + 1 and row["shared"] == len(expected)
    if words == 13:
        assert set(expected) == {"whole", "part", "two parts", "chinese", "pair"}
        assert (row["under 13 words"], row["run of 50"], row["copied 80%"], row["longest run"]) == (1, 1, 1, 60)
        found = {example["id"]: example for example in row["found"]}
        assert found["two parts"]["passage"] == " ".join(texts()[0][6].split()[20:37])
        assert found["pair"]["column"] == "text_pair" and found["part"]["column"] == "text"


def test_the_place_is_that_of_the_passage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from biphasic.data.mds_reader import read_rows

    arguments = ["overlap", str(folder / "out"), "--tasks", str(folder / "tasks/out/it"), f"--cache={folder / 'cache'}"]
    assert main([*arguments, "--examples", "1", f"--out={folder / 'report.json'}"]) == 0
    printed = capsys.readouterr().out
    report = json.loads((folder / "report.json").read_text())
    assert printed.startswith(describe(report, 1)) and "| it     | test       |" in printed
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
        assert example["passage"] in " ".join(words_of(tokenizer.decode(part.tolist())))


def test_the_report_depends_on_no_number_of_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = []
    for cores in (1, 2):
        monkeypatch.setattr(overlap, "available_cores", lambda cores=cores: cores)
        reports.append(find_overlap(str(folder / "out"), [str(folder / "tasks/out/it")], 13, str(folder / "cache")))
    assert reports[0] == reports[1] and reports[0]["sets"][-1]["shared"] == 5


def test_sources_are_read_by_their_yaml(folder: Path) -> None:
    found = []
    for data in (folder / "out", folder / "convert.yaml"):
        report = find_overlap(str(data), [str(folder / "tasks/out/it")], 13, str(folder / "cache"))
        found.append(report["sets"][-1]["found"])
    other = {"place": ""}
    assert [{**example, **other} for example in found[0]] == [{**example, **other} for example in found[1]]
    assert {example["id"]: example["place"] for example in found[1]}["whole"] == (
        f"{folder / 'text.parquet'}, document 4 (id doc3)"
    )


def test_a_damaged_source_is_read_up_to_its_damage(folder: Path) -> None:
    """If the YAML says so, as the conversion does."""
    generator = np.random.default_rng(0)
    documents = [*texts()[0], *(sentence(generator, 1000) for _ in range(300))]
    lines = "".join(json.dumps({"id": f"doc{n}", "text": text}) + "\n" for n, text in enumerate(documents))
    content = gzip.compress(lines.encode())
    (folder / "text.jsonl.gz").write_bytes(content[: len(content) * 3 // 4])
    config = {**yaml.safe_load((folder / "convert.yaml").read_text()), "on_bad_file": "skip"}
    config["source"]["paths"] = [str(folder / "text.jsonl.gz")]
    (folder / "convert.yaml").write_text(yaml.safe_dump(config))
    given = str(folder / "convert.yaml"), [str(folder / "tasks/out/it")], 13, str(folder / "cache")
    assert find_overlap(*given)["sets"][-1]["shared"] > 0
    with pytest.raises(UserError, match=r"text\.jsonl\.gz: is damaged after line \d\d+ "):
        find_overlap(*given, ["on_bad_file=stop"])


def test_words() -> None:
    assert words_of("It's “GOOD”—well-known, ﬁne: 3.5€ naïve cafe\u0301") == (
        ["it", "s", "good", "well", "known", "fine", "3", "5", "naïve", "café"]
    )
    assert words_of("我们go去公园。ไทย") == ["我", "们", "go", "去", "公", "园", "ไ", "ท", "ย"]
    assert words_of("नमस्ते दुनिया") == ["नमस्ते", "दुनिया"]


def test_hashes_of_different_ngrams_differ() -> None:
    generator = np.random.default_rng(0)
    text = [f"w{number}" for number in generator.integers(0, 30, 20_000)]
    index = NgramIndex([text, text[:50]], 3)
    grams = {tuple(text[at : at + 3]) for at in range(len(text) - 2)}
    assert len(index.hash) == len(grams)
    runs = dict[int, Run]()
    numbers = index.find(["x", *text[7:12], "x"], "first", runs)
    assert len(index.find(text[100:102], "second", runs)) == 0
    assert len(numbers) == 3 and runs[0] == runs[1] == (5, 7, "first")


def test_retrieval_sets_and_bad_input(folder: Path, toy_retrieval: Path) -> None:
    report = find_overlap(str(folder / "out"), [str(toy_retrieval)], 2, str(folder / "cache"))
    assert [row["split"] for row in report["sets"]] == ["queries", "corpus"]
    assert all(row["shared"] == 0 for row in report["sets"])
    with pytest.raises(UserError, match=r"--words 500: no example of .*it has as many words"):
        find_overlap(str(folder / "out"), [str(folder / "tasks/out/it")], 500, str(folder / "cache"))
    with pytest.raises(UserError, match=r"holds no conversion\.json"):
        find_overlap(str(folder / "tasks"), [str(folder / "tasks/out/it")], 13, str(folder / "cache"))
    with pytest.raises(UserError, match=r"has no task\.json"):
        find_overlap(str(folder / "out"), [str(folder)], 13, str(folder / "cache"))


@pytest.fixture
def toy_retrieval(tmp_path: Path) -> Path:
    rows = [{"_id": f"d{at}", "text": f"a b c{at}"} for at in range(5)]
    qrels = [{"query-id": "d1", "corpus-id": "d2", "score": 1}]
    (tmp_path / "retrieval").mkdir()
    content: dict[str, Any] = {
        "kind": "retrieval",
        "corpus": {"files": [jsonl(tmp_path / "corpus.jsonl", rows)], "text_columns": ["text"]},
        "queries": [{"files": [jsonl(tmp_path / "queries.jsonl", rows)]}],
        "qrels": {"test": {"files": [jsonl(tmp_path / "qrels.jsonl", qrels)]}},
        "judged_only": False,
    }
    prepare_task("it", one_task(tmp_path / "retrieval", content))
    return tmp_path / "retrieval/out/it"


def test_a_run_is_consecutive_in_both_texts() -> None:
    index = NgramIndex([list("bcdqabc")], 3)
    runs = dict[int, Run]()
    numbers = index.find(list("abcd"), "place", runs)
    assert len(numbers) == 2 and runs == {0: (3, 4, "place")}
