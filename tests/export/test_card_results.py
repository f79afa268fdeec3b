"""Results of mteb in a model card."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from biphasic.commands import main
from biphasic.errors import UserError
from biphasic.export.card import pretrained_card
from biphasic.export.folder import EXPORT_FILE, parse_card
from biphasic.export.results import add_results, read_results


def with_results(text: str, *arguments: Any) -> str:
    card = parse_card(text)
    add_results(card, *arguments)
    return str(card)


# --- Results ---------------------------------------------------------------------------------------------------------


def write_result(folder: Path, task: str, revision: str, scores: dict[str, Any]) -> None:
    from mteb.results import TaskResult

    folder.mkdir(parents=True, exist_ok=True)
    TaskResult(
        dataset_revision=revision, task_name=task, mteb_version="2.26.24", scores=scores, evaluation_time=1.0
    ).to_disk(folder / f"{task}.json")


def ranked(ndcg: float, subset: str = "default", **more: float) -> dict[str, Any]:
    values = {"ndcg_at_10": ndcg, "mrr_at_10": ndcg / 2, "recall_at_100": 0.9, "map_at_10": 0.1, "main_score": ndcg}
    return {**values, "hf_subset": subset, "languages": ["eng-Latn"], **more}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """mteb's files of its own tasks, of one on judged documents, of other datasets, and of one without documents."""
    import mteb

    folder = tmp_path / "runs" / "results" / "org__mine" / "abc"
    write_result(folder, "NQ", mteb.get_task("NQ").metadata.revision, {"test": [ranked(0.25)]})
    write_result(folder, "NQ-judged", "a" * 40, {"test": [ranked(0.5)]})
    write_result(folder, "my|set", "local", {"dev": [ranked(0.75, "de"), ranked(0.7, "fr")]})
    # Another dataset with the name of one of mteb's.
    write_result(folder, "SciFact", "b" * 40, {"test": [ranked(0.6)]})
    sts = {"main_score": 0.8, "cosine_spearman": 0.8, "hf_subset": "default", "languages": ["eng-Latn"]}
    write_result(folder, "STSBenchmark", mteb.get_task("STSBenchmark").metadata.revision, {"test": [sts]})
    reranking = {**ranked(0.4), "main_score": 0.3, "map_at_1000": 0.3}
    name = "AskUbuntuDupQuestions"
    write_result(folder, name, mteb.get_task(name).metadata.revision, {"test": [reranking]})
    (folder / "model_meta.json").write_text(json.dumps({"name": "org/mine", "revision": "abc"}))
    return tmp_path / "runs"


def entries(card: str) -> dict[str, dict[str, Any]]:
    index = ModelCard(card)
    assert index.data.model_name == "mine"
    content = yaml.safe_load(card.split("---\n")[1])["model-index"]
    assert [model["name"] for model in content] == ["mine"]
    return {entry["dataset"]["name"]: entry for entry in content[0]["results"]}


