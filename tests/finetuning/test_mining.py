"""Mined hard negatives: those of a brute-force search, on any number of ranks, also after an interruption."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from biphasic.commands import main
from biphasic.downstream.prepare import prepare_task
from biphasic.errors import UserError
from biphasic.evaluation import blocks
from biphasic.evaluation.embedder import EncoderEmbedder
from biphasic.evaluation.search import ExactTopK
from biphasic.finetuning import mining
from biphasic.finetuning.mining import mine
from biphasic.finetuning.trial import run_trial
from biphasic.model.encoder import load_encoder
from helpers import warm
from helpers.downstream_sets import jsonl, one_task, rows_of
from helpers.mteb_mirror import PROMPTS, write_model
from helpers.toy_sets import config_of, retrieval_pairs

LIMITS: dict[str, Any] = {"count": 4, "depth": 12, "below": 0.9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a set, `out/it`, and an encoder with prompts, `encoder`.

    Two queries have two positives. The corpus has a positive, texts with a positive's words in another order, and titles.
    """
    root = tmp_path_factory.mktemp("mining")
    pairs = [{"q": query, "p": text} for query, text in retrieval_pairs(40, 1)]
    pairs += [{"q": pairs[at]["q"], "p": text} for at, (_, text) in enumerate(retrieval_pairs(2, 2))]
    documents = [pairs[0]["p"], *(" ".join(row["p"].split()[::-1]) for row in pairs[:20])]
    documents += [text for _, text in retrieval_pairs(30, 3)]
    corpus = [{"_id": f"d{at}", "title": "w9" * (at % 2), "text": text} for at, text in enumerate(documents)]
    task: dict[str, Any] = {
        "kind": "retrieval",
        "train": {"files": [jsonl(root / "pairs.jsonl", pairs)], "query_column": "q", "positive_column": "p"},
        "corpus": {"files": [jsonl(root / "corpus.jsonl", corpus)], "text_columns": ["title", "text"]},
        "queries": [{"files": [jsonl(root / "queries.jsonl", [{"_id": "q1", "text": "w1 w2"}])]}],
        "qrels": {
            "test": {"files": [jsonl(root / "qrels.jsonl", [{"query-id": "q1", "corpus-id": "d1", "score": 1}])]}
        },
        "judged_only": False,
    }
    prepare_task("it", one_task(root, task))
    write_model(root / "encoder", PROMPTS)
    return root


def mined(folder: Path, name: str, limits: dict[str, Any] = LIMITS, cache: str = "") -> Path:
    """Mine into `folder / name`."""
    mine(
        str(folder / "encoder"),
        str(folder / "out/it"),
        str(folder / name),
        str(folder / (cache or name)) + "-c",
        **limits,
    )
    return folder / name


