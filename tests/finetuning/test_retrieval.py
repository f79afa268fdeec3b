"""Retrieval fine-tuning: the loss, alone and on two ranks, hard negatives, and mteb's scores of the trained model."""

import gzip
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

from biphasic.config.finetune import FinetuneConfig
from biphasic.config.load import dump
from biphasic.durations import Duration
from biphasic.errors import UserError
from biphasic.evaluation.embedder import EncoderEmbedder
from biphasic.evaluation.retriever import Retriever
from biphasic.evaluation.scoring import bm25, score
from biphasic.evaluation.sets import read_set, retrieval_task
from biphasic.finetuning.classification import entity_scores
from biphasic.finetuning.retrieval import Retrieval, hash_text, info_nce
from biphasic.finetuning.run import run
from biphasic.finetuning.trial import require_validation, run_trial, trial_name
from biphasic.model.encoder import Encoder, load_encoder
from helpers import two_ranks, warm
from helpers.tiny import losses
from helpers.toy_sets import config_of


def test_info_nce_equals_the_full_matrix() -> None:
    generator = torch.Generator().manual_seed(1)
    queries, documents = (torch.randn(5, 7, generator=generator) for _ in range(2))
    ids = torch.tensor([3, 1, 3, 4, 5])
    q, d = (x / x.norm(dim=1, keepdim=True) for x in (queries, documents))
    total = 0.0
    for i in range(5):
        scores = [float(q[i] @ d[j]) / 0.05 for j in range(5) if j == i or ids[j] != ids[i]]
        own = float(q[i] @ d[i]) / 0.05
        total += float(np.log(np.sum(np.exp(np.array(scores) - own))))
    assert abs(float(info_nce(queries, documents, ids, 0.05)) - total / 5) < 1e-5


