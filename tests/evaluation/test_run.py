"""`job: evaluate` from a model to mteb's files: over a mirror, without a network, interrupted, on two ranks."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import mteb
import numpy as np
import pytest
from mteb.results import TaskResult
from sentence_transformers import SentenceTransformer

from biphasic.config.errors import UserError
from biphasic.config.evaluate import EvaluateConfig
from biphasic.config.load import dump
from biphasic.evaluation import retriever, sets
from biphasic.evaluation import run as job
from biphasic.evaluation.embedder import EncoderEmbedder
from biphasic.evaluation.run import run
from biphasic.evaluation.scoring import score
from biphasic.evaluation.tasks import _offline, plan_tasks
from biphasic.model.encoder import load_encoder
from mteb_mirror import DOCUMENTS, QUERIES, config_of, write_mirror, write_model, write_own, write_set
from tiny import WORDS, launch

PROMPTS = {"query": "w1 w2 ", "document": "w3 "}
PAPER = {
    "tasks": ["MSMARCO", "NQ", "MultiLongDocRetrieval"],
    "subsets": {"MultiLongDocRetrieval": ["en"]},
    "documents": ["full", "judged"],
}


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mirror(tmp_path_factory.mktemp("mirror"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "encoder", PROMPTS)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **more: Any) -> Any:
        raise AssertionError(f"a socket to {arguments[1:]}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def records_of(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "scores.json").read_text())["records"]


def values_of(folder: Path) -> dict[tuple[str, str, str], float]:
    """The main scores, by task, split and system."""
    return {
        (one["task"], one["split"], record["system"]): one["value"]
        for record in records_of(folder)
        for one in record["scores"]
    }


@pytest.fixture(scope="module")
def scored(mirror: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, EvaluateConfig]:
    folder = tmp_path_factory.mktemp("scored")
    own = write_own(folder / "mine")
    config = config_of(model, folder, mirror=str(mirror), sets=[str(own)], **PAPER)
    config = config.model_copy(update={"tasks": [*config.tasks, "NanoNQRetrieval", "STSBenchmark"]})
    return run(config), config


@pytest.mark.usefixtures("no_network")
def test_no_socket_is_opened(mirror: Path, model: Path, tmp_path: Path) -> None:
    folder = run(config_of(model, tmp_path, mirror=str(mirror), tasks=["NanoNQRetrieval"]))
    assert len(values_of(folder)) == 3
    names = {one.name for one in plan_tasks(config_of(model, tmp_path, benchmarks=["NanoBEIR"]))}
    assert len(names) == 13 and "NanoNQRetrieval" in names


def test_a_network_would_be_asked_for_without_a_mirror(
    no_network: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    with pytest.raises((AssertionError, UserError)):
        run(config_of(model, tmp_path, tasks=["NanoNQRetrieval"]))


def test_a_mirror_that_changed_is_read_again(model: Path, tmp_path: Path) -> None:
    """`datasets` itself knows a folder by its last name and its card, and would give the first one's rows."""
    found = []
    for seed in (1, 2):
        root = tmp_path / str(seed)
        write_set(root / "mteb" / "nq", seed, ["test"])
        [planned] = plan_tasks(config_of(model, tmp_path, mirror=str(root), tasks=["NQ"]))
        found.append((planned.mark, planned.load().dataset["default"]["test"]["corpus"]["text"]))
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]


def test_offline_while_a_mirror_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of mteb's may fetch more than its one set."""
    from datasets import config
    from huggingface_hub import constants

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    before = config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    with _offline():
        assert config.HF_HUB_OFFLINE and constants.HF_HUB_OFFLINE and os.environ["HF_HUB_OFFLINE"] == "1"
    assert before == (config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE)
    assert "HF_HUB_OFFLINE" not in os.environ


