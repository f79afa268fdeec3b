"""Other relevant documents of a query are no negatives for it, where `task.mask_positives` says so."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from biphasic.downstream.prepare import prepare_task
from biphasic.finetuning.retrieval import Retrieval, info_nce
from biphasic.finetuning.run import run
from biphasic.finetuning.trial import build_task
from helpers.downstream_sets import jsonl, one_task
from helpers.toy_sets import config_of

QUERIES, DOCUMENTS = 6, 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six queries with four relevant documents each, and one document that is relevant to two queries."""
    folder = tmp_path_factory.mktemp("pairs")
    texts = {(query, at): f"w{20 + query} w{1 + at}" for query in range(QUERIES) for at in range(DOCUMENTS)}
    pairs = [{"query": f"w{20 + query} w20", "positive": text} for (query, _), text in texts.items()]
    pairs += [{"query": "w21 w20", "positive": texts[0, 0]}]
    corpus = [{"_id": f"{query}-{at}", "text": text} for (query, at), text in texts.items()]
    queries = [{"_id": f"q{query}", "text": f"w{20 + query} w20"} for query in range(QUERIES)]
    qrels = [{"query-id": f"q{query}", "corpus-id": f"{query}-{at}", "score": 1} for query, at in texts]
    tables = {"pairs": pairs, "corpus": corpus, "queries": queries, "qrels": qrels}
    files = {name: {"files": [jsonl(folder / f"{name}.jsonl", rows)]} for name, rows in tables.items()}
    task = {"kind": "retrieval", "train": files["pairs"], "corpus": files["corpus"], "queries": [files["queries"]]}
    splits = {"validation": files["qrels"], "test": files["qrels"]}
    prepare_task("it", one_task(folder, {**task, "qrels": splits, "judged_only": False}))
    return str(folder / "out" / "it")


def config(data: str, toy: Path, folder: Path, **changes: Any) -> Any:
    task = {"kind": "retrieval", "name": "it", "data": data, "query_prompt": "", "document_prompt": ""}
    changes = {"batch_size": 25, "max_duration": "60ep", **changes, "task": {**task, **changes.get("task", {})}}
    return config_of("sst2", toy / "tasks", toy / "start", folder, **changes)


def test_the_loss_leaves_them_out() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, documents = torch.randn(3, 8, generator=generator), torch.randn(5, 8, generator=generator)
    ids = torch.tensor([10, 11, 12, 13, 10])  # the last, a hard negative, is the first query's own
    relevant = torch.tensor([[10, 11], [11, 10], [12, 12]])
    similarities = F.normalize(queries, dim=1) @ F.normalize(documents, dim=1).T / 0.05
    kept = [[0, 2, 3], [1, 2, 3], [0, 1, 2, 3, 4]]
    parts = [similarities[row, columns].logsumexp(0) - similarities[row, row] for row, columns in enumerate(kept)]
    assert float(info_nce(queries, documents, ids, 0.05, relevant)) == pytest.approx(float(sum(parts)) / 3, rel=1e-5)


def test_a_batch_names_the_relevant_documents(data: str, toy: Path, tmp_path: Path) -> None:
    chosen = config(data, toy, tmp_path, task={"mask_positives": True})
    task = build_task(chosen.model, chosen.task, chosen.cache)
    assert isinstance(task, Retrieval)
    examples = task.training_examples()
    batch = task.collate(examples, [0, 4, 8], 0, 0)
    hashes = examples["ids"].flat
    assert set(batch["relevant"][0].tolist()) == set(hashes[:4].tolist())
    assert set(batch["relevant"][1].tolist()) == {*hashes[4:8].tolist(), hashes[0]}


def test_the_loss_of_training(data: str, toy: Path, tmp_path: Path) -> None:
    """With four documents of a query in each batch as each other's negatives, the loss of queries is at least about ln 4."""
    losses = {}
    for mask in (True, False):
        name = f"mask-{mask}".lower()
        run(config(data, toy, tmp_path, run_name=name, task={"mask_positives": mask}))
        losses[mask] = json.loads((tmp_path / "runs" / name / "record.json").read_text())["about"]["loss"]
    assert losses[True] < 0.5
    assert losses[False] > math.log(4)
