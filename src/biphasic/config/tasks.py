"""Everything a YAML of downstream datasets may say."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from biphasic.config.base import Count, Section, Share

Columns = Annotated[list[str], Field(min_length=1)]


class DatasetConfig(Section):
    """A dataset of the Hugging Face hub, or a folder that is laid out as one, or files."""

    path: str | None = None
    """Hub id or folder."""
    name: str | None = None
    """Configuration, e.g. `sst2` of `nyu-mll/glue`."""
    revision: str | None = None
    """Commit, tag or branch. Default: the newest, which is looked up and recorded. What its owners publish as a loading
    script is read from `refs/convert/parquet`."""
    files: dict[str, Columns] | None = None
    """Files of each split: patterns within `path`, or without one `.parquet`, `.jsonl`, `.json`, `.csv` or `.tsv` files of
    this machine (`.gz` and `.zst` too)."""


class TableConfig(DatasetConfig):
    """One split of a dataset."""

    split: str = "train"


class _SplitTask(Section):
    """What the three kinds of task share whose splits are columns of rows."""

    license: str
    """Under which its owners publish it; recorded beside the data."""
    homepage: str | None = None
    source: DatasetConfig
    splits: dict[str, str] = {"train": "train", "test": "validation"}
    """Split to write: split of the source. Without a `validation`, a part of `train` becomes it."""
    id_column: str | None = None
    """Default: the source's split and the row's number in it."""


class ClassificationTask(_SplitTask):
    """A label for a text or a pair of texts."""

    kind: Literal["classification"]
    text_column: str
    text_pair_column: str | None = None
    label_column: str = "label"
    label_names: Columns | None = None
    """In the order of the numbers. Default: as the dataset names them."""


class TokensTask(_SplitTask):
    """A label for each word (BIO)."""

    kind: Literal["tokens"]
    tokens_column: str = "tokens"
    labels_column: str
    label_names: Columns | None = None
    """In the order of the numbers. Default: as the dataset names them."""


class QuestionAnsweringTask(_SplitTask):
    """Spans of a context that answer a question; no span: the context doesn't answer it."""

    kind: Literal["question_answering"]
    question_column: str = "question"
    context_column: str = "context"
    answers_column: str = "answers"
    """`{text: [...], answer_start: [...]}` as SQuAD has it, or texts alone, which are then looked for in the context."""


class PairsConfig(TableConfig):
    """Queries with a document that answers each."""

    query_column: str = "query"
    positive_column: str = "positive"
    negatives_column: str | None = None
    """Hard negatives: a text, or a list of texts."""


class CorpusConfig(TableConfig):
    """The documents that are searched."""

    id_column: str = "_id"
    text_columns: Columns = ["text"]
    joined_by: str = ". "
    """Between several columns; an empty one is left out."""


class QueriesConfig(TableConfig):
    """The queries, by id."""

    id_column: str = "_id"
    text_column: str = "text"


class QrelsConfig(TableConfig):
    """Which documents answer which query."""

    query_column: str = "query-id"
    document_column: str = "corpus-id"
    """A document's id, or with `list_column` its name in each element there."""
    score_column: str | None = "score"
    """Null: all are relevant, with 1."""
    list_column: str | None = None
    """A row names all of its query's documents, in a list."""
    half: Literal["first", "second"] | None = None
    """Take one half of the queries, chosen by a hash of the seed and the query's id."""


class RetrievalData(Section):
    """A corpus, queries and relevance judgments; training pairs where there are some."""

    kind: Literal["retrieval"]
    license: str
    homepage: str | None = None
    train: PairsConfig | None = None
    corpus: CorpusConfig
    queries: Annotated[list[QueriesConfig], Field(min_length=1)]
    qrels: Annotated[dict[str, QrelsConfig], Field(min_length=1)]
    """By split."""
    min_score: int = 1
    """Least score of a relevant document."""
    judged_only: bool = True
    """Keep only the documents that some judgment of these splits names, whatever its score. The paper's; its scores can't
    be compared with those over whole corpora."""


Task = Annotated[
    ClassificationTask | TokensTask | QuestionAnsweringTask | RetrievalData,
    Field(discriminator="kind"),
]
SplitTask = ClassificationTask | TokensTask | QuestionAnsweringTask


class TasksConfig(Section):
    """`job: tasks`: downstream datasets in, one schema for each kind of task out."""

    job: Literal["tasks"]
    output: str
    """Local folder or bucket prefix. Each task gets a folder of its own."""
    validation_fraction: Share = 0.05
    """Share of `train` that becomes `validation` where the source has no third split."""
    seed: Count = 42
    """Of that choice, and of halves of queries."""
    most_left_out: Annotated[float, Field(ge=0, lt=1)] = 0.001
    """Largest share of a split's rows that may be left out because something is wrong with them; more stop the task."""
    tasks: Annotated[dict[str, Task], Field(min_length=1)]