def test_every_task_split_and_system(scored: tuple[Path, EvaluateConfig]) -> None:
    folder, _ = scored
    found = values_of(folder)
    tasks = {("MSMARCO", "dev"), ("NQ", "test"), ("MultiLongDocRetrieval", "dev"), ("MultiLongDocRetrieval", "test"),
             ("mine", "test"), ("NanoNQRetrieval", "train")}  # fmt: skip
    tasks |= {(f"{name}-judged", split) for name, split in tasks}
    expected = {(*task, system) for task in tasks for system in ("biphasic/scored", "BM25", "random")}
    assert found.keys() == expected | {("STSBenchmark", "test", "biphasic/scored")}
    for task in tasks:
        by_system = [found[*task, system] for system in ("random", "biphasic/scored", "BM25")]
        assert by_system[0] < by_system[1] - 0.1, task
        assert by_system[0] < by_system[2] - 0.1, task
    lines = (folder / "scores.md").read_text().splitlines()
    assert len({len(line) for line in lines if line.startswith("|")}) == 1
    assert len([line for line in lines if line.startswith("|")]) == len(found) + 2


def test_judged_is_what_the_judgments_name(scored: tuple[Path, EvaluateConfig]) -> None:
    counts = {
        one["task"]: (one["documents"], one["queries"]) for record in records_of(scored[0]) for one in record["scores"]
    }
    named = {at for at in range(QUERIES)} | {(7 * at + 90) % DOCUMENTS for at in range(QUERIES)}
    assert counts["NQ"] == (DOCUMENTS, QUERIES)
    assert counts["NQ-judged"] == counts["mine-judged"] == (len(named), QUERIES)
    # Of several splits, what any of them names.
    both = {at for at in range(2 * QUERIES)} | {(7 * at + 90) % DOCUMENTS for at in range(2 * QUERIES)}
    assert counts["MultiLongDocRetrieval-judged"] == (len(both), QUERIES)


def test_the_files_are_mteb_s(scored: tuple[Path, EvaluateConfig], model: Path) -> None:
    folder, _ = scored
    [place] = (folder / "results" / "biphasic__scored").iterdir()
    names = {path.name for path in place.glob("*.json")}
    assert names == {"MSMARCO.json", "NQ.json", "MultiLongDocRetrieval.json", "NanoNQRetrieval.json", "STSBenchmark.json",
                     "model_meta.json"}  # fmt: skip
    result = TaskResult.from_disk(place / "MultiLongDocRetrieval.json")
    assert result.dataset_revision == mteb.get_task("MultiLongDocRetrieval").metadata.revision
    assert [one["hf_subset"] for one in result.scores["dev"]] == ["en"]
    loaded = mteb.ResultCache(folder).load_results(models=["biphasic/scored"], tasks=["NQ"])
    assert len(loaded.model_results) == 1
    meta = json.loads((place / "model_meta.json").read_text())
    assert (meta["name"], meta["embed_dim"], meta["max_tokens"]) == ("biphasic/scored", 32, 32)
    settings = [json.loads(line) for line in (place / "run_settings.jsonl").read_text().splitlines()]
    said = next(one["encode_kwargs"] for one in settings if one["task"] == "NQ")
    assert said["prompts"] == PROMPTS
    assert said["pooling"] == {"mode": "mean", "normalize": False}
    assert (said["longest"], said["precision"], said["similarity"]) == (32, "fp32", "cosine")
    # What mteb's leaderboard doesn't know lies apart.
    [local] = (folder / "local" / "results" / "biphasic__scored").iterdir()
    assert {path.stem for path in local.glob("*.json")} == {
        "MSMARCO-judged", "NQ-judged", "MultiLongDocRetrieval-judged", "NanoNQRetrieval-judged", "mine", "mine-judged",
        "model_meta",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["MSMARCO", "NQ", "STSBenchmark"])
def test_sentence_transformers_and_mteb_find_the_same(
    name: str, scored: tuple[Path, EvaluateConfig], model: Path
) -> None:
    folder, config = scored
    [planned] = [one for one in plan_tasks(config) if one.name == name]
    theirs, _ = score(SentenceTransformer(str(model), device="cpu"), planned.load())
    ours = values_of(folder)
    for one in theirs:
        assert abs(one.value - ours[name, one.split, "biphasic/scored"]) < 1e-4
    # The prompts matter, or the comparison would be none of them.
    plain = SentenceTransformer(str(model), device="cpu")
    plain.prompts = {}
    others, _ = score(plain, planned.load())
    assert name == "STSBenchmark" or abs(others[0].value - theirs[0].value) > 1e-3


