"""Fine-tuning for retrieval: train query embeddings to be close to the embeddings of relevant documents.

The losses are contrastive, and distillation from a teacher's scores.
"""

import functools
import hashlib
import random
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

from biphasic.downstream.array_cache import Ragged
from biphasic.downstream.beir import grades_by_query
from biphasic.downstream.task_folder import TaskFolder
from biphasic.errors import UserError
from biphasic.evaluation import search
from biphasic.finetuning.task import Examples, FinetuneTask, Scored, TaskBatch, TrainedModel
from biphasic.model.pooling import mean_pool
from biphasic.model.segments import Segments
from biphasic.model.text_tokenizer import TextTokenizer
from biphasic.storage import parquet_bytes

_REPEATED = -1
"""The id of a document that only fills a batch. Hashes of texts are not negative."""


class Retrieval(FinetuneTask):
    """Trains mean-pooled embeddings of query-document pairs. There is no head."""

    family = "retrieval"

    def __init__(self, config: Any, text_tokenizer: TextTokenizer, cache: str, record: dict[str, Any] | None = None):
        super().__init__(config, text_tokenizer, cache, record)
        self.scored_tokenizer = text_tokenizer
        if isinstance(config.max_length, float):
            # A share is of training alone: the paper's library scores with the model's own maximum.
            self.scored_length = text_tokenizer.max_length
        self.prompts = {"query": config.query_prompt, "document": config.document_prompt}
        self._relevant: dict[int, list[int]] = {}
        """Hashes of the documents of each query among the training pairs, by the query's hash."""
        self.has_scores = "scores" in self.data.columns("train")
        if config.loss == "kl" and not self.has_scores:
            advice = "prepare the pairs with `scores_column` (docs/tasks.md)"
            raise UserError(f"task.loss: kl needs a teacher's scores, and {config.data} has none: {advice}")
        self._negatives = self.data.list_lengths("train", "negatives") if config.hard_negatives else []
        """Number of hard negatives of each training pair."""
        if missing := sum(not count for count in self._negatives):
            raise UserError(f"task.hard_negatives: {missing:,} of {len(self._negatives):,} pairs in {config.data} have none")

    def build_head(self, width: int) -> nn.Module:
        if self.config.dimensions and self.config.dimensions[0] > width:
            raise UserError(f"task.dimensions: {self.config.dimensions[0]} is more than the model's width of {width}")
        return nn.Identity()

    def check_data(self) -> list[str]:
        wanted, pairs = self.config.hard_negatives, len(self._negatives)
        few = sum(count < wanted for count in self._negatives)
        problem = f"{few:,} of {pairs:,} pairs in {self.config.data} have fewer than {wanted}, and are trained with those"
        return [f"task.hard_negatives: {problem}"] if few else []

    def tables(self) -> list[tuple[TaskFolder, str]]:
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
        `documents`; `scores`, if the pairs have them, those of the query's document and hard negatives.
        """

        def make() -> Examples:
            columns = self.data.read("train", "scored_pairs" if self.has_scores else "pairs")
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
                **({"scores": Ragged.of(columns["scores"], np.float32)} if self.has_scores else {}),
            }

        examples = self.tokenize_once(self.data, "train", make)
        queries = examples["query_ids"].flat.tolist()
        for query, document in dict.fromkeys(zip(queries, examples["ids"].flat.tolist(), strict=False)):
            self._relevant.setdefault(query, []).append(document)
        return examples

    def collate(self, examples: Examples, indices: Sequence[int], epoch: int, seed: int) -> TaskBatch:
        """Concatenate the queries, each query's document, then hard negatives, sampled anew in each epoch.

        A pair with too few negatives repeats them, because every rank needs the same number of documents. The losses leave
        out repeats, whose id is -1 and whose score is -inf.
        """
        documents, count, places, repeats = list(indices), self.config.hard_negatives, list[list[int]](), list[list[bool]]()
        for index in indices if count else ():
            negatives = examples["negatives"][index]
            generator = random.Random(f"hard negatives {seed} {epoch} {index}")
            sample = generator.sample(range(len(negatives)), min(count, len(negatives)))
            places.append([sample[at % len(sample)] for at in range(count)])
            repeats.append([at >= len(sample) for at in range(count)])
            documents += negatives[places[-1]].tolist()
        parts = examples["texts"].concatenate(indices), examples["documents"].concatenate(documents)
        ids = examples["ids"].flat[documents]
        ids[len(indices) + np.flatnonzero(repeats)] = _REPEATED
        batch: TaskBatch = {
            "tokens": torch.from_numpy(np.concatenate([tokens for tokens, _ in parts])).long(),
            "lengths": [length for _, lengths in parts for length in lengths],
            "ids": torch.from_numpy(ids),
            "queries": len(indices),
        }
        if self.config.mask_positives:
            rows = [self._relevant[query] for query in examples["query_ids"].flat[list(indices)].tolist()]
            longest = max(map(len, rows))  # shorter rows repeat their first value
            batch["relevant"] = torch.tensor([row + row[:1] * (longest - len(row)) for row in rows])
        if places and "scores" in examples:
            chosen = [[0, *(place + 1 for place in row)] for row in places]
            rows = [examples["scores"][index][row] for index, row in zip(indices, chosen, strict=True)]
            batch["scores"] = torch.from_numpy(np.stack(rows))
            batch["scores"][:, 1:][torch.tensor(repeats)] = float("-inf")
        return batch

    def outputs(self, hidden: Tensor, segments: Segments) -> Tensor:
        """Return embeddings, fp32 [texts, width]: those of a large batch fit in memory, its hidden states don't."""
        return mean_pool(hidden, segments)

    def loss(self, head: nn.Module, hidden: Tensor, segments: Segments, batch: TaskBatch) -> Tensor:
        """Return the loss of a rank's queries, from the embeddings that are `outputs`; a sum over `task.dimensions`."""
        count, temperature, losses = batch["queries"], self.config.temperature, []
        for dimension in self.config.dimensions or [None]:
            queries, documents = hidden[:count, :dimension], hidden[count:, :dimension]
            if self.config.loss == "kl":
                losses.append(kl_divergence(queries, documents, batch["scores"], temperature))
            else:
                losses.append(info_nce(queries, documents, batch["ids"], temperature, batch.get("relevant")))
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
                qrels = _read_qrels(folder, split)
                if missing := [query for query in qrels if query not in positions]:
                    problem = f"judges {len(missing)} queries that are missing, e.g. {missing[0]}"
                    raise UserError(f"{folder.path}/qrels/{split}: {problem}")
                judged = query_embeddings[[positions[query] for query in qrels]]
                for shown, dimension in self.config.scored_as(name).items():
                    truncated = judged[:, :dimension], document_embeddings[:, :dimension]
                    run = search.rank_documents(list(qrels), truncated[0], documents, truncated[1])
                    of_ten = search.ndcg_of_ten(run, qrels)
                    means = {**search.retrieval_scores(run, qrels), "ndcg_of_ten": fmean(of_ten.values())}
                    metrics[shown][split] = means
                    at_ten = search.scores_by_query(run, qrels, "ndcg_cut_10", 10)
                    by_query = {"ndcg_at_10": at_ten, "ndcg_of_ten": of_ten}
                    columns = search.query_columns(run, qrels, texts, by_query)
                    file = f"{shown.replace(' ', '-')}-{split}"
                    files[f"{file}.run.gz"] = functools.partial(search.trec_run, run)
                    files[f"{file}.parquet"] = functools.partial(parquet_bytes, columns)
            for shown, by_split in metrics.items():
                file = f"{shown.replace(' ', '-')}-test.parquet"
                results += self.results(name, shown, by_split, folder.path, file)
        return results, files

    def _embed(self, model: TrainedModel, folder: TaskFolder, table: str, role: str, name: str) -> tuple[list[str], Tensor]:
        """Return ids and embeddings of a retrieval dataset's queries or corpus."""
        columns = folder.read(table, table)
        length = self.scored_length

        def make() -> Examples:
            prompt = self.prompts[role]
            texts, lost = self._tokenize(self.scored_tokenizer, titled_texts(columns), prompt, table, length)
            return {"texts": texts, "lost": lost}

        texts = self.tokenize_once(folder, table, make, {"scored_length": length})["texts"]
        return columns["_id"], model.embed(texts, f"{name}: {table}")

    def _tokenize(
        self, tokenizer: TextTokenizer, texts: Sequence[str], prompt: str, title: str, length: int | None = None
    ) -> tuple[Ragged, Ragged]:
        """Return the token ids of texts after a prompt, cut at their ends, and `[tokens lost, 0]` of each text."""
        prompted, title = [prompt + text for text in texts], f"reading {self.config.name}: {title}"
        tokens = tokenizer.tokenize_and_count(prompted, length or self.max_length, title)
        pairs = [(np.array(ids, np.int32), cut) for ids, cut in tokens]
        return Ragged.of(ids for ids, _ in pairs), Ragged.of([cut, 0] for _, cut in pairs)

    def _scored_sets(self) -> dict[str, TaskFolder]:
        sets = {name: TaskFolder(path, self.cache, self.family) for name, path in self.config.retrieval_sets.items()}
        for folder in sets.values():
            for split in (splits := _judged_splits(folder)):
                _read_qrels(folder, split)
            if not splits:
                raise UserError(f"{folder.path}: has no judgments for validation or test (qrels), so nothing is scored")
        return sets


