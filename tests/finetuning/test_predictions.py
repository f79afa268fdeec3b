"""What a fine-tuned model predicted is kept, and predicts again: recomputed scores equal the record's."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sklearn.metrics import accuracy_score
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from biphasic.commands import main
from biphasic.evaluation.search import best_documents, rank_documents, retrieval_scores, trec_run
from biphasic.evaluation.squad import squad_scores
from biphasic.finetuning.classification import entity_scores
from biphasic.finetuning.retrieval import titled_texts
from biphasic.finetuning.run import run
from helpers.rankings import grades, mean_ndcg, read_run
from helpers.toy_sets import config_of

TASKS = ("sst2", "conll2003", "squad", "squad_v2")


def rescored(name: str, rows: dict[str, list[Any]]) -> float:
    if name == "sst2":
        return float(accuracy_score(rows["gold"], rows["predicted"]))
    if name == "conll2003":
        return entity_scores(rows["gold"], rows["predicted"])["f1"]
    return squad_scores(rows["gold"], rows["predicted"])["f1"]


@pytest.fixture(scope="module", params=TASKS)
def finetuned(request: pytest.FixtureRequest, toy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The name of a task, and the folder of its run."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    config = config_of(name, toy / "tasks", toy / "start", folder, max_duration="60ba", save_model=True)
    return name, run(config)


def test_predictions_are_kept(finetuned: tuple[str, Path], toy: Path) -> None:
    name, folder = finetuned
    record = json.loads((folder / "record.json").read_text())
    assert record["predictions"] == ["predictions/validation.parquet", "predictions/test.parquet"]
    for split in ("validation", "test"):
        rows = pq.read_table(folder / "predictions" / f"{split}.parquet").to_pydict()
        table = pq.read_table(toy / "tasks" / name / f"{split}.parquet").to_pydict()
        assert rows["id"] == table["id"]
        assert rescored(name, rows) == record["results"][0][split]
        scores = np.array([score for score in rows["score"] if not isinstance(score, list)])
        if name == "sst2":
            assert ((scores >= 0.5) & (scores <= 1)).all()
        if name == "squad_v2":
            threshold = record["results"][0]["more"][split]["no_answer_threshold"]
            empty = [score > threshold for score in rows["no_answer"]]
            assert [not text for text in rows["predicted"]] == empty


def test_new_text_is_predicted_as_in_training(
    finetuned: tuple[str, Path], toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    name, folder = finetuned
    monkeypatch.chdir(tmp_path)
    kept = pq.read_table(folder / "predictions" / "test.parquet").drop_columns("gold").to_pylist()
    table = pq.read_table(toy / "tasks" / name / "test.parquet")
    texts = table.select(["id", *{"text", "tokens", "question", "context"} & set(table.column_names)])
    pq.write_table(texts, "new.parquet")
    lines = [json.dumps(row) for row in texts.drop_columns("id").to_pylist()]
    Path("new.2025.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["predict", str(folder / "model"), "new.parquet", "--out", "out.parquet"]) == 0
    assert f"{len(kept)} rows of new.parquet" in capsys.readouterr().out
    again = pq.read_table("out.parquet").to_pylist()
    assert [row["predicted"] for row in again] == [row["predicted"] for row in kept]
    assert [row["id"] for row in again] == [row["id"] for row in kept]
    np.testing.assert_allclose(flat(again), flat(kept), rtol=1e-5, atol=1e-5)
    assert main(["predict", str(folder / "model"), "new.2025.jsonl"]) == 0
    lines = [json.loads(line) for line in Path("new.2025-predictions.jsonl").read_text().splitlines()]
    assert lines == [{**row, "id": str(number)} for number, row in enumerate(again)]
    # In portions the same.
    monkeypatch.setattr("biphasic.finetuning.finetuned_model._ROWS_AT_ONCE", 33)
    assert main(["predict", str(folder / "model"), "new.2025.jsonl", "--out", "portions.jsonl"]) == 0
    portions = [json.loads(line) for line in Path("portions.jsonl").read_text().splitlines()]
    assert [(row["id"], row["predicted"]) for row in portions] == [(row["id"], row["predicted"]) for row in lines]
    assert main(["predict", str(folder / "model"), "new.parquet", "--out", "./new.parquet"]) == 2
    assert "is the file with the texts" in capsys.readouterr().err and pq.read_table("new.parquet") == texts


def test_a_model_that_other_software_trained_further_is_refused(
    finetuned: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its encoder would be combined with the older head of head.safetensors."""
    name, folder = finetuned
    if name not in ("sst2", "conll2003"):
        pytest.skip("the head is in head.safetensors alone")
    shutil.copytree(folder / "model", tmp_path / "model")
    auto: Any = AutoModelForSequenceClassification if name == "sst2" else AutoModelForTokenClassification
    model = auto.from_pretrained(tmp_path / "model")
    row = {"text": "w1"} if name == "sst2" else {"tokens": ["w1"]}
    (tmp_path / "new.jsonl").write_text(json.dumps(row))
    command = ["predict", str(tmp_path / "model"), str(tmp_path / "new.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    assert main(command) == 0  # rounded, but the same
    with torch.no_grad():
        model.classifier.weight += 0.1
    model.save_pretrained(tmp_path / "model")
    assert main(command) == 2
    assert "its classifier.weight differs from head.safetensors's" in capsys.readouterr().err


def test_a_damaged_model_is_refused_in_one_line(
    finetuned: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, folder = finetuned
    if name != "sst2":
        pytest.skip("the files are the same")
    whole = json.loads((folder / "model/finetuned.json").read_text())
    lacking = {key: value for key, value in whole.items() if key != "max_length"}
    for file, content, message in (
        ("finetuned.json", b"{}", "finetuned.json: can't be read, so "),
        ("finetuned.json", b'{"task": null}', "finetuned.json: can't be read, so "),
        ("finetuned.json", json.dumps(lacking).encode(), "finetuned.json: can't be used ('max_length')"),
        ("head.safetensors", (folder / "model/head.safetensors").read_bytes()[:99], "head.safetensors: can't be read ("),
    ):
        shutil.copytree(folder / "model", tmp_path / "model")
        (tmp_path / "model" / file).write_bytes(content)
        (tmp_path / "new.jsonl").write_text('{"text": "w1"}')
        assert main(["predict", str(tmp_path / "model"), str(tmp_path / "new.jsonl")]) == 2
        error = capsys.readouterr().err.splitlines()
        assert f"{tmp_path}/model/{message}" in error[-1] and not any("Traceback" in line for line in error)
        shutil.rmtree(tmp_path / "model")


def flat(rows: list[dict[str, Any]]) -> list[float]:
    scores = [row["score"] if isinstance(row["score"], list) else [row["score"]] for row in rows]
    return [float("nan") if score is None else score for of_row in scores for score in of_row]


def test_a_set_s_own_file_is_read(
    finetuned: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sentences of a column file, and questions in SQuAD's form."""
    name, folder = finetuned
    monkeypatch.chdir(tmp_path)
    if name == "conll2003":
        Path("new.conll").write_text("w1 O\nw25 B-PER\n\nw7 O\n")
        assert main(["predict", str(folder / "model"), "new.conll"]) == 0
        rows = [json.loads(line) for line in Path("new-predictions.jsonl").read_text().splitlines()]
        assert [len(row["predicted"]) for row in rows] == [2, 1]
        Path("text.jsonl").write_text('{"tokens": "w1 w25"}\n')
        assert main(["predict", str(folder / "model"), "text.jsonl"]) == 2
        assert "row 1: tokens is not a list of words: 'w1 w25'" in capsys.readouterr().err
    elif name == "squad":
        question = {"id": "a", "question": "w1 w2", "answers": []}
        content = {"data": [{"paragraphs": [{"context": "w5 w6 w7", "qas": [question]}]}]}
        Path("dev.json").write_text(json.dumps(content))
        assert main(["predict", str(folder / "model"), "dev.json"]) == 0
        [row] = [json.loads(line) for line in Path("dev-predictions.jsonl").read_text().splitlines()]
        assert row["id"] == "a" and row["predicted"] in "w5 w6 w7"


def test_a_split_of_a_prepared_set_is_read(finetuned: tuple[str, Path], toy: Path, tmp_path: Path) -> None:
    """With all its columns: of single texts `text_pair` is null."""
    name, folder = finetuned
    out = tmp_path / "out.parquet"
    assert main(["predict", str(folder / "model"), str(toy / "tasks" / name / "test.parquet"), "--out", str(out)]) == 0
    kept = pq.read_table(folder / "predictions" / "test.parquet").to_pydict()
    assert pq.read_table(out).to_pydict()["predicted"] == kept["predicted"]


def test_scores_that_are_not_finite_are_null_in_json(finetuned: tuple[str, Path], tmp_path: Path) -> None:
    """No answer is found in an empty context. JSON has no Infinity."""
    name, folder = finetuned
    if name not in ("squad", "squad_v2"):
        pytest.skip("has a score for each text")
    rows = [{"question": "w1", "context": context} for context in ("", "w5 Infinity NaN", "w11 w5")]
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out.jsonl"
    assert main(["predict", str(folder / "model"), str(tmp_path / "new.jsonl"), "--out", str(out)]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    predictions = [json.loads(line, parse_constant=refuse) for line in out.read_text().splitlines()]
    assert [row["score"] is None for row in predictions] == [True, False, False]
    assert [row.get("no_answer", 0.0) is None for row in predictions] == [name == "squad_v2", False, False]
    assert predictions[0]["predicted"] == ""


def test_a_model_that_is_gone_is_made_again(
    finetuned: tuple[str, Path], toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each file that `biphasic predict` needs is there again, and then nothing is done."""
    name, folder = finetuned
    if name != "sst2":
        pytest.skip("is the same for all tasks")
    config = config_of(name, toy / "tasks", toy / "start", folder.parents[1], max_duration="60ba", save_model=True)
    for gone in ("model", "model/finetuned.json"):
        path = folder / gone
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        run(config.model_copy(update={"save_model": False}))
        assert "nothing to do" in capsys.readouterr().out and not path.exists()
        run(config)
        assert "nothing to do" not in capsys.readouterr().out
        assert (folder / "model" / "finetuned.json").is_file() and (folder / "model" / "model.safetensors").is_file()
        run(config)
        assert "nothing to do" in capsys.readouterr().out


@pytest.mark.usefixtures("hub_is_offline")
def test_mistakes_are_named(
    finetuned: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, folder = finetuned
    if name != "sst2":
        return
    monkeypatch.chdir(tmp_path)
    Path("other.jsonl").write_text('{"sentence": "w1"}\n')
    Path("null.jsonl").write_text('{"text": "w1"}\n{"text": null}\n')
    Path("number.jsonl").write_text('{"text": 5}\n')
    model = str(folder / "model")
    for arguments, message in (
        ([model, "other.jsonl"], "has no column 'text' (it has: sentence)"),
        ([model, "none.jsonl"], "none.jsonl: there is no such file"),
        ([model, "null.jsonl"], "null.jsonl: row 2 has no text"),
        ([model, "number.jsonl"], "number.jsonl: row 1: text is not text: 5"),
        ([model, "null.jsonl", "--out", "x.csv"], "expected a name that ends with .jsonl or .parquet"),
        (["nowhere/model", "null.jsonl"], "nowhere/model"),
    ):
        assert main(["predict", *arguments]) == 2
        output = capsys.readouterr().err
        assert message in output and "Traceback" not in output, output
    assert not list(tmp_path.glob("*predictions*")) and not list(tmp_path.glob("*.csv"))


def test_rankings_are_those_of_sentence_transformers(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    changes = {"task__query_prompt": "w0 ", "task__document_prompt": "w1 "}
    config = config_of("msmarco", toy / "tasks", toy / "start", tmp_path, max_duration="60ba", save_model=True, **changes)
    folder = run(config)
    record = json.loads((folder / "record.json").read_text())
    names = [
        f"predictions/{name}-{split}.{suffix}"
        for name in config.task.retrieval_sets
        for split in ("validation", "test")
        for suffix in ("run.gz", "parquet")
    ]  # pyright: ignore
    assert record["predictions"] == names
    scored = {result["name"]: result for result in record["results"]}
    model = str(folder / "model")
    encoder = SentenceTransformer(model, device="cpu")
    for name, place in config.task.retrieval_sets.items():
        judged = pq.read_table(Path(place) / "qrels" / "test.parquet").to_pydict()
        qrels = grades(zip(*judged.values(), strict=True))
        ranked = read_run(folder / "predictions" / f"{name}-test.run.gz")
        assert mean_ndcg(qrels, ranked) == pytest.approx(scored[name]["test"], abs=1e-12)
        by_query = pq.read_table(folder / "predictions" / f"{name}-test.parquet").to_pydict()
        for metric in ("ndcg_at_10", "ndcg_of_ten"):
            assert np.mean(by_query[metric]) == pytest.approx(scored[name]["more"]["test"][metric], abs=1e-12)
        assert by_query["predicted"] == [list(ranked[query])[:10] for query in by_query["id"]]
        embedded = []
        for table in ("queries", "corpus"):
            columns = pq.read_table(Path(place) / f"{table}.parquet").to_pydict()
            embeddings = encoder.encode(titled_texts(columns), prompt_name={"queries": "query", "corpus": "document"}[table])
            embedded.append((columns["_id"], torch.from_numpy(embeddings)))
        (query_ids, queries), (document_ids, documents) = embedded
        chosen = [query_ids.index(query) for query in qrels]
        again = rank_documents(list(qrels), queries[chosen], document_ids, documents)
        assert retrieval_scores(again, qrels)["ndcg_at_10"] == pytest.approx(scored[name]["test"], abs=1e-6)
    Path("new.jsonl").write_text('{"text": "w1 w2"}\n')
    assert main(["predict", model, "new.jsonl"]) == 2
    assert "is a model for retrieval" in capsys.readouterr().err


def test_run_files() -> None:
    """Equal scores are in trec_eval's order; ids may have spaces; equal rankings give equal bytes."""
    ranking = {"q 1": best_documents({"a": 1.0, "b\t2": 2.5, "c%20": 1.0})}
    content = trec_run(ranking)
    assert content == trec_run(ranking)
    lines = gzip.decompress(content).decode().splitlines()
    assert lines == ["q%201 Q0 b%092 1 2.5 biphasic", "q%201 Q0 c%2520 2 1 biphasic", "q%201 Q0 a 3 1 biphasic"]
    assert len(best_documents({str(number): 0.0 for number in range(300)})) == 100
