"""Retrieval by mteb's rules, on tasks that lie on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mteb
import numpy as np
from datasets import Dataset
from mteb._evaluators.retrieval_metrics import calculate_retrieval_scores
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ModelMeta
from tqdm import tqdm

from biphasic.config.errors import UserError
from biphasic.model.encoder import Encoder

SPLIT = "test"
BM25 = "mteb/baseline-bm25s"


@dataclass(frozen=True)
class Scores:
    """What a system reached on a task: mteb's averages, and NDCG@10 for each query, by the query's id."""

    ndcg_at_10: float
    mrr_at_10: float
    recall_at_100: float
    by_query: dict[str, float]


class MTEBEncoder(AbsEncoder):
    """An `Encoder` as mteb calls it.

    Args:
        encoder: its prompts `query` and `document` go before texts of that role.
        name: `organisation/model` in mteb's results.
        revision: of these weights; mteb keeps one result for each.
    """

    def __init__(self, encoder: Encoder, name: str, revision: str):
        self.encoder = encoder
        self.mteb_model_meta = ModelMeta.create_empty({"name": name, "revision": revision})

    def encode(
        self,
        inputs: Any,
        *,
        task_metadata: TaskMetadata,
        hf_split: str,
        hf_subset: str,
        prompt_type: Any = None,
        **kwargs: Any,
    ) -> np.ndarray:
        """Embeddings fp32 [texts, width] of mteb's batches of texts."""
        role = getattr(prompt_type, "value", prompt_type) or ""
        texts = [text for batch in inputs for text in batch["text"]]
        ids = self.encoder.tokenize(texts, self.encoder.prompts.get(role, ""))
        with tqdm(total=len(ids), desc=f"embedding {role or 'text'}", unit="text", leave=False) as bar:
            return self.encoder.embed(ids, bar.update).numpy()


class LocalRetrieval(AbsTaskRetrieval):
    """A retrieval task whose texts are given instead of downloaded."""

    content: dict[str, Any]

    def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
        """Nothing to fetch."""
        self.dataset = {"default": {SPLIT: self.content}}  # pyright: ignore[reportAttributeAccessIssue]
        self.data_loaded = True


def retrieval_task(
    name: str, corpus: dict[str, str], queries: dict[str, str], qrels: dict[str, dict[str, int]]
) -> LocalRetrieval:
    """A task from texts by id, and for each query the relevant documents' ids with their grade.

    Raises:
        UserError: something is empty, or a query has no relevant document in the corpus.
    """
    for what, content in (("corpus", corpus), ("queries", queries)):
        if not content:
            raise UserError(f"retrieval set {name}: the {what} is empty")
    lost = [query for query in queries if not set(qrels.get(query, ())) & corpus.keys()]
    if lost:
        raise UserError(f"retrieval set {name}: {len(lost)} queries have no relevant document, e.g. {lost[0]}")
    metadata = TaskMetadata(
        name=name,
        description=f"{name}: a local retrieval set",
        dataset={"path": f"local/{name}", "revision": "local"},
        type="Retrieval",
        category="t2t",
        modalities=["text"],
        eval_splits=[SPLIT],
        eval_langs=["eng-Latn"],
        main_score="ndcg_at_10",
    )
    content = {
        "corpus": Dataset.from_dict({"id": list(corpus), "title": [""] * len(corpus), "text": list(corpus.values())}),
        "queries": Dataset.from_dict({"id": list(queries), "text": list(queries.values())}),
        "relevant_docs": {query: qrels[query] for query in queries},
        "top_ranked": None,
    }
    return type(name, (LocalRetrieval,), {"metadata": metadata, "content": content})()


def retrieval_from_pairs(
    name: str, files: Sequence[str], query_column: str = "query", document_column: str = "positive"
) -> LocalRetrieval:
    """A task from held-out pairs: the corpus is all documents, and each query's own is the one that is right."""
    columns = read_columns(files, [query_column, document_column])
    queries = {f"q{index}": text for index, text in enumerate(columns[query_column])}
    corpus = {f"d{index}": text for index, text in enumerate(columns[document_column])}
    return retrieval_task(name, corpus, queries, {f"q{index}": {f"d{index}": 1} for index in range(len(queries))})


def read_columns(files: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    """Columns of text from Parquet or JSONL files, one after another.

    Raises:
        UserError: a file is missing or damaged, lacks a column, or there are no rows at all.
    """
    import pyarrow as pa
    import pyarrow.json
    import pyarrow.parquet

    found: dict[str, list[str]] = {name: [] for name in names}
    for file in files:
        try:
            read = pyarrow.parquet.read_table if file.endswith(".parquet") else pyarrow.json.read_json
            table = read(file)
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{file} can't be read ({str(error).splitlines()[0]})") from None
        for name in names:
            if name not in table.column_names:
                have = ", ".join(table.column_names)
                raise UserError(f"{file} has no column `{name}` (it has: {have})")
            values = table[name].to_pylist()
            if not all(isinstance(value, str) for value in values):
                raise UserError(f"column `{name}` of {file} holds something else than text")
            found[name] += values
    if not found[names[0]]:
        raise UserError(f"no rows in {', '.join(files)}")
    return found


def bm25() -> Any:
    """mteb's BM25 baseline (bm25s, English stemmer and stop words)."""
    return mteb.get_model(BM25)


def score(system: Any, task: LocalRetrieval, folder: Path) -> Scores:
    """Score anything that mteb takes: a `MTEBEncoder`, `bm25()`, a SentenceTransformer.

    Args:
        system: what is scored.
        task: on what.
        folder: mteb's own result files and the rankings go there.

    Returns:
        mteb's averages, and the queries' NDCG@10 from the rankings that mteb saved.
    """
    rankings = folder / "rankings" / _name(system)
    result = mteb.evaluate(
        system,
        task,
        cache=mteb.ResultCache(folder),
        overwrite_strategy="always",
        co2_tracker=False,
        prediction_folder=rankings,
        show_progress_bar=False,
    )
    scores: dict[str, float] = result.task_results[0].scores[SPLIT][0]  # pyright: ignore
    saved = json.loads((rankings / f"{task.metadata.name}_predictions.json").read_text(encoding="utf-8"))
    found = calculate_retrieval_scores(saved["default"][SPLIT], task.content["relevant_docs"], [10])
    return Scores(
        ndcg_at_10=scores["ndcg_at_10"],
        mrr_at_10=scores["mrr_at_10"],
        recall_at_100=scores["recall_at_100"],
        by_query={query: values["ndcg_cut_10"] for query, values in found.all_scores.items()},
    )


def _name(system: Any) -> str:
    meta = getattr(system, "mteb_model_meta", None)
    return f"{meta.name}-{meta.revision}".replace("/", "__") if meta is not None else type(system).__name__
