"""Rankings of documents, in TREC's run format."""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping
from urllib.parse import quote

RANKED = 100
"""Number of documents in a ranking, as recall@100 needs."""
Run = dict[str, list[tuple[str, float]]]
"""Ids and scores of each query's documents, best first."""
Qrels = dict[str, dict[str, int]]
"""Grades of each query's judged documents; grades above 0 are relevant."""


def best_documents(scores: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the best documents as trec_eval orders them: equal scores in descending order of their ids."""
    return sorted(scores.items(), key=lambda document: (document[1], document[0]), reverse=True)[:RANKED]


def trec_run(run: Run, tag: str) -> bytes:
    """Return a ranking as trec_eval reads it: `query Q0 document rank score tag`, compressed by gzip.

    White space in an id is percent-encoded, because it separates the fields. Scores have the nine digits of fp32.
    Equal rankings give equal bytes.
    """
    lines = [
        f"{_field(query)} Q0 {_field(document)} {rank} {score:.9g} {tag}\n"
        for query, documents in run.items()
        for rank, (document, score) in enumerate(documents, start=1)
    ]
    return gzip.compress("".join(lines).encode(), mtime=0)


def _field(name: str) -> str:
    return re.sub(r"\s", lambda space: quote(space[0]), name)
