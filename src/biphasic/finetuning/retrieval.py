"""Retrieval: a query should lie nearer to the document that answers it than to the batch's others."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

from biphasic.config.errors import UserError
from biphasic.config.finetune import RetrievalTask
from biphasic.model.encoder import Encoder
from biphasic.model.packed import encode, mean_pool
from biphasic.model.segments import Segments

_SAME = float("-inf")


@dataclass(frozen=True)
class Pair:
    """A tokenized query, its document, and a number that is the same for equal documents."""

    query: list[int]
    document: list[int]
    document_id: int


class Retrieval:
    """The task: what an example is, how examples become a batch, and the loss. It has no head of its own.

    Args:
        config: the YAML's `task:` section.
    """

    def __init__(self, config: RetrievalTask):
        self.config = config

    @property
    def prompts(self) -> dict[str, str]:
        """What goes before texts, for those who use the fine-tuned encoder."""
        return {"query": self.config.query_prompt, "document": self.config.document_prompt}

    def head(self, width: int) -> nn.Module:
        """Nothing but the encoder is trained."""
        return nn.Identity()

    def examples(self, encoder: Encoder) -> list[Pair]:
        """Read and tokenize the pairs.

        Raises:
            UserError: a file or a column is missing, or there are no pairs.
        """
        names = [self.config.query_column, self.config.document_column]
        columns = read_columns(self.config.train, names)
        queries, documents = (columns[name] for name in names)
        encoder = Encoder(encoder.backbone, encoder.tokenizer, min(self.config.max_length, encoder.max_length))
        return [
            Pair(query, document, _number(text))
            for query, document, text in zip(
                encoder.tokenize(queries, self.config.query_prompt),
                encoder.tokenize(documents, self.config.document_prompt),
                documents,
                strict=True,
            )
        ]

    def collate(self, pairs: Sequence[Pair]) -> dict[str, Any]:
        """A batch: the queries' tokens, then the documents', as one flat run; `lengths` on the host."""
        texts = [pair.query for pair in pairs] + [pair.document for pair in pairs]
        return {
            "tokens": torch.tensor([token for text in texts for token in text], dtype=torch.int64),
            "lengths": [len(text) for text in texts],
            "document_ids": torch.tensor([pair.document_id for pair in pairs], dtype=torch.int64),
        }

    def loss(self, backbone: nn.Module, head: nn.Module, batch: dict[str, Any]) -> Tensor:
        """The mean InfoNCE loss of the rank's queries."""
        segments = Segments.of(batch["lengths"], batch["tokens"].device)
        embeddings = mean_pool(encode(backbone, batch["tokens"], segments, causal=False), segments)
        queries, documents = embeddings.chunk(2)
        return info_nce(
            queries, documents, batch["document_ids"], self.config.temperature, gather=self.config.gather_negatives
        )


def info_nce(queries: Tensor, documents: Tensor, ids: Tensor, temperature: float, *, gather: bool) -> Tensor:
    """Cross-entropy of each query's own document among all documents of the batch, by cosine similarity.

    The paper's fine-tuning (its evaluation library): in-batch negatives, temperature 0.05.

    Args:
        queries: [pairs, width].
        documents: [pairs, width]; each is its query's answer.
        ids: int64 [pairs]; a document equal to the query's own is no negative of it.
        temperature: divides the similarities.
        gather: take the other ranks' documents as negatives too, with gradients.

    Returns:
        Scalar, the mean over the rank's queries; averaged over ranks it is the loss of one rank that holds all pairs.
    """
    queries, documents = F.normalize(queries.float(), dim=1), F.normalize(documents.float(), dim=1)
    offset, count = 0, len(queries)
    all_ids = ids
    if gather and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        from torch.distributed.nn.functional import all_gather

        offset = torch.distributed.get_rank() * count
        documents = torch.cat(list(all_gather(documents)))  # pyright: ignore[reportArgumentType]
        gathered = [torch.empty_like(ids) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(gathered, ids)
        all_ids = torch.cat(gathered)
    targets = torch.arange(offset, offset + count, device=queries.device)
    same = ids[:, None] == all_ids[None, :]
    same[torch.arange(count, device=queries.device), targets] = False
    return F.cross_entropy((queries @ documents.T / temperature).masked_fill(same, _SAME), targets)


def read_columns(files: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    """Columns of text from Parquet or JSONL files, one after another.

    Raises:
        UserError: a file is missing or damaged, lacks a column, or there are no rows at all.
    """
    import pyarrow as pa
    import pyarrow.json
    import pyarrow.parquet

    found: dict[str, list[str]] = {name: [] for name in names}
    for file in files:
        try:
            read = pyarrow.parquet.read_table if file.endswith(".parquet") else pyarrow.json.read_json
            table = read(file)
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"task.train: {file} can't be read ({str(error).splitlines()[0]})") from None
        for name in names:
            if name not in table.column_names:
                have = ", ".join(table.column_names)
                raise UserError(f"task.train: {file} has no column `{name}` (it has: {have})")
            values = table[name].to_pylist()
            if not all(isinstance(value, str) for value in values):
                raise UserError(f"task.train: column `{name}` of {file} holds something else than text")
            found[name] += values
    if not found[names[0]]:
        raise UserError(f"task.train: no rows in {', '.join(files)}")
    return found


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=7).digest(), "big")
