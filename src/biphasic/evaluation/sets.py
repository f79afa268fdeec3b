"""Retrieval sets of a person's own as mteb's tasks: BEIR's layout, held-out pairs, and parts of other tasks."""

from __future__ import annotations

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

from biphasic.config.errors import UserError
from biphasic.storage import short

SPLIT = "test"
JUDGED = "-judged"
"""Behind the name of a task over its judged documents alone."""
Qrels = dict[str, dict[str, int]]
_KINDS = (".jsonl", ".parquet", ".tsv")
_TEXTS = (pa.types.is_string, pa.types.is_large_string)
_KIND: dict[str, tuple[tuple[Any, ...], pa.DataType]] = {
    "text": (_TEXTS, pa.string()),
    "id": ((*_TEXTS, pa.types.is_integer), pa.string()),
    "grade": ((pa.types.is_integer, pa.types.is_floating), pa.int64()),
}
"""What a column may hold, and as what it is read."""
_LINE = 1 << 28
"""Bytes that the JSON reader takes at a time: no line may be longer."""


class LocalRetrieval(AbsTaskRetrieval):
    """A retrieval task whose texts are given instead of downloaded."""

    content: dict[str, dict[str, Any]]
    """By subset and split: `corpus`, `queries`, `relevant_docs`, `top_ranked`, as mteb has them."""

    def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
        """Nothing to fetch."""
        # Copies: mteb takes queries out of what it is given.
        copies: Any = {name: {split: dict(one) for split, one in all_.items()} for name, all_ in self.content.items()}
        self.dataset = copies
        self.data_loaded = True


def retrieval_task(
    name: str,
    corpus: Mapping[str, str] | Dataset,
    queries: Mapping[str, str],
    qrels: Qrels | Mapping[str, Qrels],
    language: str = "eng-Latn",
) -> LocalRetrieval:
    """A task from texts by id, and for each query the relevant documents' ids with their grade.

    Args:
        name: the task's, in results.
        corpus: texts by id, or a dataset with the columns `id`, `text` and maybe `title`.
        queries: texts by id.
        qrels: of the split `test`, or of several splits by name.
        language: of the texts, ISO 639-3 and script.

    Raises:
        UserError: something is empty, an id comes twice, or a query has no relevant document in the corpus.
    """
    if not isinstance(corpus, Dataset):
        corpus = Dataset.from_dict({"id": list(corpus), "text": list(corpus.values())})
    for what, content in (("corpus", corpus), ("queries", queries)):
        if not len(content):
            raise UserError(f"retrieval set {name}: the {what} is empty")
    by_split = _by_split(qrels)
    known = set(corpus["id"])
    if len(known) < len(corpus):
        raise UserError(f"retrieval set {name}: the corpus has an id twice, e.g. {_twice(corpus['id'])}")
    judged = {query for split in by_split.values() for query in split}
    _refuse(name, "judgments name queries that aren't there", judged - queries.keys())
    _refuse(name, "queries have no judgments (qrels)", queries.keys() - judged)
    relevant = [
        (query, document)
        for split in by_split.values()
        for query, grades in split.items()
        for document, grade in grades.items()
        if grade > 0 and document in known
    ]
    _refuse(name, "queries have no relevant document in the corpus", judged - {query for query, _ in relevant})
    splits = {
        split: {
            "corpus": corpus,
            "queries": Dataset.from_dict({"id": list(asked), "text": [queries[query] for query in asked]}),
            "relevant_docs": asked,
            "top_ranked": None,
        }
        for split, asked in by_split.items()
    }
    return _task(name, {"default": splits}, {"path": f"local/{name}", "revision": "local"}, [language])


def judged_only(task: AbsTaskRetrieval) -> LocalRetrieval:
    """The same task over the documents that any judgment of its splits names, as the paper's evaluation has it.

    Args:
        task: with its data loaded.
    """
    content: dict[str, dict[str, Any]] = {}
    for subset, splits in task.dataset.items():
        named = {doc for data in splits.values() for grades in data["relevant_docs"].values() for doc in grades}
        for split, data in splits.items():
            corpus: Any = data["corpus"]
            kept = corpus.select([at for at, id in enumerate(corpus["id"]) if id in named])
            ranked: Any = data["top_ranked"]
            if ranked is not None:
                ranked = {query: [id for id in ids if id in named] for query, ids in ranked.items()}
            content.setdefault(subset, {})[split] = {**data, "corpus": kept, "top_ranked": ranked}
    about = task.metadata
    langs = about.eval_langs
    languages = {name: langs[name] for name in content} if isinstance(langs, dict) else langs
    found = _task(f"{about.name}{JUDGED}", content, dict(about.dataset), languages, about.type)
    found.ignore_identical_ids = task.ignore_identical_ids
    return found


