"""Losses of retrieval: equal to sentence-transformers', in parts equal to the whole batch, and truncated."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sentence_transformers import SentenceTransformer, losses
from sentence_transformers.util import cos_sim, pairwise_cos_sim
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from biphasic.config.evaluate import EvaluateConfig
from biphasic.config.finetune import FinetuneConfig
from biphasic.downstream.writer import SCHEMAS
from biphasic.durations import Duration
from biphasic.errors import UserError
from biphasic.evaluation.embedder import EncoderEmbedder
from biphasic.evaluation.run import _model
from biphasic.evaluation.search import rank_documents, retrieval_scores
from biphasic.finetuning.plan import plan_finetuning
from biphasic.finetuning.retrieval import Retrieval, hash_text, info_nce, kl_divergence
from biphasic.finetuning.run import run
from biphasic.finetuning.trial import scored_sets
from biphasic.model.encoder import Encoder, load_encoder
from biphasic.model.segments import Segments
from helpers.toy_sets import config_of
from helpers.two_ranks import batch_gradient, random_pairs

PAIRS, NEGATIVES, WIDTH, TEMPERATURE = 6, 3, 16, 0.05
LOSSES = ("info_nce", "kl")


@pytest.fixture(scope="module")
def scored_set(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The retrieval set with hard negatives and a teacher's scores, which are the numbers of the negatives."""
    folder = tmp_path_factory.mktemp("scored") / "msmarco"
    shutil.copytree(toy / "tasks" / "msmarco", folder)
    pairs = pq.read_table(folder / "train.parquet").to_pydict()
    count = len(pairs["query"])
    pairs["negatives"] = [[f"w{30 + (row + at) % 30}" for at in range(1 + row % 3)] for row in range(count)]
    pairs["scores"] = [[10.0, *map(float, range(1 + row % 3))] for row in range(count)]
    pq.write_table(pa.table(pairs, SCHEMAS["scored_pairs"]), folder / "train.parquet")
    return folder


@pytest.fixture
def retrieval(toy: Path, scored_set: Path, tmp_path: Path) -> FinetuneConfig:
    changes = {"task__data": str(scored_set), "task__hard_negatives": 1, "max_duration": "30ba"}
    return config_of("msmarco", toy / "tasks", toy / "start", tmp_path, **changes)


def with_task(config: FinetuneConfig, **changes: Any) -> FinetuneConfig:
    return config.model_copy(update={"task": config.task.model_copy(update=changes)})


def embeddings() -> tuple[Tensor, Tensor, Tensor]:
    """Queries [6, 16]; documents [4, 6, 16], the positives first; the teacher's scores [6, 4]."""
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(PAIRS, WIDTH, generator=generator)
    documents = torch.randn(1 + NEGATIVES, PAIRS, WIDTH, generator=generator)
    return queries, documents, 5 * torch.randn(PAIRS, 1 + NEGATIVES, generator=generator)


def ours(name: str) -> Tensor:
    queries, documents, scores = (part.clone() for part in embeddings())
    # Each query's negatives stand together.
    flat = torch.cat([documents[0], documents[1:].transpose(0, 1).reshape(-1, WIDTH)])
    if name == "kl":
        return kl_divergence(queries, flat, scores, TEMPERATURE)
    return info_nce(queries, flat, torch.arange(len(flat)), TEMPERATURE)


def scaled(first: Tensor, second: Tensor) -> Tensor:
    return pairwise_cos_sim(first, second) / TEMPERATURE


class Width:
    """Stands for a model in sentence-transformers' losses, which ask it only for its width."""

    def get_embedding_dimension(self) -> int:
        return WIDTH


def theirs(name: str) -> Any:
    """Return sentence-transformers' loss."""
    model: Any = Width()
    return {
        "info_nce": lambda: losses.MultipleNegativesRankingLoss(model, 1 / TEMPERATURE, cos_sim),
        "kl": lambda: losses.DistillKLDivLoss(model, scaled),
    }[name]()


@pytest.mark.parametrize("name", LOSSES)
def test_losses_equal_sentence_transformers(name: str) -> None:
    queries, documents, scores = embeddings()
    expected = theirs(name).compute_loss_from_embeddings([queries, *documents], scores)
    assert float(ours(name)) == pytest.approx(float(expected), rel=1e-6, abs=1e-6)
    assert float(expected) > 0.01


