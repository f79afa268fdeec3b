"""Convert retrieval datasets to BEIR's layout (corpus, queries and relevance judgments) and to training pairs."""

import hashlib
from collections.abc import Iterable
from functools import partial
from typing import Any

from biphasic.config.tasks import PairsConfig, QrelsConfig, RetrievalSet
from biphasic.downstream.labels import id_text, number, whole_number
from biphasic.downstream.tables import InvalidRow, TableRow, UnusedRow, require_strings
from biphasic.downstream.writer import TaskWriter
from biphasic.errors import UserError


def write_retrieval(writer: TaskWriter, task: RetrievalSet) -> None:
    """Write the tables of a retrieval dataset. Only judged documents are kept unless `judged_only` is false.

    Errors are those of `TaskWriter.write`.
    """
    if (train := task.train) is not None:
        given = train.negatives_column
        negatives = [given] if isinstance(given, str) else given or []
        columns = [train.query_column, train.positive_column, *filter(None, [train.scores_column]), *negatives]
        table = writer.table(train, train.split, columns)
        rows = table.convert(partial(_pairs, train, negatives))
        writer.write("train", "pairs" if train.scores_column is None else "scored_pairs", rows, len(table))

    judgments: dict[str, list[TableRow | InvalidRow | UnusedRow]] = {}
    for split, config in task.qrels.items():
        columns = [config.query_column, config.list_column or config.document_column]
        table = writer.table(config, config.split, [*columns, *filter(None, [config.score_column])])
        judgments[split] = list(table.convert(partial(_judgments, config, writer.config.seed)))
        grades_by_query((tuple(row.values()) for row in judgments[split] if isinstance(row, dict)), table.source)
    judged = [row for rows in judgments.values() for row in rows if isinstance(row, dict)]
    judged_queries = {row["query-id"] for row in judged}
    relevant_queries = {row["query-id"] for row in judged if row["score"] >= task.min_score}
    judged_documents = {row["corpus-id"] for row in judged} if task.judged_only else None

    query_ids: set[str] = set()
    document_ids: set[str] = set()

    def query(value: Any, text: Any) -> list[TableRow]:
        if (id := _require_id(value, "a query's id")) not in relevant_queries:
            raise UnusedRow("no document is relevant to it" if id in judged_queries else "no judgment in these splits")
        if id in query_ids:
            raise UnusedRow("its id was read before")
        require_strings("a query's text", text)
        query_ids.add(id)
        return [{"_id": id, "text": text}]

    def document(value: Any, *texts: Any) -> list[TableRow]:
        id = _require_id(value, "a document's id")
        if judged_documents is not None and id not in judged_documents:
            raise UnusedRow("no judgment in these splits (judged_only)")
        if id in document_ids:
            raise UnusedRow("its id was read before")
        require_strings("a document's text", *(text for text in texts if text is not None))  # a null is an empty text
        document_ids.add(id)
        return [{"_id": id, "title": "", "text": task.corpus.separator.join(filter(None, texts))}]

    tables = [writer.table(part, part.split, [part.id_column, part.text_column]) for part in task.queries]
    rows = (row for table in tables for row in table.convert(query))
    writer.write("queries", "queries", rows, sum(map(len, tables)))
    table = writer.table(task.corpus, task.corpus.split, [task.corpus.id_column, *task.corpus.text_columns])
    writer.write("corpus", "corpus", table.convert(document), len(table))

    for split, rows in judgments.items():
        checked: list[TableRow | InvalidRow | UnusedRow] = []
        for at, row in enumerate(rows, start=1):
            if isinstance(row, dict):
                place = f"qrels of {split}, number {at}, id"
                if row["score"] < task.min_score:
                    row = UnusedRow(f"its score is below min_score ({task.min_score})")
                elif row["query-id"] not in query_ids:
                    row = InvalidRow("its query is not among the queries", f"{place} {row['query-id']!r}")
                elif row["corpus-id"] not in document_ids:
                    row = InvalidRow("its document is not in the corpus", f"{place} {row['corpus-id']!r}")
            checked.append(row)
        used = sum(not isinstance(row, UnusedRow) for row in checked)
        writer.write(f"qrels/{split}", "qrels", checked, used)


def grades_by_query(judgments: Iterable[tuple[Any, ...]], source: str) -> dict[str, dict[str, int]]:
    """Return grades by query and document, from the three of each judgment; a UserError if two grades are of one pair."""
    grades: dict[str, dict[str, int]] = {}
    for query, document, grade in judgments:
        if grades.setdefault(query, {}).setdefault(document, grade) != grade:
            raise UserError(f"{source}: judges document {document} for query {query} twice, with different grades")
    return grades


def _pairs(train: PairsConfig, names: list[str], query: Any, positive: Any, *others: Any) -> list[TableRow]:
    """Return a pair of a query with each of its relevant documents, with hard negatives and a teacher's scores, if any."""
    scores, values = (others[0], others[1:]) if train.scores_column else (None, others)
    negatives = []
    for name, value in zip(names, values, strict=True):
        texts = [value] if isinstance(value, str) else value or []
        require_strings(f"negatives_column {name!r}", *texts)
        negatives += texts
    require_strings(f"query_column {train.query_column!r}", query)
    positives = positive if isinstance(positive, list) else [positive]
    require_strings(f"positive_column {train.positive_column!r}", *positives)
    if not positives:
        raise InvalidRow(f"positive_column {train.positive_column!r} is an empty list")
    pairs = [{"query": query, "positive": each, "negatives": negatives} for each in positives]
    if train.scores_column is None:
        return pairs
    if len(pairs) > 1:
        raise InvalidRow(f"positive_column {train.positive_column!r} has several texts; scores_column needs one")
    if not isinstance(scores, list) or len(scores) != 1 + len(negatives):
        raise InvalidRow("the scores are not a list of one for the positive and for each negative")
    return [{**pairs[0], "scores": [number(score, "a score") for score in scores]}]


def _require_id(value: Any, what: str) -> str:
    if not (text := id_text(value)):
        raise InvalidRow(f"{what} is empty")
    return text


def _judgments(config: QrelsConfig, seed: int, query: Any, judged: Any, score: Any = 1) -> list[TableRow]:
    """Return judgments with any score, of all queries or of one half of the queries (`config.half`)."""
    query = _require_id(query, "a judgment's query id")
    if config.half is not None:
        # A query's half depends only on the seed and the query's id.
        digest = hashlib.blake2b(f"{seed}:half of the queries:{query}".encode(), digest_size=8).digest()
        if (digest[0] < 128) != (config.half == "first"):
            raise UnusedRow("its query is in the other half")
    grade = whole_number(score, f"score_column {config.score_column!r}")
    documents = [judged] if config.list_column is None else [item[config.document_column] for item in judged]
    documents = [_require_id(document, "a judgment's document id") for document in documents]
    return [{"query-id": query, "corpus-id": document, "score": grade} for document in documents]