def test_results_in_the_metadata(record: dict[str, Any], results: Path) -> None:
    card = with_results(pretrained_card(record, "mine"), results)
    by_name = entries(card)
    assert set(by_name) == {
        "NQ", "NQ-judged", "my|set (de)", "my|set (fr)", "SciFact", "STSBenchmark",
        "AskUbuntuDupQuestions",
    }  # fmt: skip
    assert by_name["NQ"] == {
        "task": {"type": "Retrieval", "name": "Retrieval"},
        "dataset": {
            "name": "NQ",
            "type": "mteb/nq",
            "config": "default",
            "split": "test",
            "revision": "b774495ed302d8c44a3a7ea25c90dbce03968f31",
        },
        "metrics": [
            {"type": "ndcg_at_10", "value": 0.25, "name": "ndcg_at_10"},
            {"type": "mrr_at_10", "value": 0.125, "name": "mrr_at_10"},
            {"type": "recall_at_100", "value": 0.9, "name": "recall_at_100"},
        ],
        "source": {"name": "mteb 2.26.24", "url": "https://github.com/embeddings-benchmark/mteb"},
    }
    assert by_name["NQ-judged"]["dataset"]["type"] == "NQ-judged"
    french = by_name["my|set (fr)"]["dataset"]
    assert french == {"name": "my|set (fr)", "type": "my|set", "config": "fr", "split": "dev"}
    assert by_name["SciFact"]["dataset"]["type"] == "SciFact"
    assert by_name["STSBenchmark"]["metrics"] == [{"type": "cosine_spearman", "value": 0.8, "name": "cosine_spearman"}]
    assert by_name["STSBenchmark"]["task"]["type"] == "STS"
    assert by_name["AskUbuntuDupQuestions"]["metrics"][0] == {
        "type": "map_at_1000",
        "value": 0.3,
        "name": "map_at_1000",
    }
    # The hub's parser has every number, under the same names.
    parsed = {(r.dataset_name, r.metric_type): r.metric_value for r in ModelCard(card).data.eval_results or []}
    expected = {(name, m["type"]): m["value"] for name, entry in by_name.items() for m in entry["metrics"]}
    assert parsed == expected
    assert len(expected) == 3 * 5 + 1 + 4