def test_similarities_are_in_fp32_also_under_autocast() -> None:
    """In bf16 they would be rounded to 0.0625 and more, since a temperature of 0.05 makes them 20 at most."""
    generator = torch.Generator().manual_seed(0)
    queries, documents = (torch.randn(count, WIDTH, generator=generator) for count in (PAIRS, 2 * PAIRS))
    ids = torch.arange(2 * PAIRS)
    expected = info_nce(queries, documents, ids, TEMPERATURE)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(info_nce(queries, documents, ids, TEMPERATURE), expected)


def test_dimensions_equal_sentence_transformers(retrieval: FinetuneConfig) -> None:
    """The sum over the truncated embeddings, as in its MatryoshkaLoss with equal weights."""
    queries, documents, scores = embeddings()
    expected = losses.MatryoshkaLoss(Width(), theirs("info_nce"), [16, 8, 4])  # pyright: ignore
    assert expected.matryoshka_weights == (1, 1, 1)
    total = sum(
        expected.loss.compute_loss_from_embeddings([each[..., :dimension] for each in (queries, *documents)], scores)
        for dimension in expected.matryoshka_dims
    )
    config = with_task(retrieval, dimensions=[16, 8, 4])
    task = Retrieval(config.task, load_encoder(config.model.path).text_tokenizer, config.cache)
    flat = torch.cat([queries, documents[0], documents[1:].transpose(0, 1).reshape(-1, WIDTH)])
    batch = {"queries": PAIRS, "ids": torch.arange(len(flat) - PAIRS)}
    loss = task.loss(task.build_head(32), flat, Segments.of([1], flat.device), batch)
    assert float(loss) / PAIRS == pytest.approx(float(total), rel=1e-6)


