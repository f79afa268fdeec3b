"""Fine-tuning for retrieval: train query embeddings to be close to the embeddings of relevant documents."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from biphasic.downstream.array_cache import Ragged
from biphasic.downstream.task_folder import TaskFolder
from biphasic.errors import UserError
from biphasic.evaluation.search import (
    Qrels,
    ndcg_of_ten,
    query_columns,
    rank_documents,
    retrieval_scores,
    scores_by_query,
    trec_run,
)
from biphasic.finetuning.retrieval_losses import LOSSES, LearnedTemperature
from biphasic.finetuning.task import Examples, FinetuneTask, Scored, TaskBatch, TrainedModel
from biphasic.model.encoder import TextTokenizer
from biphasic.model.pooling import mean_pool
from biphasic.model.segments import Segments
from biphasic.storage import parquet_bytes


class Retrieval(FinetuneTask):
    """Trains mean-pooled embeddings of query-document pairs with one of `LOSSES`.

    The head is a learned temperature, or nothing. Raises a UserError also if the loss needs scores that the pairs lack.
    """

    family = "retrieval"

    def __init__(self, config: Any, text_tokenizer: TextTokenizer, cache: str, record: dict[str, Any] | None = None):
        super().__init__(config, text_tokenizer, cache, record)
        self.scored_tokenizer = text_tokenizer
        self.prompts = config.prompts
        if LOSSES[config.loss][1] == "scores" and "scores" not in self.data.columns("train"):
            advice = "prepare the pairs with `scores_column` (docs/tasks.md)"
            raise UserError(f"task.loss: {config.loss} needs a teacher's scores, and {config.data} has none: {advice}")

    def build_head(self, width: int) -> nn.Module:
        """Return the learned temperature, or a module without weights.

        Raises:
            UserError: a dimension in `task.dimensions` is larger than the width.
        """
        if self.config.dimensions and self.config.dimensions[0] > width:
            raise UserError(f"task.dimensions: {self.config.dimensions[0]} is more than the model's width of {width}")
        return nn.Identity() if self.config.temperature_lr is None else LearnedTemperature(self.config.temperature)

    def tables(self) -> list[tuple[TaskFolder, str]]:
        """Return the table of training pairs and all tables of the scored sets; a UserError if a set has no judgments."""
        scored = [
            (folder, table)
            for folder in self._scored_sets().values()
            for table in ("corpus", "queries", *(f"qrels/{split}" for split in _judged_splits(folder)))
        ]
        return [(self.data, "train"), *scored]

    def training_examples(self) -> Examples:
        """Return the training pairs.

        `texts` has the queries; `documents` their documents, then all hard negatives; `ids` has one row, the documents'
        hashes; `negatives` the indices of each query's hard negatives in `documents`; `scores`, where the loss needs
        them, those of the query's document and hard negatives.
        """

        def make() -> Examples:
            scored = "scores" in self.data.columns("train")
            columns = self.data.read("train", "scored_pairs" if scored else "pairs")
            negatives = [list(texts or []) for texts in columns["negatives"]]
            documents = [*columns["positive"], *(text for texts in negatives for text in texts)]
            indices = iter(range(len(negatives), len(documents)))
            return {
                "texts": self._tokenize(self.text_tokenizer, columns["query"], self.prompts["query"], "queries"),
                "documents": self._tokenize(self.text_tokenizer, documents, self.prompts["document"], "documents"),
                "ids": Ragged.of([[hash_text(text) for text in documents]], np.int64),
                "negatives": Ragged.of([[next(indices) for _ in texts] for texts in negatives]),
                **({"scores": Ragged.of(columns["scores"], np.float32)} if scored else {}),
            }

        examples = self.tokenize_once(self.data, "train", make)
        pairs, missing = len(examples["texts"]), int((examples["negatives"].lengths == 0).sum())
        if self.config.hard_negatives and missing:
            raise UserError(f"task.hard_negatives: {missing:,} of {pairs:,} pairs in {self.config.data} have none")
        return examples

    def collate(self, examples: Examples, indices: Sequence[int], epoch: int, seed: int) -> TaskBatch:
        """Concatenate the queries, each query's document, then hard negatives, sampled anew in each epoch."""
        documents, count, places = list(indices), self.config.hard_negatives, list[list[int]]()
        for index in indices if count else ():
            negatives = examples["negatives"][index]
            generator = random.Random(f"hard negatives {seed} {epoch} {index}")
            sample = generator.sample(range(len(negatives)), min(count, len(negatives)))
            # A pair with too few negatives repeats them, because every rank needs the same number of documents.
            places.append([sample[at % len(sample)] for at in range(count)])
            documents += negatives[places[-1]].tolist()
        parts = examples["texts"].concatenate(indices), examples["documents"].concatenate(documents)
        batch: TaskBatch = {
            "tokens": torch.from_numpy(np.concatenate([tokens for tokens, _ in parts])).long(),
            "lengths": [length for _, lengths in parts for length in lengths],
            "ids": torch.from_numpy(examples["ids"].flat[documents]),
            "queries": len(indices),
        }
        if places and "scores" in examples:
            chosen = [[0, *(place + 1 for place in row)] for row in places]
            rows = [examples["scores"][index][row] for index, row in zip(indices, chosen, strict=True)]
            batch["scores"] = torch.from_numpy(np.stack(rows))
        return batch

    def outputs(self, hidden: Tensor, segments: Segments) -> Tensor:
        """Return embeddings, fp32 [texts, width]: those of a large batch fit in memory, its hidden states don't."""
        return mean_pool(hidden, segments)

    def loss(self, head: nn.Module, hidden: Tensor, segments: Segments, batch: TaskBatch) -> Tensor:
        """Return the loss of a rank's queries, from the embeddings that are `outputs`; a sum over `task.dimensions`."""
        loss, compared = LOSSES[self.config.loss]
        temperature = head() if isinstance(head, LearnedTemperature) else self.config.temperature
        count = batch["queries"]
        losses = [
            loss(hidden[:count, :dimension], hidden[count:, :dimension], batch[compared], temperature)
            for dimension in self.config.dimensions or [None]
        ]
        return torch.stack(losses).sum() * count

    def split_batch(self, examples: Examples, indices: Sequence[int], tokens: int) -> Sequence[Sequence[int]]:
        """Return the examples undivided, because in-batch negatives need all of them."""
        return [indices]

    def evaluate(self, model: TrainedModel) -> Scored:
        """Return the scores, and for each set, further dimension and split, its ranking and scores by query.

        The files are named `SET-d256-SPLIT.run.gz` and `.parquet`.
        """
        results, files = [], {}
        for name, folder in self._scored_sets().items():
            queries, query_embeddings = self._embed(model, folder, "queries", "query", name)
            documents, document_embeddings = self._embed(model, folder, "corpus", "document", name)
            texts = dict(zip(queries, folder.read("queries", "queries")["text"], strict=True))
            positions = {query: at for at, query in enumerate(queries)}
            metrics: dict[str, dict[str, dict[str, float]]] = {shown: {} for shown in self.config.scored_as(name)}
            for split in _judged_splits(folder):
                qrels: Qrels = {}
                for query, document, grade in zip(*folder.read(f"qrels/{split}", "qrels").values(), strict=True):
                    qrels.setdefault(query, {})[document] = grade
                if missing := [query for query in qrels if query not in positions]:
                    problem = f"judges {len(missing)} queries that are missing, e.g. {missing[0]}"
                    raise UserError(f"{folder.path}/qrels/{split}: {problem}")
                judged = query_embeddings[[positions[query] for query in qrels]]
                for shown, dimension in self.config.scored_as(name).items():
                    truncated = judged[:, :dimension], document_embeddings[:, :dimension]
                    run = rank_documents(list(qrels), truncated[0], documents, truncated[1])
                    of_ten = ndcg_of_ten(run, qrels)
                    metrics[shown][split] = {**retrieval_scores(run, qrels), "ndcg_of_ten": fmean(of_ten.values())}
                    by_query = {"ndcg_at_10": scores_by_query(run, qrels, "ndcg_cut_10", 10), "ndcg_of_ten": of_ten}
                    file = f"{shown.replace(' ', '-')}-{split}"
                    files[f"{file}.run.gz"] = functools.partial(trec_run, run, "biphasic")
                    files[f"{file}.parquet"] = functools.partial(
                        parquet_bytes, query_columns(run, qrels, texts, by_query)
                    )
            for shown, by_split in metrics.items():
                file = f"{shown.replace(' ', '-')}-test.parquet"
                results += self.results(name, shown, by_split, folder.path, file)
        return results, files

    def _embed(
        self, model: TrainedModel, folder: TaskFolder, table: str, role: str, name: str
    ) -> tuple[list[str], Tensor]:
        """Return ids and embeddings of a retrieval dataset's queries or corpus."""
        columns, prompts = folder.read(table, table), self.config.prompts_of(name)

        # A share is of training alone: the paper's library scores with the model's own maximum.
        length = self.scored_tokenizer.max_length if isinstance(self.config.max_length, float) else self.max_length

        def make() -> Examples:
            return {"texts": self._tokenize(self.scored_tokenizer, titled_texts(columns), prompts[role], table, length)}

        changed = {**{f"{each}_prompt": text for each, text in prompts.items()}, "scored_length": length}
        texts = self.tokenize_once(folder, table, make, changed)["texts"]
        return columns["_id"], model.embed(texts, f"{name}: {table}")

    def _tokenize(
        self, tokenizer: TextTokenizer, texts: Sequence[str], prompt: str, title: str, length: int | None = None
    ) -> Ragged:
        prompted = [prompt + text for text in texts]
        title = f"reading {self.config.name}: {title}"
        return Ragged.of(tokenizer.tokenize(prompted, length or self.max_length, title))

    def _scored_sets(self) -> dict[str, TaskFolder]:
        sets = {name: TaskFolder(path, self.cache, self.family) for name, path in self.config.retrieval_sets.items()}
        for folder in sets.values():
            if not _judged_splits(folder):
                raise UserError(f"{folder.path}: has no judgments for validation or test (qrels), so nothing is scored")
        return sets


def titled_texts(columns: dict[str, list[Any]]) -> list[str]:
    """Return the texts of a corpus or of queries; a text with a title is `title. text`."""
    texts = columns["text"]
    titles = columns.get("title") or [None] * len(texts)
    return [". ".join(filter(None, pair)) for pair in zip(titles, texts, strict=True)]


def _judged_splits(folder: TaskFolder) -> list[str]:
    return [split for split in ("validation", "test") if f"qrels/{split}" in folder.record["rows"]]


def hash_text(text: str) -> int:
    """Return a 56-bit hash of a document, used to find equal documents."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=7).digest(), "big")