def titled_texts(columns: dict[str, list[Any]]) -> list[str]:
    """Return the texts of a corpus or of queries; a text with a title is `title. text`."""
    texts = columns["text"]
    titles = columns.get("title") or [None] * len(texts)
    return [". ".join(filter(None, pair)) for pair in zip(titles, texts, strict=True)]


def _read_qrels(folder: TaskFolder, split: str) -> search.Qrels:
    columns = folder.read(f"qrels/{split}", "qrels")
    return grades_by_query(zip(*columns.values(), strict=True), f"{folder.path}/qrels/{split}")


def _judged_splits(folder: TaskFolder) -> list[str]:
    return [split for split in ("validation", "test") if f"qrels/{split}" in folder.record["rows"]]


def hash_text(text: str) -> int:
    """Return a 56-bit hash of a document, used to find equal documents."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=7).digest(), "big")


def info_nce(queries: Tensor, documents: Tensor, ids: Tensor, temperature: float, relevant: Tensor | None = None) -> Tensor:
    """Return the cross-entropy of each query's own document among all documents of the global batch.

    This is the loss of the paper's evaluation library: cosine similarity, in-batch negatives, temperature 0.05. With
    several ranks, the documents of all ranks are negatives and receive gradients. The result is the mean over this
    rank's queries; its mean over ranks equals the loss of a single rank with all pairs.

    Args:
        queries: query embeddings [pairs, width].
        documents: embeddings [at least pairs, width] of the queries' documents in order, then of hard negatives.
        ids: int64 [documents]; a document with the id of a query's own is no negative for it, and one with -1 for no query.
        relevant: int64 [pairs, any], ids of documents that are not negatives for each query. None: its own document's.
    """
    queries, documents = F.normalize(queries.float(), dim=1), F.normalize(documents.float(), dim=1)
    offset, count = 0, len(queries)
    relevant = ids[:count, None] if relevant is None else relevant
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        from torch.distributed.nn.functional import all_gather

        offset = torch.distributed.get_rank() * len(documents)
        documents, ids = (torch.cat(list(all_gather(part))) for part in (documents, ids))  # pyright: ignore[reportArgumentType]
    targets = torch.arange(offset, offset + count, device=queries.device)
    masked = (relevant[:, :, None] == ids).any(1) | (ids == _REPEATED)
    masked[torch.arange(count, device=queries.device), targets] = False
    with torch.autocast(queries.device.type, enabled=False):  # it would multiply in bf16, in steps of 0.1 and more
        similarities = queries @ documents.T / temperature
    return F.cross_entropy(similarities.masked_fill(masked, float("-inf")), targets)


def kl_divergence(queries: Tensor, documents: Tensor, scores: Tensor, temperature: float) -> Tensor:
    """Return the mean Kullback-Leibler divergence of the teacher's distribution over a query's documents from the model's.

    That of sentence-transformers' DistillKLDivLoss with cosine similarity over the temperature in place of the dot
    product. Only a query's own documents are compared, so ranks need nothing of each other.

    `queries` are embeddings [pairs, width], `documents` [pairs * (1 + negatives), width] of the queries' documents in order,
    then of each query's hard negatives, and `scores` the teacher's [pairs, 1 + negatives], the positive's first. Documents
    whose score is -inf are in neither distribution.
    """
    count, width = queries.shape
    candidates = torch.cat([documents[:count, None], documents[count:].view(count, -1, width)], 1)
    similarities = F.cosine_similarity(queries[:, None].float(), candidates.float(), dim=2) / temperature
    left_out = scores == float("-inf")
    logarithms = similarities.masked_fill(left_out, float("-inf")).log_softmax(1).masked_fill(left_out, 0)  # 0 * -inf is NaN
    return F.kl_div(logarithms, scores.softmax(1), reduction="batchmean")