def content(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def overlaps(one: str, other: str) -> bool:
    """Return whether the words of one text occur in a row in the other."""
    short, long = sorted((text.replace(".", " ").split() for text in (one, other)), key=len)
    return any(long[at : at + len(short)] == short for at in range(len(long) - len(short) + 1))


def reference(folder: Path) -> list[dict[str, Any]]:
    """Return the rows that a search over all texts, each embedded alone, gives."""
    encoder = load_encoder(str(folder / "encoder"))

    def embed(texts: list[str], role: str) -> np.ndarray:
        ids = [encoder.tokenize([PROMPTS[role] + text]) for text in texts]
        rows = np.concatenate([encoder.embed(one).double().numpy() for one in ids])
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    pairs = rows_of(folder / "out/it", "train")
    texts = [row["positive"] for row in pairs] + [row["text"] for row in rows_of(folder / "out/it", "corpus")]
    documents = list(dict.fromkeys(texts))
    embeddings, result = embed(documents, "document"), []
    for query in dict.fromkeys(row["query"] for row in pairs):
        scores = embeddings @ embed([query], "query")[0]
        positives = [documents.index(row["positive"]) for row in pairs if row["query"] == query]
        least = min(scores[at] - abs(scores[at]) * (1 - LIMITS["below"]) for at in positives)
        considered = [at for at in np.argsort(-scores, kind="stable") if scores[at] <= least][: LIMITS["depth"]]
        of_query = [documents[at] for at in positives]
        same = {at for at in considered for text in of_query if overlaps(documents[at], text)}
        allowed = [at for at in considered if at not in {*positives, *same}]
        chosen = allowed[: LIMITS["count"]]
        for at in positives:
            negatives = [documents[document] for document in chosen]
            row = {"query": query, "positive": documents[at], "negatives": negatives, "scores": scores[[at, *chosen]]}
            result += [row] if chosen else []
    return result


def test_negatives_are_those_of_a_brute_force_search(folder: Path) -> None:
    rows = rows_of(mined(folder, "brute-force"), "train")
    expected = {(row["query"], row["positive"]): row for row in reference(folder)}
    assert [list(row) for row in rows] == [["query", "positive", "negatives", "scores"]] * len(rows)
    assert len(rows) == len(expected) > 30
    for row in rows:
        one = expected[row["query"], row["positive"]]
        # An untrained encoder gives equal scores to texts with the same words, up to rounding.
        np.testing.assert_allclose(row["scores"], one["scores"], atol=1e-5)
        assert row["negatives"] == one["negatives"]


def test_no_query_gets_a_relevant_document(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Positives are known within titled documents, by judgments of any split, and by all pairs of a query."""
    pairs = [{"q": query, "p": text} for query, text in retrieval_pairs(40, 1)]
    corpus = [{"_id": f"d{at}", "title": f"W{at}!", "text": row["p"]} for at, row in enumerate(pairs)]
    # For the first ten queries, an unrelated text is judged relevant, and another is not relevant enough.
    others = [text for _, text in retrieval_pairs(20, 3)]
    corpus += [{"_id": f"o{at}", "title": "", "text": text} for at, text in enumerate(others)]
    judged = {f"q{at}": {f"d{at}": 2, **({f"o{at}": 2, f"o{at + 10}": 1} if at < 10 else {})} for at in range(40)}
    # The second pair of a query has a positive that isn't in the corpus, and another space in the query.
    pairs += [{"q": row["q"].replace(" ", "  ", 1), "p": f"{row['p']} w3"} for row in pairs[10:15]]
    rows = [
        {"query-id": q, "corpus-id": d, "score": grade} for q, grades in judged.items() for d, grade in grades.items()
    ]
    task: dict[str, Any] = {
        "kind": "retrieval",
        "train": {"files": [jsonl(tmp_path / "pairs.jsonl", pairs)], "query_column": "q", "positive_column": "p"},
        "corpus": {"files": [jsonl(tmp_path / "corpus.jsonl", corpus)], "text_columns": ["title", "text"]},
        "queries": [{"files": [jsonl(tmp_path / "queries.jsonl", [
            {"_id": f"q{at}", "text": row["q"]} for at, row in enumerate(pairs[:40])])]}],
        "qrels": {split: {"files": [jsonl(tmp_path / f"{split}.jsonl", part)]}
                  for split, part in (("train", rows[::2]), ("test", rows[1::2]))},
        "min_score": 2,
    }  # fmt: skip
    prepare_task("it", one_task(tmp_path, task))
    # By hand: the texts, with their titles, that each query's ids name, and its pairs' positives.
    text_of = {row["_id"]: ". ".join(filter(None, [row["title"], row["text"]])) for row in corpus}
    relevant = {row["q"]: {text_of[id] for id, grade in judged[f"q{at}"].items() if grade == 2} | {row["p"]}
                for at, row in enumerate(pairs[:40])}  # fmt: skip
    for row in pairs[40:]:
        relevant[row["q"].replace("  ", " ")].add(row["p"])

    def own(name: str) -> dict[str, set[str]]:
        limits = {"count": 300, "depth": 300, "below": 1.0}
        mine(str(folder / "encoder"), str(tmp_path / "out/it"), str(tmp_path / name), str(tmp_path / "cache"), **limits)
        result: dict[str, set[str]] = {}
        for row in rows_of(tmp_path / name, "train"):
            query = row["query"].replace("  ", " ")
            result.setdefault(query, set()).update(relevant[query] & {*row["negatives"]})
            negatives.setdefault(query, set()).update(row["negatives"])
        return {query: texts for query, texts in result.items() if texts}

    negatives: dict[str, set[str]] = {}
    assert own("mined") == {}
    # Documents of the lower grade, and documents of others, are negatives.
    irrelevant = [text_of[f"o{at + 10}"] in negatives.get(pairs[at]["q"], ()) for at in range(10)]
    assert any(irrelevant) and min(map(len, negatives.values())) >= 1
    # Without the check, many would have one.
    monkeypatch.setattr(mining._Pool, "is_relevant", lambda *_: False)
    assert len(own("unchecked")) > 20


def test_the_limit_leaves_out_documents(folder: Path) -> None:
    def negatives(below: float) -> dict[str, set[str]]:
        out = mined(folder, f"below-{below}", {"count": 300, "depth": 300, "below": below}, "limits")
        record = json.loads((out / "task.json").read_text())["mined"]
        assert record["negatives"] == sum(len(row["negatives"]) for row in rows_of(out, "train"))
        return {row["query"]: set(row["negatives"]) for row in rows_of(out, "train")}

    pairs = rows_of(folder / "out/it", "train")
    positives = {row["query"]: {one["positive"] for one in pairs if one["query"] == row["query"]} for row in pairs}
    strict, everything = negatives(0.9), negatives(1.0)
    assert sum(len(texts) > 1 for texts in positives.values()) == 2
    for query, texts in everything.items():
        assert strict.get(query, set()) <= texts and not texts & positives[query]
    assert sum(map(len, strict.values())) < sum(map(len, everything.values()))


def test_bytes_depend_neither_on_blocks_nor_on_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = content(mined(folder, "one"))
    assert set(one) == {"task.json", "train.parquet", "corpus.parquet", "queries.parquet", "qrels/test.parquet"}
    assert {name: one[name] for name in one if name not in ("task.json", "train.parquet")}.items() <= content(
        folder / "out/it"
    ).items()
    monkeypatch.setattr(mining, "ExactTopK", partial(ExactTopK, block=7))
    monkeypatch.setattr(mining, "_PAIRS_AT_ONCE", 5)
    assert content(mined(folder, "blocks", cache="one")) == one
    arguments = [
        "mine",
        str(folder / "encoder"),
        str(folder / "out/it"),
        str(folder / "ranks"),
        "--count=4",
        "--depth=12",
    ]
    arguments += ["--below=0.9", f"--cache={folder / 'ranks-c'}"]
    code = "from biphasic.evaluation import blocks\nblocks.SMALL_BLOCK = 16"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = warm.run(
        arguments, 2, environment, module="biphasic", code=code, setup="import biphasic.finetuning.mining"
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.count("next: ") == 1
    monkeypatch.setattr(blocks, "SMALL_BLOCK", 16)
    assert content(folder / "ranks") == content(mined(folder, "small-blocks"))


def test_another_set_does_not_read_the_embeddings_of_the_first(folder: Path) -> None:
    mined(folder, "first")
    other = Path(shutil.copytree(folder / "out/it", folder / "other-set"))
    table = pq.read_table(other / "train.parquet")
    pq.write_table(table.take([*range(1, len(table)), 0]), other / "train.parquet")
    sets = []
    for name, cache in (("after-first", "first"), ("alone", "alone")):
        mine(str(folder / "encoder"), str(other), str(folder / name), str(folder / cache) + "-c", **LIMITS)
        sets.append(content(folder / name)["train.parquet"])
    assert sets[0] == sets[1] != content(folder / "first")["train.parquet"]


def stop_after(calls: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that interrupts at the call after so many."""
    numbers = itertools.count(1)

    def limited(*arguments: Any) -> Any:
        if next(numbers) > calls:
            raise KeyboardInterrupt
        return function(*arguments)

    return limited


def test_an_interrupted_call_resumes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "SMALL_BLOCK", 16)
    whole = content(mined(folder, "whole"))
    texts: list[str] = []
    embed = EncoderEmbedder.embed

    def counted(self: EncoderEmbedder, portion: list[str], progress: Any) -> np.ndarray:
        texts.extend(portion)
        return embed(self, portion, progress)

    for target, name, calls in ((EncoderEmbedder, "embed", 5), (mining, "json_bytes", 0)):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, stop_after(calls, getattr(target, name)))
            with pytest.raises(KeyboardInterrupt):
                mined(folder, "killed")
        assert not (folder / "killed/task.json").exists()
    assert (folder / "killed/task.started").exists() and (folder / "killed/train.parquet").exists()
    monkeypatch.setattr(EncoderEmbedder, "embed", counted)
    assert content(mined(folder, "killed")) == whole
    assert texts == []
    mined(folder, "counted")
    assert len(texts) == 40 + len({row["positive"] for row in rows_of(folder / "out/it", "train")} | {
        row["text"] for row in rows_of(folder / "out/it", "corpus")
    })  # fmt: skip
    # A finished set is not mined again.
    monkeypatch.setattr(mining, "_mine", None)
    assert content(mined(folder, "whole")) == whole


