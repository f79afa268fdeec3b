"""Put mteb's results onto a model card, as the hub's `model-index` in its metadata and as tables in its text."""

from __future__ import annotations

import json
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

_PARTS = ("results", "local/results")
_META = "model_meta.json"
_RETRIEVAL = {"ndcg_at_10": "nDCG@10", "mrr_at_10": "MRR@10", "recall_at_100": "Recall@100"}
_TITLE = "Evaluation"
_JUDGED = "-judged"
"""Suffix of the names of tasks that search only the judged documents."""
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
        path: the dataset's id on the hub; None for a task that is not one of mteb's.
        metrics: scores by mteb's metric names, the main metric first.
    """

    task: str
    kind: str
    path: str | None
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
        return self.task.lower().endswith(_JUDGED)

    @property
    def other_main(self) -> str | None:
        """The main metric of a retrieval task, if it isn't one of the metrics that are always shown."""
        name = next(iter(self.metrics))
        return None if name in _RETRIEVAL else name

    @property
    def hub_dataset(self) -> tuple[str | None, ...]:
        """The key by which the hub groups results: it would show two tasks with the same key under the first one's name."""
        return self.kind, self.path or self.task, self.subset, self.split

    def eval_results(self, dataset_is_shared: bool) -> Iterator[EvalResult]:
        """Yield a result in the hub's format for each metric."""
        subset = "" if self.subset == "default" else f" ({self.subset})"
        for name, value in self.metrics.items():
            yield EvalResult(
                task_type=self.kind, task_name=self.kind, dataset_type=self.path or self.task,
                dataset_name=self.task + subset + (", judged documents only" if self.is_judged else ""),
                dataset_config=f"{self.subset} of {self.task}" if dataset_is_shared else self.subset,
                dataset_split=self.split, dataset_revision=self.revision,
                metric_type=name, metric_name=name, metric_value=value,
                source_name=f"mteb {self.version}", source_url="https://github.com/embeddings-benchmark/mteb",
            )  # fmt: skip


def add_results(card: ModelCard, results: Path, model_name: str | None = None) -> None:
    """Put mteb's results into a card's metadata and a separate section, replacing earlier results.

    Args:
        card: a model card, which is changed in place.
        results: a folder with mteb's results (mteb's cache, or the folder of a `job: evaluate`), or its `results/`.
        model_name: the model, needed if the folder has results of several: its name in mteb's `model_meta.json`, or the
            part after the slash; with `@revision` if there are several revisions.

    Raises:
        UserError: there are no results, several models match, or a file can't be read.
    """
    scores = read_results(results, model_name)
    title = re.search(r"^# (.+)$", card.text, re.MULTILINE)
    data: Any = card.data
    data.model_name = title.group(1).strip() if title else "model"
    datasets = Counter(score.hub_dataset for score in scores)
    data.eval_results = [result for score in scores for result in score.eval_results(datasets[score.hub_dataset] > 1)]
    text = re.sub(rf"\n## {_TITLE}\n.*?(?=\n## |\Z)", "", card.text, flags=re.DOTALL)
    end = text.find("\n## Limits\n")
    end = len(text) if end < 0 else end
    card.text = f"{text[:end]}\n## {_TITLE}\n\n{_tables(scores)}{text[end:]}"


def read_results(results: Path, model_name: str | None = None) -> list[CardScore]:
    """Read one model's scores, sorted by task, split and subset. Arguments and errors are as for `add_results`."""
    folders = _model_folders(results, model_name)
    files = sorted(path for folder in folders for path in folder.glob("*.json") if path.name != _META)
    scores = [score for file in files for score in _scores(file)]
    if not scores:
        raise UserError(f"--results {folders[0]}: there are no results of mteb")
    return sorted(scores, key=lambda score: (not score.is_retrieval, score.task, score.split, score.subset))


def _tables(scores: list[CardScore]) -> str:
    """Return Markdown tables, first for retrieval tasks, then for other tasks."""
    retrieval, others = [s for s in scores if s.is_retrieval], [s for s in scores if not s.is_retrieval]
    lines = []
    if retrieval:
        names = [*_RETRIEVAL.values(), *(["main score"] if any(score.other_main for score in retrieval) else [])]
        lines += [_row("task", "subset", "split", *names), "|-|-|-|" + "-:|" * len(names)]
        for score in retrieval:
            values = [f"{score.metrics[name]:.4f}" if name in score.metrics else "" for name in _RETRIEVAL]
            main = score.other_main
            values += [f"{main} {score.metrics[main]:.4f}" if main else ""] * (len(names) - len(values))
            lines.append(_row(score.task, score.subset, score.split, *values))
        lines.append("")
    if others:
        lines += [_row("task", "kind", "subset", "split", "metric", "score"), "|-|-|-|-|-|-:|"]
        for score in others:
            name, value = next(iter(score.metrics.items()))
            lines.append(
                _row(score.task, score.kind, score.subset, score.split, name.replace("_", " "), f"{value:.4f}")
            )
        lines.append("")
    about = _ABOUT.format(versions=", ".join(sorted({score.version for score in scores})))
    return "\n".join(lines) + "\n" + about + (_ABOUT_JUDGED if any(score.is_judged for score in scores) else "")


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _model_folders(results: Path, model_name: str | None) -> list[Path]:
    """Return the result folders of one model revision. `job: evaluate` writes one for mteb's tasks and one for others."""
    roots = [results / part for part in _PARTS if (results / part).is_dir()] or [results]
    models: dict[str, list[Path]] = {}
    for folder in sorted(path for root in roots for path in root.glob("*/*") if any(path.glob("*.json"))):
        name = folder.parent.name.replace("__", "/")
        if (folder / _META).is_file():
            try:
                name = json.loads((folder / _META).read_text(encoding="utf-8")).get("name") or name
            except (OSError, ValueError) as error:
                raise UserError(f"--results {folder / _META} can't be read: {error}") from None
        models.setdefault(f"{name}@{folder.name}", []).append(folder)
    if not models:
        raise UserError(f"--results {results}: there are no results of mteb (MODEL/REVISION/TASK.json)")
    matching = [name for name in models if model_name is None or model_name in _forms(name)]
    if len(matching) != 1:
        problem = "several models have results" if model_name is None else f"{len(matching)} of these are {model_name}"
        raise UserError(f"--results {results}: {problem}: name one with --results-of: {', '.join(models)}")
    return models[matching[0]]


def _forms(name: str) -> tuple[str, ...]:
    """Return the accepted forms of a model's name: with or without organisation and revision."""
    model, _, _ = name.rpartition("@")
    return name, model, model.rpartition("/")[2], name.rpartition("/")[2]


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
            path, revision = (metadata.dataset["path"], metadata.revision) if metadata else (None, None)
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