def test_what_is_recorded_is_not_done_again(
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
    # Another setting is another thing.
    other = config.model_copy(
        update={"model": config.model.model_copy(update={"pooling": "mean"}), "precision": "fp32"}
    )
    run(other)
    monkeypatch.setattr("biphasic.evaluation.run.model_mark", lambda *_: "another")
    with pytest.raises(AssertionError, match="scored again"):
        run(config)


def test_an_interrupted_evaluation_goes_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retriever, "SMALL_BLOCK", 16)
    own = write_own(tmp_path / "mine")
    config = config_of(model, tmp_path, sets=[str(own)], baselines=[])
    embedded: list[int] = []
    embed = EncoderEmbedder.embed

    def note(self: EncoderEmbedder, texts: Any, progress: Any) -> np.ndarray:
        if len(embedded) == limit:
            raise KeyboardInterrupt
        embedded.append(len(texts))
        return embed(self, texts, progress)

    monkeypatch.setattr(EncoderEmbedder, "embed", note)
    limit = 5  # the queries, and four of ten blocks
    with pytest.raises(KeyboardInterrupt):
        run(config)
    assert not (tmp_path / "runs" / "scored" / "records").exists()
    assert not list((tmp_path / "runs").rglob("mine.json"))
    assert embedded == [QUERIES, 16, 16, 16, 16]
    embedded.clear()
    limit = -1
    folder = run(config)
    assert embedded == [QUERIES, 16, 16, 16, 16, 16, DOCUMENTS - 9 * 16]
    monkeypatch.setattr(retriever, "SMALL_BLOCK", 256)
    whole = config_of(model, tmp_path / "whole", sets=[str(own)], baselines=[])
    assert values_of(run(whole)) == values_of(folder)


def test_candidates_are_ranked_again(model: Path, tmp_path: Path) -> None:
    """As mteb's reranking tasks have them: only a query's candidates count."""
    task = sets.read_set(str(write_own(tmp_path / "mine")), "Again", "eng-Latn")
    data = task.content["default"]["test"]
    candidates = {
        f"q{at}": [f"d{at}", *(f"d{(at + 3 * step) % DOCUMENTS}" for step in range(1, 6))] for at in range(QUERIES)
    }
    data["top_ranked"] = candidates
    search = retriever.Retriever(EncoderEmbedder(load_encoder(str(model)), "a/b", "1"))
    [ours], _ = score(search, task)
    [theirs], _ = score(SentenceTransformer(str(model), device="cpu"), task)
    assert abs(ours.value - theirs.value) < 1e-4
    assert ours.recall_at_100 == theirs.recall_at_100
    data["top_ranked"] = None
    assert score(search, task)[0][0].value < ours.value - 0.05
    search.index(data["corpus"])
    found = search.search(data["queries"], task_metadata=task.metadata, hf_split="test", hf_subset="default", top_k=4,
                          top_ranked=candidates)  # fmt: skip
    assert all(set(best) <= set(candidates[query]) and len(best) == 4 for query, best in found.items())


def test_two_ranks_find_what_one_finds(
    mirror: Path, model: Path, tmp_path: Path, scored: tuple[Path, EvaluateConfig]
) -> None:
    large = write_own(tmp_path / "large", documents=700)  # three blocks, so that both ranks have some
    config = config_of(
        model, tmp_path, mirror=str(mirror), tasks=["NQ", "STSBenchmark"], documents=["full", "judged"],
        sets=[str(large)], model__name="a/b",
    )  # fmt: skip
    path = tmp_path / "two.yaml"
    path.write_text(dump(config))
    outcome = launch(path, processes=2)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    alone = run(config_of(model, tmp_path / "one", sets=[str(large)], model__name="a/b"))
    one, two = {**values_of(scored[0]), **values_of(alone)}, values_of(tmp_path / "runs" / "scored")
    for (task, split, system), value in two.items():
        known = system if task == "large" else system.replace("a/b", "biphasic/scored")
        if task != "large-judged":
            assert one[task, split, known] == pytest.approx(value, abs=1e-4)
    assert len(two) == 7 + 6
    assert outcome.stdout.count("| NQ-judged ") == 3
    # Each rank made some of the blocks, and neither all.
    assert (
        sorted(len(list(kept.glob("*.npy"))) for kept in (tmp_path / "cache" / "embeddings").glob("*/")).count(3) == 2
    )