def retrieval_from_pairs(
    name: str, files: Sequence[str], query_column: str = "query", document_column: str = "positive"
) -> LocalRetrieval:
    """A task from held-out pairs: the corpus is all documents, and each query's own is the one that is right."""
    columns = {query_column: "text", document_column: "text"}
    read = pa.concat_tables([_read(Path(file), columns) for file in files]).to_pydict()
    queries = {f"q{index}": text for index, text in enumerate(read[query_column])}
    corpus = {f"d{index}": text for index, text in enumerate(read[document_column])}
    return retrieval_task(name, corpus, queries, {f"q{index}": {f"d{index}": 1} for index in range(len(queries))})


def read_set(folder: str, name: str, language: str, only: Sequence[str] | None = None) -> LocalRetrieval:
    """A folder in BEIR's layout as a task.

    `corpus` (`_id`, `text`, maybe `title`), `queries` (`_id`, `text`) and for each split `qrels/<split>` (`query-id`,
    `corpus-id`, `score`), or one `qrels`; each a .jsonl, .parquet or, of qrels, .tsv file, or a folder of such files.

    Args:
        folder: the folder.
        name: the task's.
        language: of the texts.
        only: the splits that are wanted. Default: all.

    Raises:
        UserError: a file is missing or damaged, lacks a column or holds something else, or as for `retrieval_task`.
    """
    place = Path(folder)
    if not place.is_dir():
        raise UserError(f"retrieval set {folder}: there is no such folder")
    corpus = _table(place, "corpus", {"_id": "id", "text": "text"}, {"title": "text"})
    texts = _table(place, "queries", {"_id": "id", "text": "text"}).to_pydict()
    if twice := _twice(texts["_id"]):
        raise UserError(f"retrieval set {folder}: the queries have an id twice, e.g. {twice}")
    queries = dict(zip(texts["_id"], texts["text"], strict=True))
    qrels = _qrels(place)
    if lost := [split for split in only or () if split not in qrels]:
        raise UserError(f"retrieval set {folder}: has no split {lost[0]} (it has: {', '.join(qrels)})")
    # A query that no split judges is a mistake; one of another split is none.
    everywhere = {query for split in qrels.values() for query in split}
    _refuse(folder, "queries have no judgments (qrels)", queries.keys() - everywhere)
    chosen = {split: qrels[split] for split in only or qrels}
    asked = {query for split in chosen.values() for query in split}
    named = corpus.rename_columns(["id" if column == "_id" else column for column in corpus.column_names])
    texts_by_id = {query: text for query, text in queries.items() if query in asked}
    return retrieval_task(name, Dataset(named), texts_by_id, chosen, language)


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


def _by_split(qrels: Qrels | Mapping[str, Qrels]) -> dict[str, Qrels]:
    values = [grade for query in qrels.values() for grade in query.values()]
    if any(isinstance(value, dict) for value in values):
        return dict(qrels)  # pyright: ignore[reportReturnType, reportArgumentType]
    return {SPLIT: dict(qrels)}  # pyright: ignore[reportReturnType, reportArgumentType]


def _refuse(where: str, what: str, ids: Iterable[str]) -> None:
    lost = sorted(ids)
    if lost:
        raise UserError(f"retrieval set {where}: {len(lost):,} {what}, e.g. {lost[0]}")


def _twice(ids: Iterable[str]) -> str | None:
    seen: set[str] = set()
    for id in ids:
        if id in seen:
            return id
        seen.add(id)
    return None


