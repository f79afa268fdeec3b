"""Put mteb's results onto a model card, as the hub's `model-index` in its metadata and as tables in its text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from biphasic.errors import UserError
from biphasic.storage import first_line

_RETRIEVAL = {"ndcg_at_10": "nDCG@10", "mrr_at_10": "MRR@10", "recall_at_100": "Recall@100"}
_ABOUT = "Scores from 0 to 1, computed by mteb {versions}.\n"
_ABOUT_JUDGED = """
Tasks named `…-judged` search the judged documents only. That is easier than searching the complete corpus: their scores \
can't be compared with published ones.
"""


@dataclass(frozen=True)
class CardScore:
    """The scores for one subset of a task's split.

    Attributes:
        kind: mteb's type of the task, such as `Retrieval`.
        dataset: the dataset's id on the hub; the task's name if the task is not one of mteb's.
        metrics: scores by mteb's metric names, the main metric first.
    """

    task: str
    kind: str
    dataset: str
    revision: str | None
    subset: str
    split: str
    metrics: dict[str, float]
    version: str

    @property
    def is_retrieval(self) -> bool:
        """Whether the task ranks documents."""
        return "ndcg_at_10" in self.metrics

    @property
    def is_judged(self) -> bool:
        """Whether only the judged documents are searched."""
        return self.task.lower().endswith("-judged")


def add_results(card: ModelCard, results: Path, model_name: str | None = None) -> None:
    """Put mteb's results into a card's metadata and a separate section, replacing earlier results.

    Args:
        card: a model card, which is changed in place.
        results: a folder with mteb's results (mteb's cache, or the folder of a `job: evaluate`), or its `results/`.
        model_name: the model, needed if the folder has results of several: its name in mteb, or the part after the slash;
            with `@revision` if there are several revisions.

    Raises:
        UserError: there are no results, several models match, or a file can't be read.
    """
    scores = read_results(results, model_name)
    title = re.search(r"^# (.+)$", card.text, re.MULTILINE)
    data: Any = card.data
    data.model_name = title.group(1).strip() if title else "model"
    data.eval_results = list(_eval_results(scores))
    text = re.sub(r"\n## Evaluation\n.*?(?=\n## |\Z)", "", card.text, flags=re.DOTALL)
    before, limits, after = text.partition("\n## Limits\n")
    card.text = f"{before}\n## Evaluation\n\n{_tables(scores)}{limits}{after}"


def _eval_results(scores: list[CardScore]) -> Iterator[EvalResult]:
    """Yield a result in the hub's format for each metric."""
    # The hub would show two tasks with the same dataset, subset and split under the first one's name.
    datasets = Counter((score.kind, score.dataset, score.subset, score.split) for score in scores)
    for score in scores:
        shared = datasets[score.kind, score.dataset, score.subset, score.split] > 1
        subset = "" if score.subset == "default" else f" ({score.subset})"
        for name, value in score.metrics.items():
            yield EvalResult(
                task_type=score.kind,
                task_name=score.kind,
                dataset_type=score.dataset,
                dataset_name=score.task + subset + (", judged documents only" if score.is_judged else ""),
                dataset_config=f"{score.subset} of {score.task}" if shared else score.subset,
                dataset_split=score.split,
                dataset_revision=score.revision,
                metric_type=name,
                metric_name=name,
                metric_value=value,
                source_name=f"mteb {score.version}",
                source_url="https://github.com/embeddings-benchmark/mteb",
            )