def test_info_nce_with_hard_negatives_equals_the_full_matrix(toy: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    queries, documents = torch.randn(3, 7, generator=generator), torch.randn(5, 7, generator=generator)
    ids = torch.tensor([0, 1, 2, 1, 9])  # the first hard negative is the second query's own document
    q, d = (F.normalize(x, dim=1) for x in (queries, documents))
    total = 0.0
    for i in range(3):
        scores = [float(q[i] @ d[j]) / 0.05 for j in range(5) if j == i or ids[j] != ids[i]]
        total += float(np.log(np.sum(np.exp(np.array(scores) - float(q[i] @ d[i]) / 0.05))))
    assert abs(float(info_nce(queries, documents, ids, 0.05)) - total / 3) < 1e-5


def test_choice_of_hard_negatives(toy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hard"
    shutil.copytree(toy / "tasks" / "msmarco", folder)
    rows = 64
    negatives = [[f"w{at % 50 + number}" for number in range(1 + at % 3)] for at in range(rows)]
    texts = [f"w{at % 60} w{at // 60}" for at in range(rows)]
    table = pa.table({"query": texts, "positive": texts, "negatives": negatives})
    pq.write_table(table, folder / "train.parquet")
    config = config_of("msmarco", toy / "tasks", toy / "start", tmp_path, task__data=str(folder), task__hard_negatives=2)
    text_tokenizer = load_encoder(str(toy / "start")).text_tokenizer
    task = Retrieval(config.task, text_tokenizer, config.cache)
    examples = task.training_examples()
    batch = task.collate(examples, [5, 0, 7], epoch=0, seed=1)
    assert batch["queries"] == 3
    assert len(batch["lengths"]) == 3 + 3 + 6
    known = {hash_text(text): text for row in negatives for text in row} | {hash_text(text): text for text in texts}
    assert batch["ids"].lt(0).nonzero().flatten().tolist() == [6]  # row 0 has one negative, which is repeated
    documents = [known.get(int(id), negatives[0][0]) for id in batch["ids"]]
    assert documents[:3] == [texts[5], texts[0], texts[7]]
    for at, row in enumerate((5, 0, 7)):
        assert set(documents[3 + 2 * at : 5 + 2 * at]) <= set(negatives[row])
    assert len(set(documents[3:5])) == 2  # row 5 has three of them, so none is repeated
    # The tokens are those of the documents.
    tokens = batch["tokens"].split(batch["lengths"])
    assert [part.tolist() for part in tokens[3:]] == [ids for ids, _ in text_tokenizer.tokenize_and_count(documents, 64)]
    # The choice depends on the row, the epoch and the seed, not on the batch.
    alone = task.collate(examples, [5], epoch=0, seed=1)
    assert torch.equal(alone["ids"][1:], batch["ids"][3:5])
    for draws in ([(0, seed) for seed in range(2, 8)], [(epoch, 1) for epoch in range(2, 8)]):
        choices = [task.collate(examples, [5], epoch, seed)["ids"][1:].tolist() for epoch, seed in draws]
        assert any(choice != alone["ids"][1:].tolist() for choice in choices)
    assert run_trial(config.model_copy(update={"max_duration": Duration(2, "ba")})).about["steps"] == 2


def run_on_two_ranks(names: list[str], toy: Path, folder: Path) -> None:
    """Fine-tune on these sets, and write `measure` of the first one to `mean.pt`."""
    paths = [folder / f"{name}.yaml" for name in names]
    for name, path in zip(names, paths, strict=True):
        path.write_text(dump(short_config(name, toy, folder)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    arguments = [str(folder / "mean.pt"), *map(str, paths)]
    result = warm.run(arguments, 2, environment, module="helpers.two_ranks", setup="import biphasic.finetuning.run")
    assert result.returncode == 0, result.stderr[-2000:]


def short_config(name: str, toy: Path, folder: Path) -> FinetuneConfig:
    return config_of(name, toy / "tasks", toy / "start", folder, max_duration="8ba", logging__jsonl=True)


@pytest.fixture(scope="module")
def two_ranks_folder(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-ranks")
    run_on_two_ranks(["msmarco", "conll2003"], toy, folder)
    return folder


def test_losses_on_two_ranks_equal_one(toy: Path, two_ranks_folder: Path) -> None:
    """Also the gradient of 4,096 pairs, in parts on two ranks and at once on one."""
    alone = two_ranks.measure(short_config("msmarco", toy, two_ranks_folder), 1 << 20, 0, 1)
    means = torch.load(two_ranks_folder / "mean.pt")
    for name, expected in alone.items():
        assert means[name][0] == pytest.approx(float(expected[0]), rel=1e-6), name
        assert relative_difference(means[name][1:], expected[1:]) < 1e-6, name


def relative_difference(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((value.double() - expected.double()).norm() / expected.double().norm())


def assert_same_as_one_rank(name: str, toy: Path, two_ranks_folder: Path, folder: Path) -> None:
    run(short_config(name, toy, folder))
    runs = [root / "runs" / name for root in (folder, two_ranks_folder)]
    one, two = (json.loads((path / "record.json").read_text()) for path in runs)
    assert (one["about"]["ranks"], two["about"]["ranks"]) == (1, 2)
    assert len(losses(runs[0])) == 8
    np.testing.assert_allclose(losses(runs[0]), losses(runs[1]), atol=1e-5)
    for alone, shared in zip(one["results"], two["results"], strict=True):
        assert alone["test"] == pytest.approx(shared["test"], abs=0.02)
        assert alone["validation"] == pytest.approx(shared["validation"], abs=0.02)
    assert one["predictions"] == two["predictions"] and one["predictions"]
    if name == "conll2003":  # of all ranks, in the order of the rows
        rows = pq.read_table(runs[1] / two["predictions"][1]).to_pydict()
        assert entity_scores(rows["gold"], rows["predicted"])["f1"] == two["results"][0]["test"]
    elif name == "msmarco":
        [ranking] = [file for file in two["predictions"] if file.endswith("-test.run.gz")]
        lines = gzip.decompress((runs[1] / ranking).read_bytes()).splitlines()
        assert len(lines) == 160 * 100


@pytest.mark.parametrize("name", ["msmarco", "conll2003"])
def test_two_ranks_train_as_one_does(name: str, toy: Path, two_ranks_folder: Path, tmp_path: Path) -> None:
    """Every batch has the same loss: negatives are gathered with gradients, and means are over the targets of all ranks."""
    assert_same_as_one_rank(name, toy, two_ranks_folder, tmp_path)


@pytest.mark.slow
def test_two_ranks_answer_questions_as_one_does(toy: Path, tmp_path: Path) -> None:
    for ranks in ("one", "two"):
        (tmp_path / ranks).mkdir()
    run_on_two_ranks(["squad"], toy, tmp_path / "two")
    assert_same_as_one_rank("squad", toy, tmp_path / "two", tmp_path / "one")


def test_scores_equal_mteb(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of("msmarco", toy / "tasks", toy / "start", tmp_path, max_duration="30ba", save_model=True)
    folder = run(config)
    [result] = json.loads((folder / "record.json").read_text())["results"]
    # The set's folder has BEIR's layout.
    task = read_set(str(toy / "tasks" / "msmarco"), "Toy", "eng-Latn", ["test"])
    [ours], _ = score(Retriever(EncoderEmbedder(load_encoder(str(folder / "model")), "biphasic/fine", "1")), task)
    for name in ("ndcg_at_10", "mrr_at_10", "recall_at_100"):
        assert abs(getattr(ours, name) - result["more"]["test"][name]) < 2e-5, name  # mteb rounds to five places
    before = score(Retriever(EncoderEmbedder(load_encoder(str(toy / "start")), "biphasic/start", "0")), task)[0][0]
    assert ours.value > before.value + 0.2
    assert len(ours.by_query) == 160
    # Queries and documents have no word in common, so BM25 finds nothing.
    assert score(bm25(), task)[0][0].value < 0.2

    # The same encoder through sentence-transformers, with its own prompts, pooling and cutting, scores the same.
    from sentence_transformers import SentenceTransformer

    reference = score(SentenceTransformer(str(folder / "model"), device="cpu"), task)[0][0]
    assert abs(reference.value - ours.value) < 1e-4


def test_empty_and_unjudged_sets_are_refused() -> None:
    with pytest.raises(UserError, match="corpus is empty"):
        retrieval_task("Empty", {}, {"q": "a"}, {"test": {"q": {"d": 1}}})
    with pytest.raises(UserError, match=r"1 queries have no judgments \(qrels\), e\.g\. q"):
        retrieval_task("Unjudged", {"d": "a"}, {"q": "a"}, {"test": {}})


def test_sets_without_judgments_are_refused_before_training(toy: Path, tmp_path: Path) -> None:
    """Also those without judgments for validation, if a sweep chooses among several rates."""
    shutil.copytree(toy / "tasks", tmp_path / "tasks")
    config = config_of("msmarco", tmp_path / "tasks", toy / "start", tmp_path)
    require_validation(config)
    file = tmp_path / "tasks" / "msmarco" / "task.json"
    record = json.loads(file.read_text())
    for splits, refused in ((["validation"], require_validation), (["test"], trial_name)):
        for split in splits:
            del record["rows"][f"qrels/{split}"]
        file.write_text(json.dumps(record))
        with pytest.raises(UserError, match=r"msmarco: has no judgments for validation"):
            refused(config)


def test_embedding_does_not_depend_on_the_batch(toy: Path) -> None:
    encoder: Encoder = load_encoder(str(toy / "start"))
    texts = [[5, 6, 7], [8] * 30, [9], [10, 11, 12, 13]]
    embeddings = encoder.embed(texts)
    for text, embedding in zip(texts, embeddings, strict=True):
        torch.testing.assert_close(encoder.embed([text])[0], embedding, atol=1e-6, rtol=1e-5)
    assert encoder.embed([]).shape == (0, 32)