def _qrels(place: Path) -> dict[str, Qrels]:
    columns = {"query-id": "id", "corpus-id": "id", "score": "grade"}
    alone = [file for kind in _KINDS if (file := place / f"qrels{kind}").is_file()]
    files = {SPLIT: alone[0]} if alone else {}
    if not files and (place / "qrels").is_dir():
        found_files = [file for file in sorted((place / "qrels").iterdir()) if file.suffix in _KINDS]
        files = {file.stem: file for file in found_files}
        if twice := _twice(file.stem for file in found_files):
            raise UserError(f"retrieval set {place}: qrels/{twice} is there as two kinds of file: keep one")
    if not files:
        raise UserError(f"retrieval set {place}: has no qrels (qrels/test.tsv, .jsonl or .parquet)")
    found: dict[str, Qrels] = {}
    for split, file in files.items():
        table = _read(file, columns)
        if not table.num_rows:
            raise UserError(f"{file}: has no rows")
        graded = found.setdefault(split, {})
        for query, document, score in zip(*(table[name].to_pylist() for name in columns), strict=True):
            if graded.setdefault(query, {}).setdefault(document, score) != score:
                raise UserError(f"{file}: judges document {document} for query {query} twice, and not alike")
    return found


def _table(place: Path, name: str, columns: Mapping[str, str], maybe: Mapping[str, str] | None = None) -> pa.Table:
    files = [file for kind in _KINDS[:2] if (file := place / f"{name}{kind}").is_file()]
    if not files and (place / name).is_dir():
        files = [file for file in sorted((place / name).iterdir()) if file.suffix in _KINDS[:2]]
    if not files:
        raise UserError(f"retrieval set {place}: has no {name} ({name}.jsonl or {name}.parquet)")
    tables = [_read(file, columns, maybe) for file in files]
    # A file without titles, beside others that have them, has empty ones.
    extra = [name for name in maybe or () if any(name in table.column_names for table in tables)]
    for name in extra:
        tables = [
            table if name in table.column_names else table.append_column(name, pa.array([""] * len(table), pa.string()))
            for table in tables
        ]
    found = pa.concat_tables([table.select([*columns, *extra]) for table in tables])
    if not found.num_rows:
        raise UserError(f"retrieval set {place}: the {name} is empty")
    return found


def _read(file: Path, columns: Mapping[str, str], maybe: Mapping[str, str] | None = None) -> pa.Table:
    """Columns of a file by name, each a `text`, `id` or `grade`; in those that may lack, nothing is an empty text."""
    wanted = {**columns, **(maybe or {})}
    try:
        found = _open(file, wanted)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{file} can't be read ({short(error)})") from None
    kept: dict[str, Any] = {}
    for name, kind in wanted.items():
        if name not in found.column_names:
            if name in columns:
                have = ", ".join(found.column_names) or "none"
                raise UserError(f"{file} has no column `{name}` (it has: {have})")
            continue
        column = found[name]
        if name in columns and column.null_count:
            raise UserError(f"column `{name}` of {file} has {column.null_count:,} rows without a value")
        fits, arrow = _KIND[kind]
        if not any(is_a(column.type) for is_a in (*fits, pa.types.is_null)):
            raise UserError(f"column `{name}` of {file} holds {column.type}; expected {kind}s")
        try:
            cast = column.cast(arrow)
            cast.validate(full=True)  # nothing before looks whether JSON is UTF-8
        except pa.ArrowException as error:
            raise UserError(f"column `{name}` of {file} can't be used ({short(error)})") from None
        kept[name] = cast if name in columns else cast.fill_null("")
    return pa.table(kept)


def _open(file: Path, columns: Mapping[str, str]) -> pa.Table:
    if file.suffix == ".parquet":
        return pyarrow.parquet.read_table(file)
    if not file.stat().st_size:
        return pa.table({})
    if file.suffix == ".tsv":
        types = {name: _KIND[kind][1] for name, kind in columns.items()}  # an id such as 007 is no number
        return pyarrow.csv.read_csv(
            file,
            parse_options=pyarrow.csv.ParseOptions(delimiter="\t", quote_char=False),
            convert_options=pyarrow.csv.ConvertOptions(column_types=types),
        )
    options = pyarrow.json.ReadOptions(block_size=_LINE)
    found = pyarrow.json.read_json(file, read_options=options)
    dates = [name for name in found.column_names if name in columns and pa.types.is_timestamp(found[name].type)]
    if not dates:
        return found
    # Texts that all look like dates; they are texts.
    schema = pa.schema([(name, pa.string()) for name in dates])
    return pyarrow.json.read_json(file, options, pyarrow.json.ParseOptions(explicit_schema=schema))
