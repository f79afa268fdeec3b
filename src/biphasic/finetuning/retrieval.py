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
from biphasic.finetuning.truncation import CutTexts, tokenize_cut
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

        `texts` has the queries; `documents` their documents, then all hard negatives; `ids` and `query_ids` have one row,
        the hashes of the documents and of the queries; `negatives` the indices of each query's hard negatives in
        `documents`; `scores`, where the loss needs them, those of the query's document and hard negatives.
        """

        def make() -> Examples:
            scored = "scores" in self.data.columns("train")
            columns = self.data.read("train", "scored_pairs" if scored else "pairs")
            negatives = [list(texts or []) for texts in columns["negatives"]]
            documents = [*columns["positive"], *(text for texts in negatives for text in texts)]
            indices = iter(range(len(negatives), len(documents)))
            tokenize = functools.partial(self._tokenize, self.text_tokenizer)
            query_tokens, of_queries = tokenize(columns["query"], self.prompts["query"], "queries")
            document_tokens, of_documents = tokenize(documents, self.prompts["document"], "documents")
            return {
                "texts": query_tokens,
                "documents": document_tokens,
                "lost": Ragged.of([*of_queries, *of_documents]),
                "ids": Ragged.of([[hash_text(text) for text in documents]], np.int64),
                "query_ids": Ragged.of([[hash_text(text) for text in columns["query"]]], np.int64),
                "negatives": Ragged.of([[next(indices) for _ in texts] for texts in negatives]),
                **({"scores": Ragged.of(columns["scores"], np.float32)} if scored else {}),
            }

        self.count_examples(0)
        examples = self.tokenize_once(self.data, "train", make)
        if self.config.mask_positives:
            self._relevance = _Relevance(examples)
        queries = examples["query_ids"].flat
        pairs = np.unique(np.stack([queries, examples["ids"].flat[: len(queries)]], 1), axis=0)
        _, positives = np.unique(pairs[:, 0], return_counts=True)
        several = int((positives > 1).sum())
        if several and LOSSES[self.config.loss][1] == "ids":
            them = "no negatives" if self.config.mask_positives else "negatives"
            self.notes.append(
                f"{several:,} of {len(positives):,} queries have several positives, which are {them} of the "
                f"same query in a batch (task.mask_positives: {str(self.config.mask_positives).lower()})"
            )
        return examples

    def count_examples(self, enough: int) -> int:
        """Return the number of pairs; a UserError if hard negatives are to be used and a pair has none."""
        if self.config.hard_negatives:
            counts = self.data.list_lengths("train", "negatives")
            if missing := sum(not count for count in counts):
                problem = f"{missing:,} of {len(counts):,} pairs in {self.config.data} have none"
                raise UserError(f"task.hard_negatives: {problem}")
        return self.data.size("train")[0]

    def first_cuts(self, rows: int) -> dict[str, CutTexts]:
        """Return what is cut of the queries and documents of the first training pairs."""
        columns = self.data.read("train", "pairs", rows)
        lost = [
            self._tokenize(self.text_tokenizer, columns[column], self.prompts[role], "")[1]
            for column, role in (("query", "query"), ("positive", "document"))
        ]
        return {"train": CutTexts.of({"lost": Ragged.of([*lost[0], *lost[1]])}, self.max_length)}

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
        if self.config.mask_positives:
            batch |= self._relevance.of_pairs(examples, indices)
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
        masks = {name: batch[name] for name in ("relevant", "query_ids", "relevant_queries") if name in batch}
        if self.config.loss == "info_nce":
            masks = {"relevant": masks["relevant"]} if masks else {}
        losses = [
            loss(hidden[:count, :dimension], hidden[count:, :dimension], batch[compared], temperature, **masks)
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
            texts, lost = self._tokenize(self.scored_tokenizer, titled_texts(columns), prompts[role], table, length)
            return {"texts": texts, "lost": lost}

        changed = {**{f"{each}_prompt": text for each, text in prompts.items()}, "scored_length": length}
        texts = self.tokenize_once(folder, table, make, changed)["texts"]
        return columns["_id"], model.embed(texts, f"{name}: {table}")

    def _tokenize(
        self, tokenizer: TextTokenizer, texts: Sequence[str], prompt: str, title: str, length: int | None = None
    ) -> tuple[Ragged, Ragged]:
        prompted = [prompt + text for text in texts]
        title = title and f"reading {self.config.name}: {title}"
        return tokenize_cut(tokenizer, prompted, length or self.max_length, title)

    def _scored_sets(self) -> dict[str, TaskFolder]:
        sets = {name: TaskFolder(path, self.cache, self.family) for name, path in self.config.retrieval_sets.items()}
        for folder in sets.values():
            if not _judged_splits(folder):
                raise UserError(f"{folder.path}: has no judgments for validation or test (qrels), so nothing is scored")
        return sets


class _Relevance:
    """The relevant documents of each query among the training pairs, and the queries of each document, by their hashes."""

    def __init__(self, examples: Examples):
        self.documents: dict[int, list[int]] = {}
        self.queries: dict[int, list[int]] = {}
        queries = examples["query_ids"].flat.tolist()
        documents = examples["ids"].flat[: len(queries)].tolist()
        for query, document in dict.fromkeys(zip(queries, documents, strict=True)):
            self.documents.setdefault(query, []).append(document)
            self.queries.setdefault(document, []).append(query)

    def of_pairs(self, examples: Examples, indices: Sequence[int]) -> TaskBatch:
        """Return the masks of `symmetric_info_nce` for the chosen pairs."""
        queries = examples["query_ids"].flat[list(indices)]
        documents = examples["ids"].flat[list(indices)]
        return {
            "relevant": _padded([self.documents[query] for query in queries.tolist()]),
            "query_ids": torch.from_numpy(queries),
            "relevant_queries": _padded([self.queries[document] for document in documents.tolist()]),
        }


def _padded(rows: list[list[int]]) -> Tensor:
    """Return rows as a matrix, int64 [rows, longest], in which shorter ones repeat their first value."""
    longest = max(map(len, rows))
    return torch.tensor([row + row[:1] * (longest - len(row)) for row in rows])


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
