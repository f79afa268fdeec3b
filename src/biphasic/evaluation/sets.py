"""Make mteb tasks from local datasets in BEIR's layout, from texts in memory, and from a task's judged documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet
from datasets import Dataset
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata

from biphasic.errors import UserError
from biphasic.storage import first_line

JUDGED = "-judged"
"""Suffix of the names of tasks that search only the judged documents."""
Qrels = dict[str, dict[str, int]]  # grade by query and document
_FORMATS = (".jsonl", ".parquet")
_QRELS_FORMATS = (*_FORMATS, ".tsv")
_IS_TEXT = (pa.types.is_string, pa.types.is_large_string)
_KINDS: dict[str, tuple[tuple[Any, ...], pa.DataType]] = {
    "text": (_IS_TEXT, pa.string()),
    "id": ((*_IS_TEXT, pa.types.is_integer), pa.string()),
    "grade": ((pa.types.is_integer, pa.types.is_floating), pa.int64()),
}
"""For each kind of column, the Arrow types that are accepted in a file and the type that the column is converted to."""
_LONGEST_LINE = 1 << 28
"""Maximum length of a JSON line, in bytes."""


class LocalRetrieval(AbsTaskRetrieval):
    """A retrieval task with texts in memory instead of a download."""

    content: dict[str, dict[str, Any]]
    """The data by subset and split: `corpus`, `queries`, `relevant_docs` and `top_ranked`, as in mteb."""

    def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
        """Copy the content to `dataset`, because mteb removes queries from it."""
        self.dataset: Any = {
            subset: {split: dict(data) for split, data in splits.items()} for subset, splits in self.content.items()
        }
        self.data_loaded = True


def retrieval_task(
    name: str,
    corpus: Mapping[str, str] | Dataset,
    queries: Mapping[str, str],
    qrels: Mapping[str, Qrels],
    language: str = "eng-Latn",
) -> LocalRetrieval:
    """Return a task made from texts and judgments.

    Args:
        name: the task's name in results.
        corpus: texts by id, or a dataset with the columns `id`, `text` and optionally `title`.
        queries: texts by id.
        qrels: judgments by split.
        language: the language of the texts, as ISO 639-3 code and script.

    Raises:
        UserError: the corpus or the queries are empty, an id occurs twice, a query has no judgments or no relevant document
            in the corpus, or a judged query is missing.
    """
    if not isinstance(corpus, Dataset):
        corpus = Dataset.from_dict({"id": list(corpus), "text": list(corpus.values())})
    for part, content in (("corpus", corpus), ("queries", queries)):
        if not len(content):
            raise UserError(f"retrieval set {name}: the {part} is empty")
    _require_unique(name, "corpus has", corpus["id"])
    ids = set(corpus["id"])
    judged = {query for split in qrels.values() for query in split}
    answered = {
        query
        for split in qrels.values()
        for query, grades in split.items()
        if any(grade > 0 and document in ids for document, grade in grades.items())
    }
    _require_none(name, "judgments name queries that aren't there", judged - queries.keys())
    _require_none(name, "queries have no judgments (qrels)", queries.keys() - judged)
    _require_none(name, "queries have no relevant document in the corpus", judged - answered)
    splits = {
        split: {
            "corpus": corpus,
            "queries": Dataset.from_dict({"id": list(grades), "text": [queries[query] for query in grades]}),
            "relevant_docs": grades,
            "top_ranked": None,
        }
        for split, grades in qrels.items()
    }
    return _task(name, {"default": splits}, {"path": f"local/{name}", "revision": "local"}, [language])


def judged_only(task: AbsTaskRetrieval) -> LocalRetrieval:
    """Return a copy of a task with only the documents that any split judges, as in the paper's evaluation.

    Args:
        task: the original task, with its data loaded.
    """
    content: dict[str, dict[str, Any]] = {}
    for subset, splits in task.dataset.items():
        judged = {doc for data in splits.values() for grades in data["relevant_docs"].values() for doc in grades}
        for split, data in splits.items():
            corpus: Any = data["corpus"]
            kept = corpus.select([row for row, id in enumerate(corpus["id"]) if id in judged])
            top_ranked: Any = data["top_ranked"]
            if top_ranked is not None:
                top_ranked = {query: [id for id in ids if id in judged] for query, ids in top_ranked.items()}
            content.setdefault(subset, {})[split] = {**data, "corpus": kept, "top_ranked": top_ranked}
    metadata = task.metadata
    languages: Any = metadata.eval_langs
    if isinstance(languages, dict):
        languages = {subset: languages[subset] for subset in content}
    judged_task = _task(f"{metadata.name}{JUDGED}", content, dict(metadata.dataset), languages, metadata.type)
    judged_task.ignore_identical_ids = task.ignore_identical_ids
    return judged_task


def read_set(folder: str, name: str, language: str, only: Sequence[str] | None = None) -> LocalRetrieval:
    """Read a folder in BEIR's layout as a task.

    It holds `corpus` (`_id`, `text`, optionally `title`), `queries` (`_id`, `text`) and for each split `qrels/<split>`
    (`query-id`, `corpus-id`, `score`), or one `qrels`, which is the split `test`. Each is a .jsonl, .parquet or, for qrels,
    .tsv file; corpus and queries may be folders of such files.

    Args:
        folder: the dataset folder.
        name: the task's name.
        language: the language of the texts.
        only: splits to read. Default: all.

    Raises:
        UserError: a file or split is missing, a file is damaged, a column is missing or has another type, or the texts and
            judgments are not valid, see `retrieval_task`.
    """
    corpus = _read_table(Path(folder), "corpus", {"_id": "id", "text": "text"}, {"title": "text"})
    texts = _read_table(Path(folder), "queries", {"_id": "id", "text": "text"}).to_pydict()
    _require_unique(folder, "queries have", texts["_id"])
    qrels = _read_qrels(Path(folder))
    if missing := [split for split in only or () if split not in qrels]:
        raise UserError(f"retrieval set {folder}: has no split {missing[0]} (it has: {', '.join(qrels)})")
    # A query may belong to a split that isn't read, but some split has to judge it.
    judged = {query for split in qrels.values() for query in split}
    _require_none(folder, "queries have no judgments (qrels)", set(texts["_id"]) - judged)
    chosen = {split: qrels[split] for split in only or qrels}
    chosen_queries = {query for split in chosen.values() for query in split}
    queries = {id: text for id, text in zip(texts["_id"], texts["text"], strict=True) if id in chosen_queries}
    renamed = corpus.rename_columns(["id" if column == "_id" else column for column in corpus.column_names])
    return retrieval_task(name, Dataset(renamed), queries, chosen, language)


def _task(name: str, content: Any, dataset: dict[str, Any], languages: Any, type_: Any = "Retrieval") -> LocalRetrieval:
    metadata = TaskMetadata(
        name=name,
        description=f"{name}: a local retrieval set",
        dataset=dataset,  # pyright: ignore[reportArgumentType]
        type=type_,
        category="t2t",
        modalities=["text"],
        eval_splits=sorted({split for splits in content.values() for split in splits}),
        eval_langs=languages,
        main_score="ndcg_at_10",
    )
    return type(name, (LocalRetrieval,), {"metadata": metadata, "content": content})()


def _require_none(where: str, problem: str, ids: Iterable[str]) -> None:
    if found := sorted(ids):
        raise UserError(f"retrieval set {where}: {len(found):,} {problem}, e.g. {found[0]}")


def _require_unique(where: str, part: str, ids: Iterable[str]) -> None:
    [(id, count)] = Counter(ids).most_common(1) or [("", 1)]
    if count > 1:
        raise UserError(f"retrieval set {where}: the {part} an id twice, e.g. {id}")


def _read_qrels(folder: Path) -> dict[str, Qrels]:
    columns = {"query-id": "id", "corpus-id": "id", "score": "grade"}
    single = [file for suffix in _QRELS_FORMATS if (file := folder / f"qrels{suffix}").is_file()]
    files = [file for file in sorted((folder / "qrels").glob("*")) if file.suffix in _QRELS_FORMATS]
    if not single and not files:
        raise UserError(f"retrieval set {folder}: has no qrels (qrels/test.tsv, .jsonl or .parquet)")
    by_split = [("test", single[0])] if single else [(file.stem, file) for file in files]
    qrels: dict[str, Qrels] = {}
    for split, file in by_split:
        if split in qrels:
            raise UserError(f"retrieval set {folder}: qrels/{split} exists in two formats: keep one")
        table = _read_file(file, columns)
        if not table.num_rows:
            raise UserError(f"{file}: has no rows")
        qrels[split] = {}
        for query, document, grade in zip(*(table[name].to_pylist() for name in columns), strict=True):
            if qrels[split].setdefault(query, {}).setdefault(document, grade) != grade:
                raise UserError(f"{file}: judges document {document} for query {query} twice, with different grades")
    return qrels


def _read_table(
    folder: Path, name: str, columns: Mapping[str, str], optional: Mapping[str, str] | None = None
) -> pa.Table:
    """Read a table from a file or a folder of files. An optional column that a file lacks is filled with empty texts."""
    files = [file for suffix in _FORMATS if (file := folder / f"{name}{suffix}").is_file()]
    files = files or [file for file in sorted((folder / name).glob("*")) if file.suffix in _FORMATS]
    if not files:
        raise UserError(f"retrieval set {folder}: has no {name} ({name}.jsonl or {name}.parquet)")
    table = pa.concat_tables([_read_file(file, columns, optional) for file in files], promote_options="default")
    if not table.num_rows:
        raise UserError(f"retrieval set {folder}: the {name} is empty")
    for index, column in enumerate(table.column_names):
        if optional and column in optional:
            table = table.set_column(index, column, table[column].fill_null(""))
    return table


def _read_file(file: Path, columns: Mapping[str, str], optional: Mapping[str, str] | None = None) -> pa.Table:
    """Read the named columns of a file; each column has one of `_KINDS`."""
    kinds = {**columns, **(optional or {})}
    try:
        table = _open(file, kinds)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{file} can't be read ({first_line(error)})") from None
    if missing := [name for name in columns if name not in table.column_names]:
        raise UserError(f"{file} has no column `{missing[0]}` (it has: {', '.join(table.column_names) or 'none'})")
    read: dict[str, Any] = {}
    for name in [name for name in kinds if name in table.column_names]:
        column, (accepted, arrow_type) = table[name], _KINDS[kinds[name]]
        if name in columns and column.null_count:
            raise UserError(f"column `{name}` of {file} has {column.null_count:,} rows without a value")
        if not any(is_type(column.type) for is_type in (*accepted, pa.types.is_null)):
            raise UserError(f"column `{name}` of {file} holds {column.type}; expected {kinds[name]}s")
        try:
            read[name] = column.cast(arrow_type)
            read[name].validate(full=True)  # the JSON reader does not check that texts are UTF-8
        except pa.ArrowException as error:
            raise UserError(f"column `{name}` of {file} can't be used ({first_line(error)})") from None
    return pa.table(read)


def _open(file: Path, kinds: Mapping[str, str]) -> pa.Table:
    if file.suffix == ".parquet":
        return pyarrow.parquet.read_table(file)
    if not file.stat().st_size:
        return pa.table({})
    if file.suffix == ".tsv":
        types = {name: _KINDS[kind][1] for name, kind in kinds.items()}  # so that an id such as 007 stays a text
        return pyarrow.csv.read_csv(
            file,
            parse_options=pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False),
            convert_options=pyarrow.csv.ConvertOptions(column_types=types),
        )
    options = pyarrow.json.ReadOptions(block_size=_LONGEST_LINE)
    table = pyarrow.json.read_json(file, read_options=options)
    dates = [name for name in table.column_names if name in kinds and pa.types.is_timestamp(table[name].type)]
    if not dates:
        return table
    # If all texts in a column look like dates, Arrow reads dates, so the column is read again as text.
    schema = pa.schema([(name, pa.string()) for name in dates])
    return pyarrow.json.read_json(file, options, pyarrow.json.ParseOptions(explicit_schema=schema))