def test_fine_tuning_reads_the_mined_set(folder: Path) -> None:
    out = str(mined(folder, "trained-on", cache="one"))
    config = config_of("msmarco", folder, folder / "encoder", folder, task__data=out, task__hard_negatives=2,
                       task__scored_on={"it": out}, max_duration="1ba")  # fmt: skip
    assert run_trial(config).about["steps"] == 1


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["mine", str(folder / "encoder"), str(folder / "out/it"), str(folder / "printed"), "--count=4"]
    arguments += ["--below=0.9", f"--cache={folder / 'one-c'}"]
    assert main([*arguments, "--depth=12"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "mining for 40 queries among " in "\n".join(lines)
    record = json.loads((folder / "printed/task.json").read_text())
    assert lines[-2].startswith(f"{folder / 'printed'}: {record['rows']['train']} pairs, ")
    assert lines[-1].endswith(f"task.data={folder / 'printed'} task.hard_negatives=4")
    assert main(["mine", str(folder / "nowhere"), *arguments[2:3], str(folder / "other")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_bad_input_is_refused(folder: Path, toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, source = str(folder / "encoder"), str(folder / "out/it")

    def refused(message: str, task: str = source, out: str = "bad", model: str = model, **options: Any) -> None:
        with pytest.raises(UserError, match=message):
            mine(model, task, str(folder / out), str(folder / "bad-c"), **options)

    refused(r"sst2: is a dataset of kind classification; expected retrieval", str(toy / "tasks/sst2"))
    pairless, one_pair = (Path(shutil.copytree(source, folder / name)) for name in ("pairless", "one-pair"))
    (pairless / "train.parquet").unlink()
    pq.write_table(pq.read_table(one_pair / "train.parquet").slice(0, 1), one_pair / "train.parquet")
    record = json.loads((one_pair / "task.json").read_text())
    (one_pair / "task.json").write_text(json.dumps({**record, "rows": {"train": 1}}))
    refused(r"pairless: has no train \(it has: corpus, qrels/test, queries\)", str(pairless))
    refused("nowhere/model: can't be loaded", model=str(folder / "nowhere/model"))
    refused(r"--depth: expected at least --count \(7\); got 3", depth=3)
    for name in ("--below=2", "--below=x"):
        assert main(["mine", model, source, str(folder / "bad"), name]) == 2
        assert "expected a number above 0, at most 1; got " in capsys.readouterr().err
    refused("is TASK_FOLDER, which is kept", out="out/it")
    refused("no pair gets a negative", str(one_pair))
    mined(folder, "settings", cache="one")
    refused(r"was made with other settings \(count differ\)", out="settings", **{**LIMITS, "count": 3})
    (folder / "foreign").mkdir()
    (folder / "foreign/notes.txt").write_text("keep")
    refused(r"holds something else \(notes\.txt\)", out="foreign")