def relative_difference(value: Tensor, expected: Tensor) -> float:
    return float((value.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_in_parts_is_that_of_the_whole_batch(name: str, retrieval: FinetuneConfig) -> None:
    config = with_task(retrieval, loss=name, dimensions=[32, 8])
    whole, parts = (batch_gradient(config, load_encoder(config.model.path), size)[0] for size in (1 << 20, 24))
    assert whole[0] == pytest.approx(float(parts[0]), rel=1e-6)
    assert relative_difference(parts[1:], whole[1:]) < 1e-6


class DroppingEncoder(Encoder):
    """An encoder with dropout on its hidden states, which are kept."""

    def hidden(self, tokens: Tensor, segments: Segments) -> Tensor:
        hidden = torch.nn.functional.dropout(super().hidden(tokens, segments), 0.5)
        self.computed = [*getattr(self, "computed", []), hidden.detach()]
        return hidden


def test_parts_are_recomputed_with_the_same_dropout(retrieval: FinetuneConfig) -> None:
    loaded = load_encoder(retrieval.model.path)
    encoder = DroppingEncoder(loaded.backbone, loaded.text_tokenizer)
    batch_gradient(retrieval, encoder, 64)
    half = len(encoder.computed) // 2
    assert half > 5 and len(encoder.computed) == 2 * half
    # The backward pass computes the last part first.
    for first, again in zip(encoder.computed[:half], reversed(encoder.computed[half:]), strict=True):
        assert torch.equal(first, again)
        assert (first == 0).float().mean() > 0.4


def test_memory_does_not_grow_with_the_number_of_parts(retrieval: FinetuneConfig) -> None:
    """Peak bytes of tensors in a step, for as many texts of four times the tokens, so in four times the parts."""
    peaks, tokens = [], []
    encoder = load_encoder(retrieval.model.path)
    for longest in (15, 60):
        batch_gradient(retrieval, encoder, 64, longest=longest)  # what is made once
        with MemTracker() as tracker:
            batch_gradient(retrieval, encoder, 64, longest=longest)
        peaks.append(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
        pairs = random_pairs(32, longest)
        tokens.append(sum(int(pairs[column].lengths.sum()) for column in ("texts", "documents")))
    hidden_bytes = (tokens[1] - tokens[0]) * encoder.width * 4
    assert peaks[1] - peaks[0] < hidden_bytes / 4


def test_collated_scores_are_those_of_the_chosen_documents(retrieval: FinetuneConfig) -> None:
    config = with_task(retrieval, loss="kl", hard_negatives=2)
    task = Retrieval(config.task, load_encoder(config.model.path).text_tokenizer, config.cache)
    examples = task.training_examples()
    batch = task.collate(examples, [2, 0, 5], epoch=0, seed=1)
    columns = task.data.read("train", "scored_pairs")
    documents = {hash_text(text): text for row in columns["negatives"] for text in row}
    for row, (index, scores) in enumerate(zip([2, 0, 5], batch["scores"].tolist(), strict=True)):
        ids = batch["ids"][3 + 2 * row : 5 + 2 * row].tolist()
        of_text = dict(zip(columns["negatives"][index], columns["scores"][index][1:], strict=True))
        assert scores == [10.0, *(of_text[documents[id]] if id >= 0 else float("-inf") for id in ids)]
    assert batch["scores"][1].tolist() == [10.0, 0.0, float("-inf")]  # it has one negative
    assert batch["ids"][3:].view(3, 2).lt(0).tolist() == [[False, False], [False, True], [False, False]]


@pytest.mark.parametrize("name", LOSSES)
def test_repeats_of_few_negatives_have_no_effect(name: str, retrieval: FinetuneConfig) -> None:
    """Loss and gradient are those of a batch without them."""
    queries, documents, scores = embeddings()
    positives, others = documents[0], documents[1:].transpose(0, 1)
    gradients, losses = [], []
    for repeats in (0, NEGATIVES):
        own, shape = queries.clone().requires_grad_(), (PAIRS, repeats)
        flat = torch.cat([positives, torch.cat([others, others[:, :repeats]], 1).reshape(-1, WIDTH)])
        negatives = torch.arange(PAIRS, PAIRS + others[..., 0].numel()).view(PAIRS, -1)
        ids = torch.cat([torch.arange(PAIRS), torch.cat([negatives, torch.full(shape, -1)], 1).flatten()])
        taught = torch.cat([scores, torch.full(shape, float("-inf"))], 1)
        task = Retrieval(with_task(retrieval, loss=name).task, load_encoder(retrieval.model.path).text_tokenizer, "")
        batch = {"queries": PAIRS, "ids": ids, "scores": taught}
        loss = task.loss(task.build_head(32), torch.cat([own, flat]), Segments.of([1], flat.device), batch)
        loss.backward()
        losses.append(float(loss.detach()))
        assert own.grad is not None
        gradients.append(own.grad)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert relative_difference(gradients[1], gradients[0]) < 1e-6


def test_a_loss_that_needs_scores_stops_without_them(toy: Path, retrieval: FinetuneConfig) -> None:
    data = str(toy / "tasks" / "msmarco")
    config = with_task(retrieval, loss="kl", data=data)
    message = f"task.loss: kl needs a teacher's scores, and {data} has none: "
    assert [problem[: len(message)] for problem in plan_finetuning(config, 1).problems] == [message]
    with pytest.raises(UserError, match="needs a teacher's scores"):
        run(config)
    assert not plan_finetuning(with_task(retrieval, loss="kl"), 1).problems


def test_dimensions_beyond_the_width(retrieval: FinetuneConfig) -> None:
    config = with_task(retrieval, dimensions=[64, 8])
    message = "task.dimensions: 64 is more than the model's width of 32"
    assert plan_finetuning(config, 1).problems == [message]
    with pytest.raises(UserError, match=message):
        run(config)


def test_dimensions_below_the_width(toy: Path, retrieval: FinetuneConfig) -> None:
    """The saved model gives the embeddings that are scored, without the values that no loss reaches."""
    data = str(toy / "tasks" / "msmarco")
    config = with_task(retrieval, dimensions=[16, 8], scored_on={"own": data})
    folder = run(config.model_copy(update={"save_model": True, "max_duration": Duration(3, "ba")}))
    [whole, _] = json.loads((folder / "record.json").read_text())["results"]
    model = SentenceTransformer(str(folder / "model"), device="cpu")
    tables = {name: pq.read_table(Path(data) / f"{name}.parquet").to_pydict() for name in ("queries", "corpus")}
    queries = torch.from_numpy(model.encode(tables["queries"]["text"], prompt_name="query"))
    documents = torch.from_numpy(model.encode(tables["corpus"]["text"], prompt_name="document"))
    assert queries.shape[1] == documents.shape[1] == 16
    judged = pq.read_table(Path(data) / "qrels" / "test.parquet").to_pydict()
    qrels = {query: {document: 1} for query, document in zip(judged["query-id"], judged["corpus-id"], strict=True)}
    places = [tables["queries"]["_id"].index(query) for query in qrels]
    ranking = rank_documents(list(qrels), queries[places], tables["corpus"]["_id"], documents)
    assert retrieval_scores(ranking, qrels)["ndcg_at_10"] == pytest.approx(whole["test"], abs=1e-3)
    evaluation: dict[str, Any] = {"job": "evaluate", "run_name": "e", "cache": config.cache, "sets": [data]}
    evaluated: Any = _model(EvaluateConfig.model_validate({**evaluation, "model": {"path": str(folder / "model")}}))
    assert evaluated.model.embedder.width == 16


def test_dimensions_and_prompts_of_a_run(toy: Path, retrieval: FinetuneConfig) -> None:
    """Tables, record, and the export in sentence-transformers."""
    data, prompt = str(toy / "tasks" / "msmarco"), "w3 w4 "
    config = with_task(retrieval, dimensions=[32, 8], query_prompt=prompt, scored_on={"own": data})
    config = config.model_copy(update={"save_model": True})
    folder = run(config)
    record = json.loads((folder / "record.json").read_text())
    results = {result["name"]: result for result in record["results"]}
    assert list(results) == ["own", "own d8"]
    assert [(each["task"], each["name"], each["metric"]) for each in results.values()] == list(scored_sets(config))
    assert len({result["test"] for result in results.values()}) == 2
    assert "predictions/own-d8-test.run.gz" in record["predictions"]
    path = str(folder / "model")
    settings = json.loads((folder / "model" / "config_sentence_transformers.json").read_text())
    assert settings["prompts"] == {"query": prompt, "document": ""}
    assert "truncate_dim" not in settings
    card = (folder / "model" / "README.md").read_text()
    assert "32, 8 dimensions" in card and "truncate_dim=8" in card
    texts = ["w5 w6 w7", "w30", "w41 w42 w43 w44"]
    truncated = SentenceTransformer(path, device="cpu", truncate_dim=8)
    embedder = EncoderEmbedder(load_encoder(path), "biphasic/fine", "1", dimension=8)
    assert embedder.width == 8 and embedder.settings["dimension"] == 8
    for name in ("query", "document"):
        encoded = truncated.encode(texts, prompt_name=name)
        assert encoded.shape == (3, 8)
        prompted = [settings["prompts"][name] + text for text in texts]
        np.testing.assert_allclose(encoded, embedder.embed(prompted, lambda _: None), atol=1e-5)
    evaluation: dict[str, Any] = {"job": "evaluate", "run_name": "e", "cache": config.cache, "sets": [data]}

    def evaluated(**model: Any) -> Any:
        return _model(EvaluateConfig.model_validate({**evaluation, "model": {"path": path, **model}}))

    whole, system = evaluated(), evaluated(dimension=8)
    assert (whole.model.embedder.width, system.model.embedder.width) == (32, 8)
    assert whole.model.embedder.revision != system.model.embedder.revision
    with pytest.raises(UserError, match=r"model\.dimension: 33 is more than the model's width of 32"):
        evaluated(dimension=33)
    # The trial's ranking is that of the exported model's truncated embeddings.
    tables = {name: pq.read_table(Path(data) / f"{name}.parquet").to_pydict() for name in ("queries", "corpus")}
    queries = truncated.encode(tables["queries"]["text"], prompt_name="query", normalize_embeddings=True)
    documents = truncated.encode(tables["corpus"]["text"], prompt_name="document", normalize_embeddings=True)
    judged = pq.read_table(Path(data) / "qrels" / "test.parquet").to_pydict()
    qrels = {query: {document: 1} for query, document in zip(judged["query-id"], judged["corpus-id"], strict=True)}
    places = [tables["queries"]["_id"].index(query) for query in qrels]
    ranking = rank_documents(list(qrels), torch.from_numpy(queries[places]), tables["corpus"]["_id"],
                             torch.from_numpy(documents))  # fmt: skip
    assert retrieval_scores(ranking, qrels)["ndcg_at_10"] == pytest.approx(results["own d8"]["test"], abs=1e-3)
