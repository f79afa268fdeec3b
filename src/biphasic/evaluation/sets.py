"""Make mteb tasks from local datasets in BEIR's layout, from texts in memory, and from a task's judged documents."""

import logging
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata

from biphasic.config.tasks import DatasetConfig
from biphasic.downstream.beir import grades_by_query
from biphasic.downstream.labels import whole_number
from biphasic.downstream.tables import InvalidRow, open_table
from biphasic.downstream.writer import SCHEMAS
from biphasic.errors import UserError
from biphasic.evaluation.search import Qrels
from biphasic.storage import is_hidden, user_errors

JUDGED = "-judged"
"""Suffix of the names of tasks that search only the judged documents."""
_FORMATS = (".jsonl", ".parquet", ".tsv")
_BATCH_ROWS = 10_000
_log = logging.getLogger(__name__)


class LocalRetrieval(AbsTaskRetrieval):
    """A retrieval task whose texts are in memory."""

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
    only: Sequence[str] | None = None,
) -> LocalRetrieval:
    """Return a task made from texts by id, and judgments by split; `only` names the splits to keep.

    The corpus may also be a dataset with the columns `id`, `text` and optionally `title`. The language is an ISO 639-3
    code and a script. Raises a UserError if the corpus or the queries are empty, an id occurs twice, a query has no
    judgments or no relevant document in the corpus, or a judged query is missing.
    """
    if not isinstance(corpus, Dataset):
        corpus = Dataset.from_dict({"id": list(corpus), "text": list(corpus.values())})
    for part, content in (("corpus", corpus), ("queries", queries)):
        if not len(content):
            raise UserError(f"retrieval set {name}: the {part} is empty")
    _require_unique(name, "corpus has", corpus["id"][:])
    judged = {query for split in qrels.values() for query in split}
    _require_none(name, "judged queries are missing", judged - queries.keys())
    _require_none(name, "queries have no judgments (qrels)", queries.keys() - judged)
    chosen, ids = {split: qrels[split] for split in only or qrels}, set(corpus["id"][:])
    graded = [(query, id) for split in chosen.values() for query, grades in split.items() for id in grades if grades[id] > 0]
    without = {query for split in chosen.values() for query in split} - {query for query, id in graded if id in ids}
    _require_none(name, "queries have no relevant document in the corpus", without)
    splits = {
        split: {
            "corpus": corpus,
            "queries": Dataset.from_dict({"id": list(grades), "text": [queries[query] for query in grades]}),
            "relevant_docs": grades,
            "top_ranked": None,
        }
        for split, grades in chosen.items()
    }
    return _task(name, {"default": splits}, {"path": f"local/{name}", "revision": "local"}, [language])


def judged_only(task: AbsTaskRetrieval) -> LocalRetrieval:
    """Return a copy of a loaded task with only the documents that any split judges, as in the paper's evaluation."""
    content: dict[str, dict[str, Any]] = {}
    for subset, splits in task.dataset.items():
        judged = {doc for data in splits.values() for grades in data["relevant_docs"].values() for doc in grades}
        for split, data in splits.items():
            corpus: Any = data["corpus"]
            kept = corpus.select([row for row, id in enumerate(corpus["id"][:]) if id in judged])
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
    (`query-id`, `corpus-id`, `score`), or one `qrels`, which is the split `test`. Each is a .jsonl, .parquet or .tsv
    file; corpus and queries may be folders of such files. `only` names the splits to read. Raises a UserError if a file
    or split is missing, a file is damaged, a column is missing or has another type, or as for `retrieval_task`.
    """
    corpus, texts = _read_table(Path(folder), "corpus"), _read_table(Path(folder), "queries").to_pydict()
    _require_unique(name, "queries have", texts["_id"])
    qrels = _read_qrels(Path(folder))
    if missing := [split for split in only or () if split not in qrels]:
        raise UserError(f"retrieval set {folder}: has no split {missing[0]} (it has: {', '.join(qrels)})")
    letters = [letter for text in texts["text"][:1000] for letter in text if letter.isalpha()]
    latin = sum(unicodedata.name(letter, "").startswith("LATIN") for letter in letters)
    if language.endswith("-Latn") and latin < len(letters) / 2:
        problem = "most letters of its queries are not Latin: BM25 would not find their words; name their language"
        _log.warning("retrieval set %s: sets_language is %s, but %s, such as jpn-Jpan", folder, language, problem)
    documents = Dataset(corpus.rename_columns({"_id": "id"}))
    return retrieval_task(name, documents, dict(zip(texts["_id"], texts["text"], strict=True)), qrels, language, only)


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
    if listed := sorted(ids):
        raise UserError(f"retrieval set {where}: {len(listed):,} {problem}, e.g. {listed[0]}")


def _require_unique(where: str, part: str, ids: Iterable[str]) -> None:
    [(id, count)] = Counter(ids).most_common(1) or [("", 1)]
    if count > 1:
        raise UserError(f"retrieval set {where}: the {part} an id twice, e.g. {id}")


def _read_qrels(folder: Path) -> dict[str, Qrels]:
    qrels: dict[str, Qrels] = {}
    for file in _files(folder, "qrels"):
        split = "test" if file.parent == folder else file.stem
        if split in qrels:
            raise UserError(f"retrieval set {folder}: qrels/{split} exists in two formats: keep one")
        table = _read_file(file, SCHEMAS["qrels"])
        if not table.num_rows:
            raise UserError(f"{file}: has no rows")
        qrels[split] = grades_by_query(zip(*table.to_pydict().values(), strict=True), str(file))
    return qrels


def _read_table(folder: Path, name: str) -> pa.Table:
    return pa.concat_tables([_read_file(file, SCHEMAS[name]) for file in _files(folder, name)])


def _files(folder: Path, name: str) -> list[Path]:
    files = [file for suffix in _FORMATS if (file := folder / f"{name}{suffix}").is_file()]
    others = (file for file in (folder / name).glob("*") if file.suffix in _FORMATS and not is_hidden(file.name, "*"))
    files = files or sorted(others)
    if not files:
        expected = ", ".join(f"{name}{suffix}" for suffix in _FORMATS)
        raise UserError(f"retrieval set {folder}: has no {name} ({expected}, or a folder {name} of such files)")
    return files


def _read_file(file: Path, schema: pa.Schema) -> pa.Table:
    """Read the columns of a schema. Only a `title` may be missing, which is then an empty text; ids may be whole numbers."""
    required = [name for name in schema.names if name != "title"]
    rows = open_table(DatasetConfig(files={"": [str(file)]}), "", required).rows
    parts = [schema.empty_table()]
    with user_errors(f"{file}: can't be read", pa.ArrowException, InvalidRow):
        for batch in rows.iter(_BATCH_ROWS):
            columns = {}
            for field in schema:
                values = batch.get(field.name) or [None] * len(batch[required[0]])
                absent = "" if file.suffix == ".tsv" or field.name == "title" else None
                values = [absent if value is None else value for value in values]
                if field.name.endswith("id"):
                    values = [str(value) if isinstance(value, int) else value for value in values]
                if field.type == pa.int32():  # grades may be texts (TSV) or 1.0
                    values = [value if value is None else whole_number(value, "score") for value in values]
                columns[field.name] = pa.array(values, field.type)
            parts.append(pa.table(columns))
    table = pa.concat_tables(parts)
    for name in required:
        if table[name].null_count:
            raise UserError(f"column `{name}` of {file} has {table[name].null_count:,} rows without a value")
    return table
