"""Fine-tuning for retrieval: train query embeddings to be close to the embeddings of relevant documents."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

from biphasic.downstream.array_cache import Ragged
from biphasic.downstream.task_folder import TaskFolder
from biphasic.errors import UserError
from biphasic.evaluation.search import Qrels, ndcg_of_ten, rank_documents, retrieval_scores, trec_run
from biphasic.finetuning.task import Examples, FinetuneTask, Scored, TaskBatch, TrainedModel
from biphasic.model.encoder import TextTokenizer
from biphasic.model.pooling import mean_pool
from biphasic.model.segments import Segments


class Retrieval(FinetuneTask):
    """Trains with InfoNCE on mean-pooled embeddings of query-document pairs. There is no head."""

    family = "retrieval"
    splits_batches = False  # in-batch negatives need all of its examples

    def __init__(self, config: Any, text_tokenizer: TextTokenizer, cache: str, record: dict[str, Any] | None = None):
        super().__init__(config, text_tokenizer, cache, record)
        self.scored_tokenizer = text_tokenizer
        self.prompts = {"query": config.query_prompt, "document": config.document_prompt}

    def build_head(self, width: int) -> nn.Module:
        """Return a module without weights, because only the encoder is trained."""
        return nn.Identity()

    def tables(self) -> list[tuple[TaskFolder, str]]:
        """Return the table of training pairs and all tables of the scored sets."""
        scored = [
            (folder, table)
            for folder in self._scored_sets().values()
            for table in ("corpus", "queries", *(f"qrels/{split}" for split in _judged_splits(folder)))
        ]
        return [(self.data, "train"), *scored]

    def training_examples(self) -> Examples:
        """Return the training pairs.

        `texts` has the queries; `documents` their documents, then all hard negatives; `ids` has one row, the documents'
        hashes; `negatives` the indices of each query's hard negatives in `documents`.
        """

        def make() -> Examples:
            columns = self.data.read("train", "pairs")
            negatives = [list(texts or []) for texts in columns["negatives"]]
            documents = [*columns["positive"], *(text for texts in negatives for text in texts)]
            indices = iter(range(len(negatives), len(documents)))
            return {
                "texts": self._tokenize(self.text_tokenizer, columns["query"], "query"),
                "documents": self._tokenize(self.text_tokenizer, documents, "document"),
                "ids": Ragged.of([[hash_text(text) for text in documents]], np.int64),
                "negatives": Ragged.of([[next(indices) for _ in texts] for texts in negatives]),
            }

        examples = self.tokenize_once(self.data, "train", make)
        pairs, missing = len(examples["texts"]), int((examples["negatives"].lengths == 0).sum())
        if self.config.hard_negatives and missing:
            raise UserError(f"task.hard_negatives: {missing:,} of {pairs:,} pairs in {self.config.data} have none")
        return examples

    def collate(self, examples: Examples, indices: Sequence[int], epoch: int, seed: int) -> TaskBatch:
        """Concatenate the queries, each query's document, then hard negatives, sampled anew in each epoch."""
        documents, count = list(indices), self.config.hard_negatives
        for index in indices if count else ():
            negatives = examples["negatives"][index].tolist()
            generator = random.Random(f"hard negatives {seed} {epoch} {index}")
            sample = generator.sample(negatives, min(count, len(negatives)))
            # A pair with too few negatives repeats them, because every rank needs the same number of documents.
            documents += [sample[at % len(sample)] for at in range(count)]
        parts = examples["texts"].concatenate(indices), examples["documents"].concatenate(documents)
        return {
            "tokens": torch.from_numpy(np.concatenate([tokens for tokens, _ in parts])).long(),
            "lengths": [length for _, lengths in parts for length in lengths],
            "ids": torch.from_numpy(examples["ids"].flat[documents]),
            "queries": len(indices),
        }

    def loss(self, head: nn.Module, hidden: Tensor, segments: Segments, batch: TaskBatch) -> Tensor:
        """Return InfoNCE, summed over the queries."""
        embeddings = mean_pool(hidden, segments)
        queries, documents = embeddings[: batch["queries"]], embeddings[batch["queries"] :]
        return info_nce(queries, documents, batch["ids"], self.config.temperature) * len(queries)

    def evaluate(self, model: TrainedModel) -> Scored:
        """Return the scores, and a ranking for each set and split, `SET-SPLIT.run.gz`."""
        results, files = [], {}
        for name, folder in self._scored_sets().items():
            queries, query_embeddings = self._embed(model, folder, "queries", "query", name)
            documents, document_embeddings = self._embed(model, folder, "corpus", "document", name)
            positions, metrics = {query: at for at, query in enumerate(queries)}, {}
            for split in _judged_splits(folder):
                qrels: Qrels = {}
                for query, document, grade in zip(*folder.read(f"qrels/{split}", "qrels").values(), strict=True):
                    qrels.setdefault(query, {})[document] = grade
                if missing := [query for query in qrels if query not in positions]:
                    problem = f"judges {len(missing)} queries that are missing, e.g. {missing[0]}"
                    raise UserError(f"{folder.path}/qrels/{split}: {problem}")
                judged = query_embeddings[[positions[query] for query in qrels]]
                run = rank_documents(list(qrels), judged, documents, document_embeddings)
                metrics[split] = {**retrieval_scores(run, qrels), "ndcg_of_ten": ndcg_of_ten(run, qrels)}
                files[f"{name}-{split}.run.gz"] = functools.partial(trec_run, run, "biphasic")
            results += self.results(name, name, metrics)
        return results, files

    def _embed(
        self, model: TrainedModel, folder: TaskFolder, table: str, role: str, name: str
    ) -> tuple[list[str], Tensor]:
        """Return ids and embeddings of a retrieval dataset's queries or corpus."""
        columns = folder.read(table, table)

        def make() -> Examples:
            return {"texts": self._tokenize(self.scored_tokenizer, titled_texts(columns), role)}

        texts = self.tokenize_once(folder, table, make)["texts"]
        return columns["_id"], model.embed(texts, f"{name}: {table}")

    def _tokenize(self, tokenizer: TextTokenizer, texts: Sequence[str], role: str) -> Ragged:
        prompted = [self.prompts[role] + text for text in texts]
        title = f"reading {self.config.name}: {role} texts"
        return Ragged.of(tokenizer.tokenize(prompted, self.max_length, title))

    def _scored_sets(self) -> dict[str, TaskFolder]:
        return {name: TaskFolder(path, self.cache, self.family) for name, path in self.config.retrieval_sets.items()}