def test_tasks_that_share_a_dataset_keep_their_names(record: dict[str, Any], results: Path) -> None:
    """The hub's writer would join their results under one name."""
    nq = [score for score in read_results(results) if score.dataset_name == "NQ"]
    again = [replace(score, dataset_name="NQ-again") for score in nq]
    card = parse_card(pretrained_card(record, "mine"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("biphasic.export.results._scores", lambda file: [*nq, *again] if file.stem == "NQ" else [])
        add_results(card, results)
    assert {name: entry["dataset"]["config"] for name, entry in entries(str(card)).items()} == {
        "NQ": "default of NQ", "NQ-again": "default of NQ-again",
    }  # fmt: skip


def test_results_in_tables(record: dict[str, Any], results: Path) -> None:
    before = pretrained_card(record, "mine")
    card = with_results(before, results)
    for line in (
        "| task | kind | subset | split | scores |",
        "| NQ | Retrieval | default | test | nDCG@10 0.2500, MRR@10 0.1250, Recall@100 0.9000 |",
        "| NQ-judged | Retrieval | default | test | nDCG@10 0.5000, MRR@10 0.2500, Recall@100 0.9000 |",
        r"| my\|set (de) | Retrieval | de | dev | nDCG@10 0.7500, MRR@10 0.3750, Recall@100 0.9000 |",
        "| AskUbuntuDupQuestions | Reranking | default | test | "
        "map_at_1000 0.3000, nDCG@10 0.4000, MRR@10 0.2000, Recall@100 0.9000 |",
        "| STSBenchmark | STS | default | test | cosine_spearman 0.8000 |",
        "Scores from 0 to 1, computed by mteb 2.26.24.",
    ):
        assert f"\n{line}\n" in card, line
    assert "Tasks named `-judged` search only judged documents" in card
    assert card.index("\n## Use\n") < card.index("\n## Evaluation\n") < card.index("\n## Limits\n")
    # New results replace them, and the rest of the card stays.
    assert with_results(card, results) == card
    for path in (results / "results" / "org__mine" / "abc").glob("*.json"):
        if path.stem not in ("STSBenchmark", "model_meta"):
            path.unlink()
    again = with_results(card, results)
    assert set(entries(again)) == {"STSBenchmark"}
    assert "judged" not in again
    body = again.split("---\n", 2)[2]
    start, end = body.index("\n## Evaluation\n"), body.index("\n## Limits\n")
    assert body[:start] + body[end:] == before.split("---\n", 2)[2]


def test_results_of_an_evaluation(record: dict[str, Any], tmp_path: Path) -> None:
    """In mteb's own cache, with a folder each for mteb's tasks, others and baselines."""
    import mteb
    from mteb.models.model_meta import ModelMeta
    from mteb.results import TaskResult

    folder = tmp_path / "evaluated"
    for part, model, task, value in (
        ("", "biphasic/mine", "NQ", 0.25),
        ("local", "biphasic/mine", "NQ-judged", 0.5),
        ("baselines", "mteb/baseline-bm25s", "NQ", 0.3),
    ):
        revision = mteb.get_task("NQ").metadata.revision
        result = TaskResult(
            dataset_revision=revision, task_name=task, mteb_version="2.26.24", scores={"test": [ranked(value)]},
            evaluation_time=1.0,
        )  # fmt: skip
        meta = ModelMeta.create_empty({"name": model, "revision": "0123456789abcdef"})
        mteb.ResultCache(folder / part).save_to_cache(result, meta, encode_kwargs={})
    by_name = entries(with_results(pretrained_card(record, "mine"), folder))
    assert {name: entry["metrics"][0]["value"] for name, entry in by_name.items()} == {
        "NQ": 0.25,
        "NQ-judged": 0.5,
    }
    # The judged documents are not the hub's dataset.
    assert by_name["NQ-judged"]["dataset"] == {
        "name": "NQ-judged", "type": "NQ-judged", "config": "default", "split": "test",
    }  # fmt: skip


def test_unusable_results_are_refused(record: dict[str, Any], results: Path, tmp_path: Path) -> None:
    card, model = pretrained_card(record, "mine"), results / "results" / "org__mine"
    with pytest.raises(UserError, match="there are no results of mteb"):
        with_results(card, tmp_path / "nowhere")
    shutil.copytree(model / "abc", results / "results" / "mteb__baseline-bm25s" / "1")
    (results / "results" / "mteb__baseline-bm25s" / "1" / "model_meta.json").unlink()
    with pytest.raises(UserError, match=r"several models .*mteb/baseline-bm25s@1, org/mine@abc"):
        with_results(card, results)
    for name in ("org/mine", "mine", "org/mine@abc"):
        assert entries(with_results(card, results, name))
    with pytest.raises(UserError, match="0 models match other"):
        with_results(card, results, "other")
    shutil.copytree(model / "abc", model / "def")
    with pytest.raises(UserError, match="2 models match mine"):
        with_results(card, results, "mine")
    assert entries(with_results(card, results, "mine@def"))
    write_result(model / "abc", "Bad", "c" * 40, {"test": [ranked(float("nan"))]})
    with pytest.raises(UserError, match="not a number"):
        with_results(card, results, "mine@abc")
    (model / "abc" / "Bad.json").write_text("{")
    with pytest.raises(UserError, match=r"Bad\.json can't be read as a result of mteb") as caught:
        with_results(card, results, "mine@abc")
    assert "\n" not in str(caught.value)


def test_results_and_license_for_an_exported_folder(
    record: dict[str, Any], results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / EXPORT_FILE).write_text("{}")
    (folder / "README.md").write_text(pretrained_card(record, "mine"))
    assert main(["export", str(folder), "--results", str(results), "--license", "cc-by-4.0", "--language", "de"]) == 0
    card = (folder / "README.md").read_text()
    assert set(entries(card)) >= {"NQ"}
    assert (ModelCard(card).data.license, ModelCard(card).data.language) == ("cc-by-4.0", ["de"])
    assert main(["export", str(folder), "--license", "No License"]) == 2
    assert (folder / "README.md").read_text() == card
    for arguments, message in (
        ([str(folder)], "is an export: add --onnx"),
        ([str(tmp_path)], "OUT, is missing"),
        ([str(tmp_path), "--onnx"], "is not an exported folder"),
        ([str(folder), "--onnx", "--force"], "--force belongs to an export"),
        ([str(folder), "--onnx", "--dtype", "bf16"], "--dtype belongs to an export"),
        ([str(folder), "--results-of", "x"], "--results-of belongs to --results"),
        ([str(folder), "--dry-run"], "belong to --push"),
    ):
        capsys.readouterr()
        assert main(["export", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
