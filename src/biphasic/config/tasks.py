"""Schema of a downstream-data YAML (`job: tasks`): keys, types, defaults and checks."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from biphasic.config.base import (
    Destination,
    JobConfig,
    KeyProblems,
    LocalPath,
    Name,
    Names,
    Section,
    Seed,
    Share,
    distinct,
    whole,
)


class DatasetConfig(Section):
    """A dataset on the Hugging Face hub, a folder with the same layout, or files."""

    path: LocalPath | None = None
    """Hub id or folder of the dataset."""
    name: str | None = None
    """Name of the dataset's configuration, e.g. `sst2` for `nyu-mll/glue`."""
    revision: str | None = None
    """Commit, tag or branch. Default: the newest commit, which is recorded. Datasets that are published as a loading script
    are read from `refs/convert/parquet`."""
    files: dict[str, Names] | None = None
    """Files of each split: patterns within `path`, or without `path` local files:
    `.parquet`, `.jsonl`, `.json` (also SQuAD's own form), `.csv`, `.tsv`, or `.conll`, `.iob2`, `.iob`, `.bio` with a word
    and its label in each line. All but `.parquet` may be compressed (`.gz`, `.zst`)."""
    columns: Names | None = None
    """Names of the columns of `.csv` and `.tsv` files without a header, or of `.conll` files. Default: the first row of a
    table; `tokens` and `labels` in a `.conll` file."""

    @field_validator("files", mode="before")
    @classmethod
    def _require_splits(cls, files: object) -> object:
        if isinstance(files, str | list):
            raise ValueError(f"expected the files of each split, such as {{train: [train.jsonl]}}; got {files!r}")
        return files


class TableConfig(DatasetConfig):
    """One split of a dataset. `files` may also be a list, which is that split's."""

    split: str = "train"
    """Split of the dataset."""

    @model_validator(mode="before")
    @classmethod
    def _name_split(cls, content: Any) -> Any:
        if isinstance(content, dict) and isinstance(content.get("files"), list):
            return {**content, "files": {content.get("split", "train"): content["files"]}}
        return content


class _DownstreamSet(Section):
    license: str
    """License of the dataset. It is recorded beside the data."""
    homepage: str | None = None
    """Page that describes the dataset. It is recorded beside the data."""


class _SupervisedSet(_DownstreamSet):
    source: DatasetConfig
    """Where the dataset is read from."""
    splits: dict[str, str] = {"train": "train", "test": "validation"}
    """Source split for each split to write. Without `validation`, a part of `train` is used for it."""
    id_column: str | None = None
    """Column with the ids. Default: ids are made from the source split and the row number."""


class _TextSet(_SupervisedSet):
    text_column: str
    """Column with the text."""
    text_pair_column: str | None = None
    """Column with the second text. Null: single texts."""


class RegressionSet(_TextSet):
    """A dataset with a number for each text or pair of texts."""

    kind: Literal["regression"]
    label_column: str = "label"
    """Column with the text's number, or in `kind: classification` with its label, which is a number or a name."""


class ClassificationSet(RegressionSet):
    """A dataset with a label for each text or pair of texts."""

    kind: Literal["classification"]  # pyright: ignore[reportIncompatibleVariableOverride]
    label_names: Names | None = None
    """In the order of the label numbers. Default: the dataset's own names, or else all labels that occur, sorted."""


class MultiLabelSet(_TextSet):
    """A dataset with any number of labels for each text or pair of texts."""

    kind: Literal["multi_label"]
    label_column: str = "labels"
    """Column with the list of a text's labels, numbers or names."""
    label_separator: str | None = None
    """Separator of the labels in a text, such as `,` in a CSV file. Null: the column has lists."""
    label_columns: Annotated[Names, distinct] | None = None
    """Columns with 0 or 1, one for each label, which they name. Null: `label_column` has them all."""
    label_names: Names | None = None
    """In the order of the label numbers. Default: the dataset's own names, or else all labels that occur, sorted."""


class TokensSet(_SupervisedSet):
    """A dataset with a label for each word: BIO, or a scheme that is converted to it (IO, IOB, BIOES, BILOU, `PER-B`)."""

    kind: Literal["tokens"]
    tokens_column: str = "tokens"
    """Column with the words."""
    labels_column: str
    """Column with a label for each word."""
    label_names: Names | None = None
    """In the order of the label numbers. Default: the dataset's own names, or else all labels that occur."""


class QuestionAnsweringSet(_SupervisedSet):
    """A dataset of questions with answer spans in a context. A question without a span has no answer in its context."""

    kind: Literal["question_answering"]
    question_column: str = "question"
    """Column with the questions."""
    context_column: str = "context"
    """Column of the contexts. The answers are in a column `answers`, with `{text: [...], answer_start: [...]}` as in SQuAD,
    or with texts only, which are then located in the context."""


class PairsConfig(TableConfig):
    """A table of training pairs: each query with a relevant document."""

    query_column: str = "query"
    """Column with the queries' texts."""
    positive_column: str = "positive"
    """Column with the relevant document's text, or with a list of several, which make as many pairs."""
    negatives_column: str | Names | None = None
    """Column with hard negatives, a text or a list of texts, or several such columns: `[negative_1, negative_2]`."""
    scores_column: str | None = None
    """Column with a teacher's scores for distillation: a list of numbers, first the positive's, then each negative's."""


