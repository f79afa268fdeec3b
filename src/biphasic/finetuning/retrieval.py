"""Fine-tuning for retrieval: train query embeddings to be close to the embeddings of relevant documents."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

from biphasic.downstream.array_cache import Arrays, Ragged, unpack
from biphasic.downstream.task_folder import TaskFolder
from biphasic.errors import UserError
from biphasic.evaluation.search import Qrels, Run, rank_documents, retrieval_scores, trec_run
from biphasic.finetuning.examples import TaskBatch, TokenizedExamples, concatenate
from biphasic.finetuning.inference import TrainedModel
from biphasic.finetuning.task import Evaluation, FinetuneTask
from biphasic.model.encoder import TextTokenizer
from biphasic.model.pooling import mean_pool
from biphasic.model.segments import Segments


class Retrieval(FinetuneTask):
    """Trains with InfoNCE on mean-pooled embeddings of query-document pairs. There is no head."""

    family = "retrieval"
    metric = "ndcg_at_10"
    splits_batches = False  # in-batch negatives need all of its examples

    def __init__(self, config: Any, text_tokenizer: TextTokenizer, cache: str):
        super().__init__(config, text_tokenizer, cache)
        self.prompts = {"query": config.query_prompt, "document": config.document_prompt}

    def build_head(self, width: int) -> nn.Module:
        """Return a module without weights, because only the encoder is trained."""
        return nn.Identity()

    def tables(self) -> list[tuple[TaskFolder, str]]:
        """See `FinetuneTask`."""
        scored = [
            (folder, table)
            for folder in self._scored_sets().values()
            for table in ("corpus", "queries", *(f"qrels/{split}" for split in _judged_splits(folder)))
        ]
        return [(self.data, "train"), *scored]

    def training_examples(self) -> TokenizedExamples:
        """See `FinetuneTask`. `texts` holds the queries; `documents` holds their documents, then all hard negatives.

        `ids` are hashes of the documents; `negatives` has a row for each pair, whose length is its number of hard negatives.
        """

        def make() -> dict[str, Ragged]:
            columns = self.data.read("train", "pairs")
            negatives = [list(texts or []) for texts in columns["negatives"]]
            documents = [*columns["positive"], *(text for texts in negatives for text in texts)]
            return {
                "texts": Ragged.of(self._tokenize(columns["query"], "query")),
                "documents": Ragged.of(self._tokenize(documents, "document")),
                "ids": Ragged.of([[hash_text(text) for text in documents]], np.int64),
                "negatives": Ragged.of([[1] * len(texts) for texts in negatives]),
            }

        arrays = self.tokenize_once("pairs", "train", make, prompts=self.prompts)
        examples = TokenizedExamples(unpack(arrays, "texts"), dict(arrays))
        missing = int((np.diff(examples.arrays["negatives.ends"]) == 0).sum())
        if self.config.hard_negatives and missing:
            raise UserError(
                f"task.hard_negatives: {missing:,} of {len(examples):,} pairs in {self.config.data} have none"
            )
        return examples

    def collate(self, examples: TokenizedExamples, indices: Sequence[int], epoch: int, seed: int) -> TaskBatch:
        """See `FinetuneTask`. Concatenates the queries, each query's document, then the hard negatives."""
        documents, ids = unpack(examples.arrays, "documents"), examples.arrays["ids.flat"]
        chosen = [*indices, *self._hard_negatives(examples.arrays, indices, epoch, seed)]
        parts = concatenate(examples.texts, indices), concatenate(documents, chosen)
        return {
            "tokens": torch.cat([tokens for tokens, _ in parts]),
            "lengths": [length for _, lengths in parts for length in lengths],
            "ids": torch.from_numpy(ids[chosen]),
            "queries": len(indices),
        }

    def _hard_negatives(self, arrays: Arrays, indices: Sequence[int], epoch: int, seed: int) -> list[int]:
        """Sample hard negatives for the given pairs; return document indices."""
        count, ends = self.config.hard_negatives, arrays["negatives.ends"]
        chosen: list[int] = []
        for index in indices if count else []:
            negatives = range(int(ends[index]), int(ends[index + 1]))
            generator = random.Random(f"hard negatives {seed} {epoch} {index}")
            sample = generator.sample(negatives, min(count, len(negatives)))
            # A pair with too few negatives repeats them, because every rank needs the same number of documents.
            chosen += [len(ends) - 1 + sample[at % len(sample)] for at in range(count)]
        return chosen

    def loss(self, head: nn.Module, hidden: Tensor, segments: Segments, batch: TaskBatch) -> Tensor:
        """See `FinetuneTask`."""
        embeddings = mean_pool(hidden, segments)
        queries, documents = embeddings[: batch["queries"]], embeddings[batch["queries"] :]
        return info_nce(queries, documents, batch["ids"], self.config.temperature) * len(queries)

    def evaluate(self, model: TrainedModel) -> Evaluation:
        """See `FinetuneTask`. Keeps the ranking of each set's split, `SET-SPLIT.run.gz`."""
        results, files = [], {}
        for name, folder in self._scored_sets().items():
            metrics = {}
            for split, (run, qrels) in self._rank(name, folder, model).items():
                metrics[split] = retrieval_scores(run, qrels)
                files[f"{name}-{split}.run.gz"] = functools.partial(trec_run, run, "biphasic")
            results.append(self.result(name, name, metrics))
        return Evaluation(results, files)

    def _rank(self, name: str, folder: TaskFolder, model: TrainedModel) -> dict[str, tuple[Run, Qrels]]:
        """Return the ranking of a retrieval dataset's documents and the judgments, by split."""
        ids, embeddings = {}, {}
        for table, role in (("queries", "query"), ("corpus", "document")):
            ids[table], texts = self._texts(folder, table, role)
            embeddings[table] = model.embed(texts, f"{name}: {table}")
        positions = {query: at for at, query in enumerate(ids["queries"])}
        ranked = {}
        for split in _judged_splits(folder):
            qrels: Qrels = {}
            columns = folder.read(f"qrels/{split}", "qrels")
            for query, document, grade in zip(*columns.values(), strict=True):
                qrels.setdefault(query, {})[document] = grade
            if missing := [query for query in qrels if query not in positions]:
                raise UserError(
                    f"{folder.path}/qrels/{split}: judges {len(missing)} queries that are missing, e.g. {missing[0]}"
                )
            queries = embeddings["queries"][[positions[query] for query in qrels]]
            ranked[split] = rank_documents(list(qrels), queries, ids["corpus"], embeddings["corpus"]), qrels
        return ranked

    def _texts(self, folder: TaskFolder, table: str, role: str) -> tuple[list[str], Ragged]:
        """Return ids and token ids of a retrieval dataset's queries or corpus."""
        ids = folder.read(table, table)["_id"]

        def make() -> dict[str, Ragged]:
            columns = folder.read(table, table)
            return {"texts": Ragged.of(self._tokenize(titled_texts(columns), role))}

        arrays = self.tokenize_once(f"{role} texts", table, make, folder=folder, prompts=self.prompts)
        return ids, unpack(arrays, "texts")

    def _tokenize(self, texts: Sequence[str], role: str) -> Iterator[list[int]]:
        prompted = [self.prompts[role] + text for text in texts]
        return self.text_tokenizer.tokenize(prompted, self.max_length, f"reading {self.config.name}: {role} texts")

    def _scored_sets(self) -> dict[str, TaskFolder]:
        return {name: TaskFolder(place, self.cache, self.family) for name, place in self.config.retrieval_sets.items()}


def titled_texts(columns: dict[str, list[Any]]) -> list[str]:
    """Return the texts of a corpus or of queries; a text with a title is `title. text`."""
    texts = columns["text"]
    titles = columns.get("title") or [None] * len(texts)
    return [". ".join(filter(None, pair)) for pair in zip(titles, texts, strict=True)]


def _judged_splits(folder: TaskFolder) -> list[str]:
    return [split for split in ("validation", "test") if f"qrels/{split}" in folder.record["rows"]]


def info_nce(queries: Tensor, documents: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """Return the cross-entropy of each query's own document among all documents of the global batch.

    This is the loss of the paper's evaluation library: cosine similarity, in-batch negatives, temperature 0.05. With several
    ranks, the documents of all ranks are negatives and receive gradients.

    Args:
        queries: query embeddings [pairs, width].
        documents: embeddings [at least pairs, width] of the queries' documents in the same order, then of hard negatives.
        ids: int64 [documents]; a document with the same id as a query's own document is not a negative for it.
        temperature: the similarities are divided by it.

    Returns:
        Scalar, the mean over this rank's queries. Its mean over ranks equals the loss of a single rank with all pairs.
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
