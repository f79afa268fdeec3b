"""Convert retrieval datasets to BEIR's layout: corpus, queries and relevance judgments, and also training pairs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from biphasic.config.tasks import CorpusConfig, PairsConfig, QrelsConfig, QueriesConfig
from biphasic.downstream.tables import InvalidRow, Table, TableRow, UnusedRow


def pairs(config: PairsConfig, table: Table) -> Iterator[TableRow | InvalidRow]:
    """Yield queries, each with one relevant document and its hard negatives, if any."""
    columns = [config.query_column, config.positive_column]
    columns += [] if config.negatives_column is None else [config.negatives_column]
    number = 0
    for batch in table.batches(columns):
        negatives = batch[config.negatives_column] if config.negatives_column else [[]] * len(batch[columns[0]])
        for query, positive, texts in zip(batch[columns[0]], batch[columns[1]], negatives, strict=True):
            number += 1
            hard_negatives = [texts] if isinstance(texts, str) else texts or []
            if all(isinstance(text, str) for text in (query, positive, *hard_negatives)):
                yield {"query": query, "positive": positive, "negatives": hard_negatives}
            else:
                yield InvalidRow("one of its texts is no text", f"{table.source}, row {number}")


def qrels(config: QrelsConfig, table: Table, seed: int) -> Iterator[TableRow | InvalidRow | UnusedRow]:
    """Yield judgments with any score, of all queries or of one half of them (`config.half`)."""
    columns = [config.query_column, config.list_column or config.document_column]
    columns += [] if config.score_column is None else [config.score_column]
    number = 0
    for batch in table.batches(columns):
        scores = batch[config.score_column] if config.score_column else [1] * len(batch[columns[0]])
        for query, judged, score in zip(batch[columns[0]], batch[columns[1]], scores, strict=True):
            number += 1
            if config.half is not None and in_first_half(seed, str(query)) != (config.half == "first"):
                yield UnusedRow("its query is in the other half")
                continue
            if (whole := _whole_number(score)) is None:
                yield InvalidRow("its score is no whole number", f"{table.source}, row {number}")
                continue
            documents = [judged] if config.list_column is None else [item[config.document_column] for item in judged]
            for document in documents:
                yield {"query-id": str(query), "corpus-id": str(document), "score": whole}


def _whole_number(score: Any) -> int | None:
    try:
        whole = int(score)
        return whole if whole == float(score) else None
    except (TypeError, ValueError, OverflowError):  # null, a text, NaN, Inf
        return None


def in_first_half(seed: int, query: str) -> bool:
    """Return whether a query belongs to the first half of the queries. Depends only on the seed and the query's id."""
    return hashlib.blake2b(f"{seed}:half of the queries:{query}".encode(), digest_size=8).digest()[0] < 128


def queries(
    config: QueriesConfig, table: Table, relevant: set[str], judged: set[str], written: set[str]
) -> Iterator[TableRow | InvalidRow | UnusedRow]:
    """Yield the queries with ids in `relevant`, each once, and add their ids to `written`.

    `judged` are the ids of all queries with a judgment, also of those for which no document is relevant.
    """
    number = 0
    for batch in table.batches([config.id_column, config.text_column]):
        for id, text in zip(map(str, batch[config.id_column]), batch[config.text_column], strict=True):
            number += 1
            if id not in relevant:
                yield UnusedRow("no document is relevant to it" if id in judged else "no judgment in these splits")
            elif id in written:
                yield UnusedRow("its id was read before")
            elif isinstance(text, str):
                written.add(id)
                yield {"_id": id, "text": text}
            else:
                yield InvalidRow("its text is no text", f"{table.source}, row {number}")


def corpus(
    config: CorpusConfig, table: Table, judged: set[str] | None, written: set[str]
) -> Iterator[TableRow | InvalidRow | UnusedRow]:
    """Yield the documents with ids in `judged` (None means all), each once, and add their ids to `written`.

    A null is an empty text.
    """
    number = 0
    for batch in table.batches([config.id_column, *config.text_columns]):
        texts = zip(*(batch[name] for name in config.text_columns), strict=True)
        for id, parts in zip(map(str, batch[config.id_column]), texts, strict=True):
            number += 1
            if judged is not None and id not in judged:
                yield UnusedRow("no judgment in these splits (judged_only)")
            elif id in written:
                yield UnusedRow("its id was read before")
            elif all(part is None or isinstance(part, str) for part in parts):
                written.add(id)
                yield {"_id": id, "title": "", "text": config.separator.join(part for part in parts if part)}
            else:
                yield InvalidRow("one of its texts is no text", f"{table.source}, row {number}")