def _tables(scores: list[CardScore]) -> str:
    """Return Markdown tables, first for retrieval tasks, then for other tasks."""
    retrieval, others = [s for s in scores if s.is_retrieval], [s for s in scores if not s.is_retrieval]
    lines = []
    if retrieval:
        mains = [next(iter(score.metrics)) for score in retrieval]
        more = ["main score"] if set(mains) - set(_RETRIEVAL) else []
        lines += [_row("task", "subset", "split", *_RETRIEVAL.values(), *more), "|-|-|-|-:|-:|-:|" + "-:|" * len(more)]
        for main, score in zip(mains, retrieval, strict=True):
            values = [f"{score.metrics[name]:.4f}" if name in score.metrics else "" for name in _RETRIEVAL]
            if more:
                values.append("" if main in _RETRIEVAL else f"{main} {score.metrics[main]:.4f}")
            lines.append(_row(score.task, score.subset, score.split, *values))
        lines.append("")
    if others:
        lines += [_row("task", "kind", "subset", "split", "metric", "score"), "|-|-|-|-|-|-:|"]
        for score in others:
            main, value = next(iter(score.metrics.items()))
            lines.append(_row(score.task, score.kind, score.subset, score.split, main, f"{value:.4f}"))
        lines.append("")
    about = _ABOUT.format(versions=", ".join(sorted({score.version for score in scores})))
    return "\n".join([*lines, about]) + (_ABOUT_JUDGED if any(score.is_judged for score in scores) else "")


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def read_results(results: Path, model_name: str | None = None) -> list[CardScore]:
    """Read one model's scores, sorted by task, split and subset. Arguments and errors are as for `add_results`."""
    # `job: evaluate` writes one folder for mteb's tasks and one for others.
    roots = [results / part for part in ("results", "local/results") if (results / part).is_dir()] or [results]
    models: dict[str, list[Path]] = {}
    for file in sorted(path for root in roots for path in root.glob("*/*/*.json") if path.name != "model_meta.json"):
        name = f"{file.parts[-3].replace('__', '/')}@{file.parts[-2]}"
        models.setdefault(name, []).append(file)
    if not models:
        raise UserError(f"--results {results}: there are no results of mteb (MODEL/REVISION/TASK.json)")
    # With or without organisation and revision.
    matching = [name for name in models if model_name is None or f"/{model_name}@" in f"/{name}@"]
    if len(matching) != 1:
        problem = "several models have results" if model_name is None else f"{len(matching)} of these are {model_name}"
        raise UserError(f"--results {results}: {problem}: name one with --results-of: {', '.join(models)}")
    scores = [score for file in models[matching[0]] for score in _scores(file)]
    return sorted(scores, key=lambda score: (not score.is_retrieval, score.task, score.split, score.subset))


def _scores(file: Path) -> Iterator[CardScore]:
    from mteb import get_task
    from mteb.results import TaskResult

    try:
        result = TaskResult.from_disk(file, load_historic_data=False)
    except (ValueError, OSError) as error:
        raise UserError(f"--results {file} can't be read as a result of mteb: {first_line(error)}") from None
    try:
        metadata = get_task(result.task_name).metadata
    except KeyError:
        metadata = None
    # A local task may have the name of one of mteb's, but its dataset revision differs.
    if metadata is not None and metadata.revision != result.dataset_revision:
        metadata = None
    for split, subsets in result.scores.items():
        for values in subsets:
            kind = metadata.type if metadata else "Retrieval" if "ndcg_at_10" in values else "Evaluation"
            path, revision = (metadata.dataset["path"], metadata.revision) if metadata else (result.task_name, None)
            metrics = _metrics(values, metadata.main_score if metadata else None, file)
            version = result.mteb_version or "(version unknown)"
            yield CardScore(result.task_name, kind, path, revision, values["hf_subset"], split, metrics, version)


def _metrics(values: Mapping[str, Any], main: str | None, file: Path) -> dict[str, float]:
    """Return the main score under its metric name, then the retrieval metrics."""
    retrieval = [name for name in _RETRIEVAL if "ndcg_at_10" in values and name in values]
    if main is None:
        main = next((name for name in retrieval if values[name] == values["main_score"]), "main_score")
    metrics = {main: values["main_score"], **{name: values[name] for name in retrieval}}
    for name, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"--results {file}: {name} of {values['hf_subset']} is {value!r}, not a number")
    return {name: float(value) for name, value in metrics.items()}
