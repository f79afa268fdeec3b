"""Retrieval: a query should lie nearer to the document that answers it than to the batch's others."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

from biphasic.config.errors import UserError
from biphasic.data.array_cache import Arrays, Ragged, unpack
from biphasic.data.task_folder import TaskFolder
from biphasic.evaluation.search import retrieval_scores
from biphasic.finetuning.task import Batch, Examples, Score, Task, Trained, flat
from biphasic.model.encoder import Encoder
from biphasic.model.packed import mean_pool
from biphasic.model.segments import Segments

_SAME = float("-inf")
_METRIC = "ndcg_at_10"


class Retrieval(Task):
    """Pairs of a query and its document, mean pooling, InfoNCE; it has no head of its own."""

    family = "retrieval"
    metric = _METRIC

    @property
    def prompts(self) -> dict[str, str]:
        """See `Task`."""
        return {"query": self.config.query_prompt, "document": self.config.document_prompt}

    def head(self, width: int) -> nn.Module:
        """Nothing but the encoder is trained."""
        return nn.Identity()

    def tables(self) -> list[tuple[TaskFolder, str]]:
        """See `Task`."""
        scored = [
            (folder, table)
            for folder in self._scored().values()
            for table in ("corpus", "queries", *(f"qrels/{split}" for split in _splits(folder)))
        ]
        return [(self.data, "train"), *scored]

    def training(self) -> Examples:
        """See `Task`. `texts` are the queries; of each pair, which documents are its own, and its hard negatives."""

        def make() -> dict[str, Ragged]:
            columns = self.data.read("train", "pairs")
            negatives = [list(one or []) for one in columns["negatives"]]
            documents = [*columns["positive"], *(text for one in negatives for text in one)]
            return {
                "texts": Ragged.of(self._read(columns["query"], "query")),
                "documents": Ragged.of(self._read(documents, "document")),
                "ids": Ragged.of([[_number(text) for text in documents]], np.int64),
                "negatives": Ragged.of([[1] * len(one) for one in negatives]),
            }

        arrays = self.tokenized("pairs", "train", make, prompts=self.prompts)
        examples = Examples(unpack(arrays, "texts"), dict(arrays))
        ends = examples.arrays["negatives.ends"]
        lacking = int((np.diff(ends) == 0).sum())
        if self.config.hard_negatives and lacking:
            raise UserError(
                f"task.hard_negatives: {lacking:,} of {len(examples):,} pairs in {self.config.data} have none"
            )
        return examples

    def split(self, rows: Sequence[int], examples: Examples, tokens: int) -> Iterator[Sequence[int]]:
        """In-batch negatives need the batch whole."""
        yield rows

    def collate(self, examples: Examples, rows: Sequence[int], epoch: int, seed: int) -> Batch:
        """See `Task`: queries, then documents (each query's own, then the hard negatives), as one flat run."""
        documents, ids = unpack(examples.arrays, "documents"), examples.arrays["ids.flat"]
        chosen = [*rows, *self._hard(examples.arrays, rows, epoch, seed)]
        parts = flat(examples.texts, rows), flat(documents, chosen)
        return {
            "tokens": torch.cat([tokens for tokens, _ in parts]),
            "lengths": [length for _, lengths in parts for length in lengths],
            "ids": torch.from_numpy(ids[chosen]),
            "queries": len(rows),
        }

    def _hard(self, arrays: Arrays, rows: Sequence[int], epoch: int, seed: int) -> list[int]:
        """Hard negatives of these pairs, by their number among the documents."""
        wanted, ends = self.config.hard_negatives, arrays["negatives.ends"]
        found: list[int] = []
        for row in rows if wanted else []:
            there = range(int(ends[row]), int(ends[row + 1]))
            generator = random.Random(f"hard negatives {seed} {epoch} {row}")
            some = generator.sample(there, min(wanted, len(there)))
            # A pair with few of them has some twice: ranks need as many documents as each other.
            found += [len(ends) - 1 + some[at % len(some)] for at in range(wanted)]
        return found

    def targets(self, examples: Examples, rows: Sequence[int]) -> int:
        """See `Task`."""
        return len(rows)

    def loss(self, encoder: Encoder, head: nn.Module, batch: Batch) -> Tensor:
        """See `Task`."""
        segments = Segments.of(batch["lengths"], batch["tokens"].device)
        embeddings = mean_pool(encoder.hidden(batch["tokens"], segments), segments)
        count = batch["queries"]
        mean = info_nce(
            embeddings[:count],
            embeddings[count:],
            batch["ids"],
            self.config.temperature,
            gather=self.config.gather_negatives,
        )
        return mean * count

    def scores(self, model: Trained) -> list[Score]:
        """See `Task`."""
        found = []
        for name, folder in self._scored().items():
            by_split = self._score(name, folder, model)
            validation, test = by_split.get("validation"), by_split.get("test")
            found.append(
                Score(
                    name,
                    _METRIC,
                    None if validation is None else validation[_METRIC],
                    None if test is None else test[_METRIC],
                    by_split,
                )
            )
        return found

    def _score(self, name: str, folder: TaskFolder, model: Trained) -> dict[str, dict[str, float]]:
        from biphasic.finetuning.predicting import embed

        ids, embeddings = {}, {}
        for table, role in (("queries", "query"), ("corpus", "document")):
            ids[table], texts = self._texts(folder, table, role)
            embeddings[table] = embed(model, texts, f"{name}: {table}")
        places = {query: at for at, query in enumerate(ids["queries"])}
        found = {}
        for split in _splits(folder):
            qrels: dict[str, dict[str, int]] = {}
            columns = folder.read(f"qrels/{split}", "qrels")
            for query, document, grade in zip(*columns.values(), strict=True):
                qrels.setdefault(query, {})[document] = grade
            if lost := [query for query in qrels if query not in places]:
                raise UserError(
                    f"{folder.place}/qrels/{split}: judges {len(lost)} queries that aren't there: {lost[0]}"
                )
            asked = embeddings["queries"][[places[query] for query in qrels]]
            found[split] = retrieval_scores(list(qrels), asked, ids["corpus"], embeddings["corpus"], qrels)
        return found

    def _texts(self, folder: TaskFolder, table: str, role: str) -> tuple[list[str], Ragged]:
        """Ids and tokens of a retrieval set's queries or corpus."""
        ids = folder.read(table, table)["_id"]

        def make() -> dict[str, Ragged]:
            columns = folder.read(table, table)
            titles = columns.get("title") or [""] * len(ids)
            texts = [". ".join(filter(None, pair)) for pair in zip(titles, columns["text"], strict=True)]
            return {"texts": Ragged.of(self._read(texts, role))}

        arrays = self.tokenized(f"{role} texts", table, make, folder=folder, prompts=self.prompts)
        return ids, unpack(arrays, "texts")

    def _read(self, texts: Sequence[str], role: str) -> Iterator[list[int]]:
        prompted = [self.prompts[role] + text for text in texts]
        return self.reader.read(prompted, self.longest, f"reading {self.config.name}: {role} texts")

    def _scored(self) -> dict[str, TaskFolder]:
        return {name: TaskFolder(place, self.cache, self.family) for name, place in self.config.scored_on.items()}


def _splits(folder: TaskFolder) -> list[str]:
    """Which qrels there are."""
    return [split for split in ("validation", "test") if f"qrels/{split}" in folder.record["rows"]]


def info_nce(queries: Tensor, documents: Tensor, ids: Tensor, temperature: float, *, gather: bool) -> Tensor:
    """Cross-entropy of each query's own document among all documents of the batch, by cosine similarity.

    The paper's fine-tuning (its evaluation library): in-batch negatives, temperature 0.05.

    Args:
        queries: [pairs, width].
        documents: [at least pairs, width]; the first ones are the queries' answers, in order, the others hard negatives.
        ids: int64 [documents]; a document equal to the query's own is no negative of it.
        temperature: divides the similarities.
        gather: take the other ranks' documents as negatives too, with gradients.

    Returns:
        Scalar, the mean over the rank's queries; averaged over ranks it is the loss of one rank that holds all pairs.
    """
    queries, documents = F.normalize(queries.float(), dim=1), F.normalize(documents.float(), dim=1)
    offset, count, own = 0, len(queries), ids[: len(queries)]
    if gather and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        from torch.distributed.nn.functional import all_gather

        offset = torch.distributed.get_rank() * len(documents)
        documents = torch.cat(list(all_gather(documents)))  # pyright: ignore[reportArgumentType]
        gathered = [torch.empty_like(ids) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(gathered, ids)
        ids = torch.cat(gathered)
    targets = torch.arange(offset, offset + count, device=queries.device)
    same = own[:, None] == ids[None, :]
    same[torch.arange(count, device=queries.device), targets] = False
    return F.cross_entropy((queries @ documents.T / temperature).masked_fill(same, _SAME), targets)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=7).digest(), "big")
