"""`job: evaluate` from a model to mteb's files: recorded, interrupted, on two ranks."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import mteb
import numpy as np
import pyarrow.parquet as pq
import pytest
from mteb.results import TaskResult
from sentence_transformers import SentenceTransformer

from biphasic.config.evaluate import EvaluateConfig
from biphasic.config.load import dump
from biphasic.errors import UserError
from biphasic.evaluation import retriever, sets
from biphasic.evaluation import run as job
from biphasic.evaluation.embedder import EncoderEmbedder
from biphasic.evaluation.retriever import Retriever
from biphasic.evaluation.run import run
from biphasic.evaluation.scoring import score
from biphasic.evaluation.sets import judged_only
from biphasic.evaluation.tasks import plan_tasks
from biphasic.model.encoder import load_encoder
from helpers import warm
from helpers.mteb_mirror import (
    DOCUMENTS,
    PROMPTS,
    QUERIES,
    config_of,
    records_of,
    rows,
    values_of,
    write_own,
)
from helpers.random_embedder import RandomEmbedder
from helpers.rankings import grades, mean_ndcg, read_run
from helpers.tiny import WORDS

PAPER = {
    "tasks": ["NQ", "MultiLongDocRetrieval"],
    "subsets": {"MultiLongDocRetrieval": ["en"]},
    "documents": ["full", "judged"],
}


@pytest.fixture(scope="module")
def scored(mirror: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EvaluateConfig]:
    folder = tmp_path_factory.mktemp("scored")
    own = write_own(folder / "my-set")
    config = config_of(model, folder, mirror=str(mirror), sets=[str(own)], **PAPER)
    config = config.model_copy(update={"tasks": [*config.tasks, "STSBenchmark"]})
    return run(config), config


def test_every_task_split_and_system(scored: tuple[Path, EvaluateConfig]) -> None:
    folder, config = scored
    scores, chance = values_of(folder), dict[tuple[str, str], float]()
    for planned in plan_tasks(config):
        if planned.retrieval:
            full = planned.load()
            for task in (judged_only(full), full):
                chance |= {(row.task, row.split): row.value for row in score(Retriever(RandomEmbedder()), task)[0]}
    tasks = {("NQ", "test"), ("MultiLongDocRetrieval", "dev"), ("MultiLongDocRetrieval", "test"), ("my-set", "test")}
    tasks |= {(f"{name}-judged", split) for name, split in tasks}
    expected = {(*task, system) for task in tasks for system in ("biphasic/scored", "BM25")}
    assert scores.keys() == expected | {("STSBenchmark", "test", "biphasic/scored")}
    for task in tasks:
        for system in ("biphasic/scored", "BM25"):
            assert chance[task] < scores[*task, system] - 0.1, task
    lines = (folder / "scores.md").read_text().splitlines()
    assert len({len(line) for line in lines if line.startswith("|")}) == 1
    assert len([line for line in lines if line.startswith("|")]) == len(scores) + 2


def test_rankings_are_kept(scored: tuple[Path, EvaluateConfig]) -> None:
    """trec_eval gives their NDCG@10, for each system, split, and part of the documents."""
    folder, count = scored[0], 0
    _, queries, judgments = rows(9, "d", ["test"], DOCUMENTS)
    qrels = grades(row.values() for row in judgments["test"])
    for record in records_of(folder):
        for scores in record["scores"]:
            if scores["task"] not in ("my-set", "my-set-judged"):
                continue
            ranked = read_run(folder / scores["ranking"])
            mean = mean_ndcg(qrels, ranked)
            assert mean == pytest.approx(scores["ndcg_at_10"], abs=1e-5), scores
            # So do the scores by query, with the judgments, the texts and the ten best documents of each.
            by_query = pq.read_table(folder / scores["by_query"]).to_pydict()
            assert np.mean(by_query["ndcg_at_10"]) == pytest.approx(mean, abs=1e-9)
            assert dict(zip(by_query["id"], by_query["text"], strict=True)) == {row["_id"]: row["text"] for row in queries}
            for query, gold, best in zip(*(by_query[name] for name in ("id", "gold", "predicted")), strict=True):
                assert {row["id"]: row["grade"] for row in gold} == qrels[query] and best == list(ranked[query])[:10]
            count += 1
    assert count == 4


def test_judged_documents_are_those_that_judgments_name(scored: tuple[Path, EvaluateConfig]) -> None:
    counts = {
        scores["task"]: (scores["documents"], scores["queries"])
        for record in records_of(scored[0])
        for scores in record["scores"]
    }
    named = {at for at in range(QUERIES)} | {(7 * at + 90) % DOCUMENTS for at in range(QUERIES)}
    assert counts["NQ"] == (DOCUMENTS, QUERIES)
    assert counts["NQ-judged"] == counts["my-set-judged"] == (len(named), QUERIES)
    # Judgments of all splits count.
    both = {at for at in range(2 * QUERIES)} | {(7 * at + 90) % DOCUMENTS for at in range(2 * QUERIES)}
    assert counts["MultiLongDocRetrieval-judged"] == (len(both), QUERIES)


def test_mteb_reads_the_result_files(scored: tuple[Path, EvaluateConfig], model: Path) -> None:
    folder, _ = scored
    [place] = (folder / "results" / "biphasic__scored").iterdir()
    names = {path.name for path in place.glob("*.json")}
    assert names == {"NQ.json", "MultiLongDocRetrieval.json", "STSBenchmark.json", "model_meta.json"}
    result = TaskResult.from_disk(place / "MultiLongDocRetrieval.json")
    assert result.dataset_revision == mteb.get_task("MultiLongDocRetrieval").metadata.revision
    assert [scores["hf_subset"] for scores in result.scores["dev"]] == ["en"]
    loaded = mteb.ResultCache(folder).load_results(models=["biphasic/scored"], tasks=["NQ"])
    assert len(loaded.model_results) == 1
    meta = json.loads((place / "model_meta.json").read_text())
    assert (meta["name"], meta["embed_dim"], meta["max_tokens"]) == ("biphasic/scored", 32, 32)
    lines = [json.loads(line) for line in (place / "run_settings.jsonl").read_text().splitlines()]
    settings = next(line["encode_kwargs"] for line in lines if line["task"] == "NQ")
    assert settings["prompts"] == PROMPTS
    assert settings["pooling"] == {"mode": "mean", "normalize": False}
    assert (settings["max_length"], settings["precision"], settings["similarity"]) == (32, "fp32", "cosine")
    # Results that mteb's leaderboard does not have are in another folder.
    [local] = (folder / "local" / "results" / "biphasic__scored").iterdir()
    assert {path.stem for path in local.glob("*.json")} == {
        "NQ-judged", "MultiLongDocRetrieval-judged", "my-set", "my-set-judged", "model_meta",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["NQ", "MultiLongDocRetrieval", "STSBenchmark"])
def test_scores_equal_sentence_transformers_and_mteb(name: str, scored: tuple[Path, EvaluateConfig], model: Path) -> None:
    folder, config = scored
    [planned] = [task for task in plan_tasks(config) if task.name == name]
    reference, _ = score(SentenceTransformer(str(model), device="cpu"), planned.load())
    ours = values_of(folder)
    for scores in reference:
        assert abs(scores.value - ours[name, scores.split, "biphasic/scored"]) < 1e-4
    # The prompts matter, or this would not compare them.
    plain = SentenceTransformer(str(model), device="cpu")
    plain.prompts = {}
    without_prompts, _ = score(plain, planned.load())
    assert name == "STSBenchmark" or abs(without_prompts[0].value - reference[0].value) > 1e-3


def test_recorded_scores_are_not_computed_again(
    scored: tuple[Path, EvaluateConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config = scored
    before = values_of(folder)
    (folder / "scores.json").unlink()

    def refuse(*_: Any) -> Any:
        raise AssertionError("something was scored again")

    monkeypatch.setattr(job, "score", refuse)
    run(config)
    assert values_of(folder) == before
    # The same settings, spelled out.
    other = config.model_copy(update={"model": config.model.model_copy(update={"pooling": "mean"}), "precision": "fp32"})
    run(other)
    monkeypatch.setattr("biphasic.evaluation.run.model_fingerprint", lambda *_: "another")
    with pytest.raises(AssertionError, match="scored again"):
        run(config)


def test_other_splits_subsets_and_languages_are_scored(mirror: Path, model: Path, tmp_path: Path) -> None:
    name, own = "MultiLongDocRetrieval", write_own(tmp_path / "my-set")
    for split in ("dev", "test"):
        changes = {"tasks": [name], "subsets": {name: ["en"]}, "splits": {name: [split]}, "baselines": []}
        folder = run(config_of(model, tmp_path, mirror=str(mirror), **changes))
        assert {key[1] for key in values_of(folder)} == {split}

    def chosen(task: str, **changes: Any) -> dict[str, Any]:
        return next(planned.chosen for planned in plan_tasks(config_of(model, tmp_path, **changes)) if planned.name == task)

    assert chosen(name, tasks=[name], subsets={name: ["de"]}) == {"subsets": ["de"]}
    benchmark = {"benchmarks": ["MTEB(Multilingual, v2)"]}
    assert chosen("STS22.v2", **benchmark, subsets={"STS22.v2": ["en"]}) == {"subsets": ["en"]}
    assert chosen("STS22.v2", **benchmark) == {}
    assert chosen("my-set", sets=[str(own)], splits={"my-set": ["test"]}, sets_language="deu-Latn") == {
        "splits": ["test"], "language": "deu-Latn"}  # fmt: skip


def test_an_interrupted_evaluation_resumes(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retriever, "SMALL_BLOCK", 16)
    own = write_own(tmp_path / "my-set")
    config = config_of(model, tmp_path, sets=[str(own)], baselines=[])
    embedded: list[int] = []
    embed = EncoderEmbedder.embed

    def record(self: EncoderEmbedder, texts: Any, progress: Any) -> np.ndarray:
        if len(embedded) == limit:
            raise KeyboardInterrupt
        embedded.append(len(texts))
        return embed(self, texts, progress)

    monkeypatch.setattr(EncoderEmbedder, "embed", record)
    limit = 5  # the queries, and four of ten blocks
    with pytest.raises(KeyboardInterrupt):
        run(config)
    assert not (tmp_path / "runs" / "scored" / "records").exists()
    assert not list((tmp_path / "runs").rglob("my-set.json"))
    assert embedded == [QUERIES, 16, 16, 16, 16]
    embedded.clear()
    limit = -1
    folder = run(config)
    assert embedded == [QUERIES, 16, 16, 16, 16, 16, DOCUMENTS - 9 * 16]
    monkeypatch.setattr(retriever, "SMALL_BLOCK", 256)
    uninterrupted = run(config_of(model, tmp_path / "uninterrupted", sets=[str(own)], baselines=[]))
    assert values_of(uninterrupted) == values_of(folder)
    # Stored embeddings count as well: with LENGTH tokens at most, several documents are cut.
    [cut], [all_cut] = ([record["cut"] for record in records_of(each)] for each in (folder, uninterrupted))
    assert cut == all_cut > DOCUMENTS // 4


def test_reranking_is_among_the_candidates(model: Path, tmp_path: Path) -> None:
    task = sets.read_set(str(write_own(tmp_path / "my-set")), "Reranked", "eng-Latn")
    data = task.content["default"]["test"]
    candidates = {
        f"q{at}": [f"d{at}", *(f"d{(at + 3 * step) % DOCUMENTS}" for step in range(1, 6))] for at in range(QUERIES)
    }
    data["top_ranked"] = candidates
    system = retriever.Retriever(EncoderEmbedder(load_encoder(str(model)), "a/b", "1"))
    [result], _ = score(system, task)
    [reference], _ = score(SentenceTransformer(str(model), device="cpu"), task)
    assert abs(result.value - reference.value) < 1e-4
    assert result.recall_at_100 == reference.recall_at_100
    data["top_ranked"] = None
    assert score(system, task)[0][0].value < result.value - 0.05
    system.index(data["corpus"])
    ranked = system.search(data["queries"], task_metadata=task.metadata, hf_split="test", hf_subset="default", top_k=4,
                          top_ranked=candidates)  # fmt: skip
    assert all(set(best) <= set(candidates[query]) and len(best) == 4 for query, best in ranked.items())


def test_two_ranks_give_the_scores_of_one(
    mirror: Path, model: Path, tmp_path: Path, scored: tuple[Path, EvaluateConfig]
) -> None:
    large = write_own(tmp_path / "large", documents=700)  # three blocks, so that both ranks have some
    config = config_of(model, tmp_path, mirror=str(mirror), tasks=["STSBenchmark"], sets=[str(large)], model__name="a/b")
    path = tmp_path / "two.yaml"
    path.write_text(dump(config))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    outcome = warm.run([str(path)], 2, environment, setup="import biphasic.evaluation.run")
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    alone = run(config_of(model, tmp_path / "one", sets=[str(large)], model__name="a/b"))
    one, two = {**values_of(scored[0]), **values_of(alone)}, values_of(tmp_path / "runs" / "scored")
    assert two == pytest.approx(
        {
            **{("large", "test", system): one["large", "test", system] for system in ("a/b", "BM25")},
            ("STSBenchmark", "test", "a/b"): one["STSBenchmark", "test", "biphasic/scored"],
        },
        abs=1e-4,
    )
    assert outcome.stdout.count("| large ") == 2
    # The corpus of 700 documents has three blocks, made by both ranks.
    blocks = [len(list(kept.glob("*.npy"))) for kept in (tmp_path / "cache" / "embeddings").glob("*/")]
    assert blocks == [3]


def test_a_checkpoint_in_a_bucket(s3: Path, dataset: Path, write_yaml: Any, tmp_path: Path) -> None:
    from helpers.buckets import bucket_for
    from helpers.tiny import config_of as pretraining
    from helpers.tiny import train

    place = f"s3://{bucket_for(s3, 'evaluate')}/run"
    train(
        pretraining(write_yaml("run", checkpoint__folder=place, objective__phases=[{"name": "mlm", "masking_ratio": 0.4}]))
    )
    own = write_own(tmp_path / "my-set")
    from_bucket = run(config_of(f"{place}/ba12-rank0.pt", tmp_path, sets=[str(own)]))
    downloaded = next((tmp_path / "cache" / "models").rglob("ba12-rank0.pt"))
    from_disk = run(config_of(downloaded, tmp_path / "again", sets=[str(own)]))
    assert values_of(from_bucket) == values_of(from_disk)
    settings = json.loads((from_bucket / "scores.json").read_text())["settings"]
    assert settings["pooling"]["mode"] == "mean"
    with pytest.raises(UserError, match=r"^checkpoint s3://.*ba99-rank0\.pt: can't be used"):
        run(config_of(f"{place}/ba99-rank0.pt", tmp_path, sets=[str(own)]))


def test_python_starts_a_process_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: started.append([path, *arguments]))
    monkeypatch.setattr(sys, "argv", ["src/main.py", "yamls/evaluate/quick.yaml", "model.path=x"])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for count in (0, 1, 4):
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        job.use_all_gpus(sys.argv)
    [command] = started
    assert command[0] == command[1] == sys.executable
    assert command[2:] == ["-m", "composer.cli", "-n", "4", *sys.argv]
    monkeypatch.setenv("WORLD_SIZE", "4")
    job.use_all_gpus(sys.argv)
    assert len(started) == 1


def test_bad_input_is_refused_in_one_line(
    mirror: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = write_own(tmp_path / "my-set")
    bare = tmp_path / "bare"
    load_encoder(str(model)).backbone.save_pretrained(bare)  # pyright: ignore
    load_encoder(str(model)).tokenizer.save(bare)
    assert not (bare / "modules.json").exists()
    wrong = tmp_path / "wrong"
    shutil.copytree(model, wrong)
    tokenizer = json.loads((wrong / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {f"more{at}": WORDS + at for at in range(40)}
    (wrong / "tokenizer.json").write_text(json.dumps(tokenizer))
    for changes, message in (
        ({"tasks": ["MSMARC"]}, r"tasks: mteb has no task of this name: .*MSMARCO"),
        ({"benchmarks": ["NanoBIER"]}, r"benchmarks: mteb has no benchmark of this name: .*NanoBEIR"),
        ({"tasks": ["NQ"], "splits": {"NQ": ["train"]}}, r"splits\.NQ: train is not one of test"),
        (
            {"benchmarks": ["NanoBEIR"], "splits": {"NanoNQRetrieval": ["test"]}},
            r"splits\.NanoNQRetrieval: test is not one of train",
        ),
        (
            {"tasks": ["MultiLongDocRetrieval"], "subsets": {"MultiLongDocRetrieval": ["eng"]}},
            "eng is not one of ar, de, en",
        ),
        (
            {"tasks": ["CQADupstackRetrieval"], "splits": {"CQADupstackRetrieval": ["test"]}},
            "combines 12 other tasks: to choose splits or subsets, list those tasks instead",
        ),
        ({"tasks": ["NQ"], "mirror": str(tmp_path)}, r"mirror .*: has no mteb/nq; download it .* hf download"),
        ({"sets": ["nowhere"]}, r"sets: nowhere: there is no such folder"),
        (
            {"sets": [str(own)], "model__path": str(bare)},
            r"bare: has no modules\.json \(.*\), so its pooling is unknown",
        ),
        (
            {"sets": [str(own)], "model__path": str(wrong)},
            r"its tokenizer has 104 tokens, its embedding 64: they don't belong",
        ),
        ({"sets": [str(own)], "model__pooling": "cls"}, r"model\.pooling: cls, but the model's own files say mean"),
        ({"sets": [str(own)], "precision": "amp_bf16"}, "amp_bf16 needs a GPU"),
        ({"sets": [str(own)], "model__path": str(tmp_path / "nowhere")}, "can't be loaded"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            run(config_of(model, tmp_path, **changes))
        assert "\n" not in str(caught.value)
    scores = []
    for pooling in ("mean", "max"):
        folder = run(config_of(bare, tmp_path / pooling, sets=[str(own)], model__pooling=pooling, baselines=[]))
        assert json.loads((folder / "scores.json").read_text())["settings"]["pooling"]["mode"] == pooling
        scores += values_of(folder).values()
    assert len(set(scores)) == 2
