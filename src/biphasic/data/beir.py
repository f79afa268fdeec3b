"""Retrieval sets as BEIR lays them out: corpus, queries, relevance judgments, and pairs to train on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from biphasic.config.tasks import CorpusConfig, PairsConfig, QrelsConfig, QueriesConfig
from biphasic.data.tables import BadRow, Row, Table


def pairs(config: PairsConfig, table: Table) -> Iterator[Row | BadRow]:
    """Queries with a document that answers each, and hard negatives where there are some."""
    names = [config.query_column, config.positive_column]
    names += [] if config.negatives_column is None else [config.negatives_column]
    number = 0
    for batch in table.batches(names):
        negatives = batch[config.negatives_column] if config.negatives_column else [[]] * len(batch[names[0]])
        for query, positive, others in zip(batch[names[0]], batch[names[1]], negatives, strict=True):
            number += 1
            hard = [others] if isinstance(others, str) else others or []
            if all(isinstance(text, str) for text in (query, positive, *hard)):
                yield {"query": query, "positive": positive, "negatives": hard}
            else:
                yield BadRow("one of its texts is no text", f"{table.where}, row {number}")


def qrels(config: QrelsConfig, table: Table, seed: int) -> Iterator[Row]:
    """All judgments, whatever their score."""
    columns = [config.query_column, config.list_column or config.document_column]
    columns += [] if config.score_column is None else [config.score_column]
    for batch in table.batches(columns):
        scores = batch[config.score_column] if config.score_column else [1] * len(batch[columns[0]])
        for query, found, score in zip(batch[columns[0]], batch[columns[1]], scores, strict=True):
            if config.half is not None and in_first_half(seed, str(query)) != (config.half == "first"):
                continue
            documents = [found] if config.list_column is None else [one[config.document_column] for one in found]
            for document in documents:
                yield {"query-id": str(query), "corpus-id": str(document), "score": int(score)}


def in_first_half(seed: int, query: str) -> bool:
    """Whether a query belongs to the first half of the queries: a function of the seed and its id alone."""
    return hashlib.blake2b(f"{seed}:half of the queries:{query}".encode(), digest_size=8).digest()[0] < 128


def queries(config: QueriesConfig, table: Table, asked: set[str], known: set[str]) -> Iterator[Row]:
    """The queries in `asked`, each once; `known` gets their ids."""
    for batch in table.batches([config.id_column, config.text_column]):
        for id, text in zip(map(str, batch[config.id_column]), batch[config.text_column], strict=True):
            if id in asked and id not in known:
                known.add(id)
                yield {"_id": id, "text": text}


def corpus(config: CorpusConfig, table: Table, wanted: set[str] | None, known: set[str]) -> Iterator[Row]:
    """The documents in `wanted` (None: all), each once; `known` gets their ids."""
    for batch in table.batches([config.id_column, *config.text_columns]):
        texts = zip(*(batch[name] for name in config.text_columns), strict=True)
        for id, parts in zip(map(str, batch[config.id_column]), texts, strict=True):
            if (wanted is None or id in wanted) and id not in known:
                known.add(id)
                yield {"_id": id, "title": "", "text": config.joined_by.join(part for part in parts if part)}
