"""Everything an evaluation's YAML may say."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from biphasic.config.base import Positive, Section, Size
from biphasic.config.finetune import EncoderConfig, Name

PoolingMode = Literal["mean", "cls", "lasttoken", "max"]
"""Of sentence-transformers' poolings, those that can be evaluated."""


def _model_name(text: str) -> str:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        raise ValueError(f"expected ORGANISATION/MODEL, as on the hub; got {text!r}")
    return text


def _language(text: str) -> str:
    if not re.fullmatch(r"[a-z]{3}-[A-Z][a-z]{3}", text):
        raise ValueError(f"expected a language and its script, such as eng-Latn or deu-Latn; got {text!r}")
    return text


class EvaluatedModel(EncoderConfig):
    """What is scored. How it pools, what goes before its texts and where they are cut is said by its own files."""

    name: Annotated[str, AfterValidator(_model_name)] | None = None
    """`organisation/model`, under which the results are written. Default: the hub id, or `biphasic/` and the run's name."""
    pooling: PoolingMode | None = None
    """For a folder without sentence-transformers' files, which don't say how it pools."""


class EvaluateConfig(Section):
    """`job: evaluate`: an encoder in, scores by mteb's rules out."""

    job: Literal["evaluate"]
    run_name: Name
    output: str = "runs"
    """The run writes to `<output>/<run_name>`; of an official task, mteb's own files to `results/` there."""
    cache: str = "runs/cache"
    """Folder of this machine for embeddings and what is brought from buckets; all runs share it."""
    cache_limit: Size = "100gb"
    """What embeddings may take of it. Those that were not used for longest go first."""
    model: EvaluatedModel
    tasks: list[str] = []
    """mteb's tasks by name: MSMARCO, NQ, MultiLongDocRetrieval, …"""
    benchmarks: list[str] = []
    """mteb's benchmarks by name, such as NanoBEIR: all their tasks."""
    subsets: dict[str, Annotated[list[str], Field(min_length=1)]] = {}
    """Of a task with several languages, those that are run: `MultiLongDocRetrieval: [en]`. Default: all."""
    splits: dict[str, Annotated[list[str], Field(min_length=1)]] = {}
    """Of a task or set, those that are scored. Default: those that mteb's leaderboard has; all of a set's own."""
    sets: list[str] = []
    """Folders in BEIR's layout: corpus, queries and qrels, as JSONL or Parquet. A folder's name is the task's."""
    sets_language: Annotated[str, AfterValidator(_language)] = "eng-Latn"
    """Of the folders in `sets`, as ISO 639-3 and script: BM25's stemmer and stop words go by it."""
    documents: Annotated[list[Literal["full", "judged"]], Field(min_length=1)] = ["full"]
    """`full`: the corpus. `judged`: of it, what any judgment of the scored splits names, as in the paper; named
    `<task>-judged` in results."""
    mirror: str | None = None
    """Folder with copies of the hub's data sets, as `<mirror>/mteb/nq`. No data comes from the hub then."""
    baselines: list[Literal["bm25", "random"]] = ["bm25", "random"]
    """Scored on the same retrieval sets, so that a number can be read."""
    tokens_at_once: Positive | Literal["auto"] = "auto"
    """Tokens in a forward pass, about. `auto`: 1,024 on CPUs, 65,536 on GPUs."""
    precision: Literal["auto", "fp32", "amp_bf16"] = "auto"
    """`auto`: `amp_bf16` on GPUs, `fp32` on CPUs."""
