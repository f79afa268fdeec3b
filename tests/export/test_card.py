"""A model card holds the run's record, and the hub's parser accepts it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.repocard import metadata_load

from biphasic.commands import main
from biphasic.config.load import dump
from biphasic.errors import UserError
from biphasic.export.card import finetuned_card, pretrained_card, untrained_card
from biphasic.export.folder import EXPORT_FILE
from biphasic.export.metadata import hub_id, parse_card
from biphasic.export.results import add_results, read_results
from conftest import Write
from tiny import config_of

COMMIT = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"
SOURCE = {"kind": "hub", "path": "HuggingFaceFW/fineweb-edu", "name": "sample-100BT", "revision": COMMIT}


@pytest.fixture
def record(write_yaml: Write) -> dict[str, Any]:
    """The record of a checkpoint."""
    return {
        "config": dump(config_of(write_yaml())),
        "backbone": json.dumps({"model_type": "qwen3"}),
        "command": "main.py run.yaml",
        "versions": {"torch": "2.7.0"},
        "hardware": "NVIDIA H100",
        "ranks": 8,
        "batches": 12,
        "rows": 96,
        "tokens": 3072,
        "epochs": 0,
        "seconds": 5400.0,
        "phases": [{"name": "clm", "batches": 6, "tokens": 1536}, {"name": "mlm", "batches": 6, "tokens": 1536}],
        "losses": {"loss/train/mlm": 2.5},
        "data": {"source": SOURCE, "tokens": 100, "rows": 4, "tokenizer_sha256": "ab"},
    }


def starting_from(record: dict[str, Any], path: str) -> dict[str, Any]:
    config = yaml.safe_load(record["config"])
    config["model"] = {"init_from": path}
    return {**record, "config": yaml.safe_dump(config)}


def metadata(card: str, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "README.md").write_text(card)
    content = metadata_load(tmp_path / "README.md")
    assert content == ModelCard(card).data.to_dict()
    return content


def test_metadata_of_a_run(record: dict[str, Any], tmp_path: Path) -> None:
    assert metadata(pretrained_card(record), tmp_path) == {
        "language": ["en"],
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "feature-extraction",
        "tags": ["biphasic", "eurobert", "encoder", "sentence-transformers"],
        "datasets": ["HuggingFaceFW/fineweb-edu"],
    }
    # Local files have no id, and their language is unknown.
    record["data"]["source"] = {"kind": "files", "paths": ["my_text/"]}
    assert not {"datasets", "language", "base_model"} & set(metadata(pretrained_card(record), tmp_path))
    record["data"] = {}
    assert "datasets" not in metadata(pretrained_card(record), tmp_path)


def test_datasets_of_a_mix(record: dict[str, Any], tmp_path: Path) -> None:
    other = {"kind": "hub", "path": "org/code", "revision": None}
    counts = {"tokens": 5, "tokenizer_sha256": "ab"}
    mix = {"web": {"source": SOURCE}, "code": {"source": other}, "own": {"source": {"kind": "files", "paths": ["x"]}}}
    record["data"] = {**counts, "source": "a mix of web (0.8), code (0.1), own (0.1)", "mix": mix}
    card = pretrained_card(record)
    assert metadata(card, tmp_path)["datasets"] == ["HuggingFaceFW/fineweb-edu", "org/code"]
    assert f"| Data revision | HuggingFaceFW/fineweb-edu {COMMIT}, org/code, newest at the conversion |\n" in card


def test_base_model_and_license(record: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    card = pretrained_card(starting_from(record, "HuggingFaceTB/SmolLM2-135M"))
    content = metadata(card, tmp_path)
    assert content["base_model"] == "HuggingFaceTB/SmolLM2-135M"
    # The license of another model isn't known.
    assert "license" not in content
    assert "trained from `HuggingFaceTB/SmolLM2-135M`, whose license" in card
    (tmp_path / "mine" / "encoder").mkdir(parents=True)
    for local in (
        "mine/encoder",
        "/data/encoder",
        "./x/y",
        "runs/a/checkpoints/ba4-rank0.pt",
        "x/ba4.pt",
        "s3://b/x",
        None,
    ):
        assert hub_id(local) is None, local
    assert "base_model" not in metadata(pretrained_card(starting_from(record, "mine/encoder")), tmp_path)
    config = yaml.safe_load(starting_from(record, "EuroBERT/EuroBERT-210m")["config"])
    assert metadata(untrained_card(config), tmp_path)["base_model"] == "EuroBERT/EuroBERT-210m"
    tuned = metadata(finetuned_card("mine", {"From": "EuroBERT/EuroBERT-210m"}), tmp_path)
    assert tuned["base_model"] == "EuroBERT/EuroBERT-210m"
    assert (tuned["library_name"], tuned["pipeline_tag"]) == ("sentence-transformers", "sentence-similarity")
    assert metadata(finetuned_card("mine", {"From": "runs/x/model"}), tmp_path)["license"] == "apache-2.0"


def test_the_record_as_tables(record: dict[str, Any]) -> None:
    record["command"] = "main.py a|b --to https://me:secret@host/x"
    card = pretrained_card(record)
    assert "secret" not in card
    for line in (
        "| Hardware | 8 x NVIDIA H100, 1.50 hours |",
        f"| Data revision | HuggingFaceFW/fineweb-edu {COMMIT} |",
        "| Data | HuggingFaceFW/fineweb-edu, sample-100BT: 100 tokens, 4 rows |",
        "| 0 | clm | 6 | 1,536 |  |",
        "| 1 | mlm | 6 | 1,536 | 0.4 |",
        "| loss/train/mlm | 2.5000 |",
        "- Texts are cut after 32 tokens.",
        r"| Command | `main.py a\|b --to https://host/x` |",
    ):
        assert f"{line}\n" in card, line


def test_cards_of_families_that_need_code(record: dict[str, Any]) -> None:
    card = pretrained_card(record, "mine", remote_code=True)
    assert 'AutoModel.from_pretrained("mine", trust_remote_code=True)' in card
    assert 'SentenceTransformer("mine", trust_remote_code=True)' in card
    assert "# transformers >= 5" in card
    assert ModelCard(card).data.tags == ["biphasic", "qwen3", "encoder", "sentence-transformers"]
    plain = pretrained_card(record, "mine")
    assert "trust_remote_code=True" not in plain
    assert "# transformers >= 5" in plain
    assert "# transformers >= 5" not in finetuned_card("m", {}, family="bert")
    for card in (
        untrained_card(yaml.safe_load(record["config"]), remote_code=True),
        finetuned_card("m", {}, remote_code=True),
    ):
        assert "trust_remote_code=True" in card


@pytest.mark.parametrize(
    ("card", "message"),
    [
        ("# mine\n", "doesn't begin with a block of metadata"),
        ("---\nlicense: [a\n---\n", "would refuse its metadata: while parsing"),
        ("---\n- a\n---\n", "metadata block should be a dict"),
        ("---\nlicense: Apache 2\n---\n", "license 'Apache 2'"),
        ("---\nlicense: 3\n---\n", "license is 3, not a word"),
        ("---\nlanguage: no\n---\n", "language is False"),  # YAML's no is false, and not Norwegian
        ("---\nlanguage: [english]\n---\n", "'english' is not an ISO 639 code"),
        ("---\ndatasets: [a/b/c]\n---\n", "model card: datasets: .*a/b/c"),
        ("---\nbase_model: my model\n---\n", "model card: base_model: "),
        ("---\ntags: [1]\n---\n", "tags is"),
        ("---\nmodel-index: [{name: m}]\n---\n", "results"),
        ("---\nmodel-index: [{name: m, results: [{task: {type: t}, dataset: {name: n}, metrics: []}]}]\n---\n", "type"),
        (
            "---\nmodel-index: [{name: m, results: [{task: {type: t}, dataset: {name: n, type: d}, "
            "metrics: [{type: a, value: .nan}]}]}]\n---\n",
            "a on n is nan, not a number",
        ),
    ],
)
def test_metadata_that_the_hub_would_refuse(card: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_card(card)
    assert "\n" not in str(caught.value)


def test_a_card_that_would_be_refused_is_not_made(record: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # A word that YAML reads as something else stays a word.
    card = parse_card(pretrained_card(record))
    card.data.language = ["no"]
    assert ModelCard(str(card)).data.language == ["no"]
    monkeypatch.setattr("biphasic.export.card.hub_id", lambda path: path)
    with pytest.raises(UserError, match="base_model"):
        finetuned_card("mine", {"From": "not a model"})


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
        "NQ", "NQ-judged, judged documents only", "my|set (de)", "my|set (fr)", "SciFact", "STSBenchmark",
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
    assert by_name["NQ-judged, judged documents only"]["dataset"]["type"] == "NQ-judged"
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
    file = results / "results" / "org__mine" / "abc" / "NQ.json"
    scores = read_results(results)
    [nq] = [score for score in scores if score.task == "NQ"]
    card = parse_card(pretrained_card(record, "mine"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("biphasic.export.results.read_results", lambda *_: [nq, replace(nq, task="NQ-again")])
        add_results(card, file)
    assert {name: entry["dataset"]["config"] for name, entry in entries(str(card)).items()} == {
        "NQ": "default of NQ", "NQ-again": "default of NQ-again",
    }  # fmt: skip


def test_results_in_tables(record: dict[str, Any], results: Path) -> None:
    before = pretrained_card(record, "mine")
    card = with_results(before, results)
    for line in (
        "| task | subset | split | nDCG@10 | MRR@10 | Recall@100 | main score |",
        "| NQ | default | test | 0.2500 | 0.1250 | 0.9000 |  |",
        "| NQ-judged | default | test | 0.5000 | 0.2500 | 0.9000 |  |",
        r"| my\|set | de | dev | 0.7500 | 0.3750 | 0.9000 |  |",
        "| AskUbuntuDupQuestions | default | test | 0.4000 | 0.2000 | 0.9000 | map_at_1000 0.3000 |",
        "| STSBenchmark | STS | default | test | cosine spearman | 0.8000 |",
        "Scores from 0 to 1, computed by mteb 2.26.24.",
    ):
        assert f"\n{line}\n" in card, line
    assert "search the judged documents only" in card
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
        "NQ-judged, judged documents only": 0.5,
    }
    # The judged documents are not the hub's dataset.
    assert by_name["NQ-judged, judged documents only"]["dataset"] == {
        "name": "NQ-judged, judged documents only", "type": "NQ-judged", "config": "default", "split": "test",
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
    with pytest.raises(UserError, match="0 of these are other"):
        with_results(card, results, "other")
    shutil.copytree(model / "abc", model / "def")
    with pytest.raises(UserError, match="2 of these are mine"):
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