def test_a_checkpoint_in_a_bucket(s3: Path, dataset: Path, write_yaml: Any, tmp_path: Path) -> None:
    from buckets import bucket_for
    from tiny import config_of as pretraining
    from tiny import train

    place = f"s3://{bucket_for(s3, 'evaluate')}/run"
    train(
        pretraining(
            write_yaml("run", checkpoint__folder=place, objective__phases=[{"name": "mlm", "masking_ratio": 0.4}])
        )
    )
    own = write_own(tmp_path / "mine")
    found = run(config_of(f"{place}/ba12-rank0.pt", tmp_path, sets=[str(own)]))
    here = next((tmp_path / "cache" / "models").rglob("ba12-rank0.pt"))
    again = run(config_of(here, tmp_path / "again", sets=[str(own)]))
    assert values_of(found) == values_of(again)
    said = json.loads((found / "scores.json").read_text())["settings"]
    assert said["pooling"]["mode"] == "mean"
    with pytest.raises(UserError, match=r"^checkpoint s3://.*ba99-rank0\.pt: can't be used"):
        run(config_of(f"{place}/ba99-rank0.pt", tmp_path, sets=[str(own)]))


def test_python_alone_takes_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: started.append([path, *arguments]))
    monkeypatch.setattr(sys, "argv", ["src/main.py", "yamls/evaluate/quick.yaml", "model.path=x"])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for count in (0, 1, 4):
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        job._use_all_gpus()
    [command] = started
    assert command[0] == command[1] == sys.executable
    assert command[2:] == ["-m", "composer.cli", "-n", "4", *sys.argv]
    monkeypatch.setenv("WORLD_SIZE", "4")
    job._use_all_gpus()
    assert len(started) == 1


def test_bad_input_is_one_line(mirror: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = write_own(tmp_path / "mine")
    bare = tmp_path / "bare"
    load_encoder(str(model)).backbone.save_pretrained(bare)  # pyright: ignore
    load_encoder(str(model)).tokenizer.save(bare)
    assert not (bare / "modules.json").exists()
    wrong = tmp_path / "wrong"
    shutil.copytree(model, wrong)
    tokenizer = json.loads((wrong / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {f"more{at}": WORDS + at for at in range(40)}
    (wrong / "tokenizer.json").write_text(json.dumps(tokenizer))
    for changes, says in (
        ({"tasks": ["MSMARC"]}, r"tasks: mteb has none of this name: .*MSMARCO"),
        ({"benchmarks": ["NanoBIER"]}, r"benchmarks: mteb has none of this name: .*NanoBEIR"),
        ({"tasks": ["NQ"], "splits": {"NQ": ["train"]}}, r"splits\.NQ: train is none of test"),
        (
            {"tasks": ["MultiLongDocRetrieval"], "subsets": {"MultiLongDocRetrieval": ["eng"]}},
            "eng is none of ar, de, en",
        ),
        ({"tasks": ["NQ"], "mirror": str(tmp_path)}, r"mirror .*: has no mteb/nq; bring it .* hf download"),
        ({"sets": ["nowhere"]}, r"sets: nowhere: there is no such folder"),
        ({"sets": [str(own)], "model__path": str(bare)}, r"bare: has no modules\.json, which says how it pools"),
        (
            {"sets": [str(own)], "model__path": str(wrong)},
            r"its tokenizer has 104 tokens, its embedding 64: they don't belong",
        ),
        ({"sets": [str(own)], "model__pooling": "cls"}, r"model\.pooling: cls, but the model's own files say mean"),
        ({"sets": [str(own)], "precision": "amp_bf16"}, "amp_bf16 needs a GPU"),
        ({"sets": [str(own)], "model__path": str(tmp_path / "nowhere")}, "can't be loaded"),
    ):
        with pytest.raises(UserError, match=says) as caught:
            run(config_of(model, tmp_path, **changes))
        assert "\n" not in str(caught.value)
    scores = []
    for pooling in ("mean", "max"):
        found = run(config_of(bare, tmp_path / pooling, sets=[str(own)], model__pooling=pooling, baselines=[]))
        assert json.loads((found / "scores.json").read_text())["settings"]["pooling"]["mode"] == pooling
        scores += values_of(found).values()
    assert len(set(scores)) == 2
