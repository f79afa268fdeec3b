"""Schema of an evaluation YAML (`job: evaluate`): keys, types, defaults and checks."""

from os.path import abspath, basename
from typing import Annotated, Literal

from pydantic import Field

from biphasic.config.base import Bytes, KeyProblems, LocalPath, Names, Positive, RunConfig, Size, distinct, matching
from biphasic.config.finetune import EncoderConfig
from biphasic.model.architecture import PoolingMode


class EvaluatedModel(EncoderConfig):
    """The encoder to score. Pooling, prompts and maximum text length are read from its files."""

    name: Annotated[str, matching(r"[\w.-]+/[\w.-]+", "ORGANISATION/MODEL, as on the hub")] | None = None
    """`organisation/model` name for the results. Default: the hub id, or `biphasic/` and the run's name."""
    pooling: PoolingMode | None = None
    """Pooling mode. Required for a folder without sentence-transformers' files, which specify the pooling."""
    dimension: Positive | None = None
    """Number of first values of each embedding to use, of a Matryoshka model. Null: its `truncate_dim`, or all."""


def set_name(path: str) -> str:
    """Return the name of a local dataset's task: that of its folder, also if the path is `.` or ends with `..`."""
    return basename(abspath(path))


class EvaluateConfig(RunConfig):
    """`job: evaluate`: score an encoder with mteb. mteb's result files of official tasks are in the run's `results/`."""

    job: Literal["evaluate"]  # pyright: ignore[reportIncompatibleVariableOverride]
    cache: LocalPath = "runs/cache"
    """Local folder for embeddings and downloads from buckets, shared by all runs."""
    cache_limit: Size = Bytes(100 * 10**9)
    """Maximum size of the cached embeddings, such as 100gb. The least recently used are deleted first."""
    model: EvaluatedModel
    """The encoder to score."""
    tasks: Annotated[list[str], distinct] = []
    """Names of mteb tasks: MSMARCO, NQ, MultiLongDocRetrieval, …"""
    benchmarks: Annotated[list[str], distinct] = []
    """Names of mteb benchmarks, such as NanoBEIR. All tasks of a benchmark are run."""
    subsets: dict[str, Names] = {}
    """Languages to run, by task: `MultiLongDocRetrieval: [en]`. Default: all."""
    splits: dict[str, Names] = {}
    """Splits to score, by task. Default: the splits of mteb's leaderboard; for a folder in `sets`, all splits."""
    sets: Annotated[list[LocalPath], distinct] = []
    """Folders of retrieval datasets in BEIR's layout (JSONL or Parquet corpus, queries and qrels). Each names its task."""
    sets_language: Annotated[
        str, matching(r"[a-z]{3}-[A-Z][a-z]{3}", "a language and its script, such as eng-Latn or deu-Latn")
    ] = "eng-Latn"
    """Language of the datasets in `sets`, as ISO 639-3 code and script. It determines BM25's stemmer and stop words."""
    documents: Annotated[list[Literal["full", "judged"]], Field(min_length=1), distinct] = ["full"]
    """`full`: search the complete corpus. `judged`: search only documents with a judgment in the scored splits, as in the
    paper; the results are named `<task>-judged`. Only tasks of retrieval and reranking have documents;
    others need `full`."""
    mirror: LocalPath | None = None
    """Folder with copies of hub datasets, e.g. `<mirror>/mteb/nq`. If given, no data is read from the hub."""
    baselines: Annotated[list[Literal["bm25"]], distinct] = ["bm25"]
    """Baselines to score on the same retrieval datasets; an empty list leaves BM25 out."""
    precision: Literal["auto", "fp32", "amp_bf16"] = "auto"
    """`auto`: `amp_bf16` on GPUs, `fp32` on CPUs."""

    def problems(self, ranks: int) -> KeyProblems:
        if not (self.tasks or self.benchmarks or self.sets):
            yield ["tasks"], "is empty, and so are benchmarks and sets: nothing would be scored"
        if not self.sets and not self.is_default("sets_language"):
            yield ["sets_language", "sets"], "has no effect without sets"
        names = [set_name(path) for path in self.sets]
        for index, name in enumerate(names):
            if name in names[:index]:
                yield ["sets"], f"has two folders with the same name, {name}: results are stored by it"
            if name in self.subsets:
                yield [f"subsets.{name}"], "is a folder in sets, which has no subsets"
        for key in ("subsets", "splits"):
            for name in getattr(self, key):
                if not self.benchmarks and name not in (*self.tasks, *names):
                    yield [f"{key}.{name}"], "expected a name from tasks, benchmarks or sets"