def titled_texts(columns: dict[str, list[Any]]) -> list[str]:
    """Return the texts of a corpus or of queries; a text with a title is `title. text`."""
    texts = columns["text"]
    titles = columns.get("title") or [None] * len(texts)
    return [". ".join(filter(None, pair)) for pair in zip(titles, texts, strict=True)]


def _judged_splits(folder: TaskFolder) -> list[str]:
    return [split for split in ("validation", "test") if f"qrels/{split}" in folder.record["rows"]]


def info_nce(queries: Tensor, documents: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Return the cross-entropy of each query's own document among all documents of the global batch.

    This is the loss of the paper's evaluation library: cosine similarity, in-batch negatives, temperature 0.05. With
    several ranks, the documents of all ranks are negatives and receive gradients. The result is the mean over this
    rank's queries; its mean over ranks equals the loss of a single rank with all pairs.

    Args:
        queries: query embeddings [pairs, width].
        documents: embeddings [at least pairs, width] of the queries' documents in order, then of hard negatives.
        ids: int64 [documents]; a document with the same id as a query's own document is not a negative for it.
    """
    queries, documents = F.normalize(queries.float(), dim=1), F.normalize(documents.float(), dim=1)
    offset, count, own = 0, len(queries), ids[: len(queries)]
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        from torch.distributed.nn.functional import all_gather

        offset = torch.distributed.get_rank() * len(documents)
        documents = torch.cat(list(all_gather(documents)))  # pyright: ignore[reportArgumentType]
        gathered = [torch.empty_like(ids) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(gathered, ids)
        ids = torch.cat(gathered)
    targets = torch.arange(offset, offset + count, device=queries.device)
    duplicate = own[:, None] == ids[None, :]
    duplicate[torch.arange(count, device=queries.device), targets] = False
    return F.cross_entropy((queries @ documents.T / temperature).masked_fill(duplicate, float("-inf")), targets)


def hash_text(text: str) -> int:
    """Return a 56-bit hash of a document, used to find equal documents."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=7).digest(), "big")