class CorpusConfig(TableConfig):
    """A table of the documents to search."""

    id_column: str = "_id"
    """Column with the documents' ids."""
    text_columns: Names = ["text"]
    """Columns of a document's text, such as title and text, which are joined."""
    separator: str = ". "
    """Separator between the texts of several columns. Empty texts are left out."""


class QueriesConfig(TableConfig):
    """A table of queries with their ids."""

    id_column: str = "_id"
    """Column with the queries' ids."""
    text_column: str = "text"
    """Column with the queries' texts."""


class QrelsConfig(TableConfig):
    """A table of relevance judgments for pairs of a query and a document."""

    query_column: str = "query-id"
    """Column with the query id."""
    document_column: str = "corpus-id"
    """Column with the document id. With `list_column`: the key of the id in each element of the list."""
    score_column: str | None = "score"
    """Column with the score. Null: every judgment has score 1."""
    list_column: str | None = None
    """Column with a list of all documents for the row's query."""
    half: Literal["first", "second"] | None = None
    """Use only one half of the queries. Halves are determined by a hash of the seed and the query id."""


class RetrievalSet(_DownstreamSet):
    """A retrieval dataset: a corpus, queries, relevance judgments, and optionally training pairs."""

    kind: Literal["retrieval"]
    train: PairsConfig | None = None
    """Training pairs. Null: the dataset is only for evaluation."""
    corpus: CorpusConfig
    """The documents to search."""
    queries: Annotated[list[QueriesConfig], Field(min_length=1)]
    """Tables of queries, which are joined."""
    qrels: Annotated[dict[str, QrelsConfig], Field(min_length=1)]
    """Relevance judgments by split."""
    min_score: Annotated[int, whole] = 1
    """Minimum score of a relevant document."""
    judged_only: bool = True
    """Keep only documents that have a judgment of any score in these splits, as in the paper. Results on such a corpus can't
    be compared with results on the complete corpus."""


SupervisedSet = ClassificationSet | MultiLabelSet | RegressionSet | TokensSet | QuestionAnsweringSet
DownstreamSet = Annotated[SupervisedSet | RetrievalSet, Field(discriminator="kind")]


class TasksConfig(JobConfig):
    """`job: tasks`: download downstream datasets and write them in one schema for each kind of task."""

    job: Literal["tasks"]
    output: Destination
    """Local folder or bucket prefix. Each dataset is written to its own folder."""
    validation_fraction: Share = 0.05
    """Share of `train` to use as `validation` if a dataset's `splits` has no `validation`."""
    seed: Seed = 42
    """Random seed for `validation_fraction` and for the halves of queries."""
    max_invalid_share: Annotated[float, Field(ge=0, lt=1)] = 0.001
    """Maximum share of invalid rows in a split that are left out. If there are more, preparing the dataset fails."""
    tasks: Annotated[dict[Name, DownstreamSet], Field(min_length=1)]
    """The datasets to write, by name."""

    def problems(self, ranks: int) -> KeyProblems:
        for name, task in self.tasks.items():
            for key, dataset, splits in source_datasets(f"tasks.{name}", task):
                if dataset.path is None and dataset.files is None:
                    yield [key], "expected `path` (a hub id or a folder), `files`, or both"
                    continue
                names, message = ("columns",), "has no effect with `path`; expected local `files` alone"
                if dataset.path is None:
                    names, message = ("name", "revision"), "has no effect without `path`"
                yield from dataset.require_defaults(names, key, [f"{key}.path"], message)
                for split in splits:
                    if dataset.files is not None and split not in dataset.files:
                        given = ", ".join(dataset.files)
                        yield [f"{key}.files"], f"has no files for the split {split!r} (it has: {given})"
            if isinstance(task, MultiLabelSet) and task.label_columns:
                fields, message = ("label_column", "label_separator", "label_names"), "has no effect with label_columns"
                yield from task.require_defaults(fields, f"tasks.{name}", [f"tasks.{name}.label_columns"], message)
            if isinstance(task, RetrievalSet):
                if task.train and task.train.scores_column and not task.train.negatives_column:
                    key = f"tasks.{name}.train"
                    yield [f"{key}.negatives_column", f"{key}.scores_column"], "is needed beside scores_column"
                for split, qrels in task.qrels.items():
                    if qrels.list_column is not None and qrels.score_column is not None:
                        key = f"tasks.{name}.qrels.{split}"
                        yield [f"{key}.list_column", f"{key}.score_column"], "needs score_column: null beside it"


def source_datasets(key: str, task: SupervisedSet | RetrievalSet) -> Iterator[tuple[str, DatasetConfig, list[str]]]:
    """Yield the key, configuration and splits of every source of a downstream dataset."""
    if not isinstance(task, RetrievalSet):
        yield f"{key}.source", task.source, list(task.splits.values())
        return
    tables: dict[str, TableConfig] = {"corpus": task.corpus}
    tables |= {} if task.train is None else {"train": task.train}
    tables |= {f"queries.{index}": table for index, table in enumerate(task.queries)}
    tables |= {f"qrels.{split}": table for split, table in task.qrels.items()}
    for name, table in tables.items():
        yield f"{key}.{name}", table, [table.split]
