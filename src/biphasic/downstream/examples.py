"""An example row of each kind of dataset, in the YAML's own columns, for messages about data in another form."""

from __future__ import annotations

from typing import Any

from biphasic.config.tasks import (
    ClassificationSet,
    CorpusConfig,
    PairsConfig,
    QrelsConfig,
    QueriesConfig,
    SupervisedSet,
    TokensSet,
)

_QUESTION, _ANSWER = "Who left?", "Ann left."


def supervised(task: SupervisedSet) -> dict[str, Any]:
    """Return an example of a dataset for classification, token labels or question answering."""
    ids = {} if task.id_column is None else {task.id_column: "7"}
    if isinstance(task, ClassificationSet):
        pair = {} if task.text_pair_column is None else {task.text_pair_column: "a second text"}
        return {**ids, task.text_column: "a text", **pair, task.label_column: (task.label_names or [1])[-1]}
    if isinstance(task, TokensSet):
        return {**ids, task.tokens_column: ["Ann", "left"], task.labels_column: ["B-PER", "O"]}
    answers = {"text": ["Ann"], "answer_start": [0]}
    return {**ids, task.question_column: _QUESTION, task.context_column: _ANSWER, "answers": answers}


def pairs(config: PairsConfig) -> dict[str, Any]:
    """Return an example of training pairs."""
    negatives = {} if config.negatives_column is None else {config.negatives_column: ["Bob stayed."]}
    return {config.query_column: _QUESTION, config.positive_column: _ANSWER, **negatives}


def corpus(config: CorpusConfig) -> dict[str, Any]:
    """Return an example of documents."""
    return {config.id_column: "d1", **dict.fromkeys(config.text_columns, _ANSWER)}


def queries(config: QueriesConfig) -> dict[str, Any]:
    """Return an example of queries."""
    return {config.id_column: "q1", config.text_column: _QUESTION}


def qrels(config: QrelsConfig) -> dict[str, Any]:
    """Return an example of relevance judgments."""
    if config.list_column is not None:
        return {config.query_column: "q1", config.list_column: [{config.document_column: "d1"}]}
    scores = {} if config.score_column is None else {config.score_column: 1}
    return {config.query_column: "q1", config.document_column: "d1", **scores}
