"""Results of mteb on a model card: the hub's `model-index` in its metadata, and a table in its text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from biphasic.config.errors import UserError
from biphasic.export.metadata import block, checked, split

_PARTS = ("results", "local/results")
_META = "model_meta.json"
_RETRIEVAL = ("ndcg_at_10", "mrr_at_10", "recall_at_100")
_SHOWN = {"ndcg_at_10": "nDCG@10", "mrr_at_10": "MRR@10", "recall_at_100": "Recall@100"}
_TITLE = "Evaluation"
_JUDGED = "-judged"
"""How the names of tasks end whose corpus is the judged documents only."""
_ABOUT = "Scores from 0 to 1, computed by mteb {versions}.\n"
_ABOUT_JUDGED = """
In tasks named `…-judged` the search is among the judged documents only. That is easier than the whole corpus: their scores \
can't be compared with published ones.
"""


@dataclass(frozen=True)
class Score:
    """One subset of one split of a task; `metrics` by mteb's names, the main one first."""

    task: str
    kind: str
    path: str | None
    """The dataset on the hub, where the task is mteb's own."""
    revision: str | None
    subset: str
    split: str
    metrics: dict[str, float]
    version: str

    @property
    def retrieval(self) -> bool:
        """Whether documents were ranked."""
        return _RETRIEVAL[0] in self.metrics

    @property
    def judged(self) -> bool:
        """Whether only the judged documents were searched."""
        return self.task.lower().endswith(_JUDGED)

    @property
    def dataset(self) -> str:
        """The dataset's name on the card."""
        subset = "" if self.subset == "default" else f" ({self.subset})"
        return self.task + subset + (", judged documents only" if self.judged else "")


def with_results(card: str, results: Path, model_name: str | None = None) -> str:
    """A card with mteb's results, in place of earlier ones.

    Args:
        card: of a model.
        results: a folder that mteb has written results to (its own cache, `job: evaluate`'s), or its `results/`.
        model_name: whose results, where there are several models': as in mteb's `model_meta.json`, or its part behind the
            slash; with `@revision` where there are several of it.

    Returns:
        The card, with `model-index` in its metadata and a section of its own.

    Raises:
        UserError: there are no results, or several models', or a file can't be read.
    """
    scores = read_results(results, model_name)
    content, body = split(card)
    title = re.search(r"^# (.+)$", body, re.MULTILINE)
    index = {"name": title.group(1).strip() if title else "model", "results": [_entry(score) for score in scores]}
    body = re.sub(rf"\n## {_TITLE}\n.*?(?=\n## |\Z)", "", body, flags=re.DOTALL)
    at = body.find("\n## Limits\n")
    at = len(body) if at < 0 else at
    head = block({**content, "model-index": [index]})
    return checked(f"{head}{body[:at]}\n## {_TITLE}\n\n{table(scores)}{body[at:]}")


def read_results(results: Path, model_name: str | None = None) -> list[Score]:
    """The scores of one model, by task, split and subset. Arguments and errors as for `with_results`."""
    folders = _chosen(results, model_name)
    files = sorted(path for folder in folders for path in folder.glob("*.json") if path.name != _META)
    found = [score for file in files for score in _scores(file)]
    if not found:
        raise UserError(f"--results {folders[0]}: mteb has left no results here")
    return sorted(found, key=lambda score: (not score.retrieval, score.task, score.split, score.subset))


def table(scores: list[Score]) -> str:
    """Markdown tables: of tasks that rank documents, then of the others."""
    ranked, others = [s for s in scores if s.retrieval], [s for s in scores if not s.retrieval]
    lines = []
    if ranked:
        names = [*_SHOWN.values(), *(["main score"] if any(_other_main(score) for score in ranked) else [])]
        lines += [_row("task", "subset", "split", *names), "|-|-|-|" + "-:|" * len(names)]
        for score in ranked:
            values = [f"{score.metrics[name]:.4f}" if name in score.metrics else "" for name in _RETRIEVAL]
            main = _other_main(score)
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
    return "\n".join(lines) + "\n" + about + (_ABOUT_JUDGED if any(score.judged for score in scores) else "")


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _other_main(score: Score) -> str | None:
    """The main metric of a task that ranks, where it is another than is shown anyway."""
    name = next(iter(score.metrics))
    return None if name in _RETRIEVAL else name


def _chosen(results: Path, wanted: str | None) -> list[Path]:
    """The folders of one model's one revision: of official tasks, and of others (`job: evaluate` keeps these apart)."""
    roots = [results / part for part in _PARTS if (results / part).is_dir()] or [results]
    found: dict[str, list[Path]] = {}
    for folder in sorted(path for root in roots for path in root.glob("*/*") if any(path.glob("*.json"))):
        meta = _read(folder / _META) if (folder / _META).is_file() else {}
        name = meta.get("name") or folder.parent.name.replace("__", "/")
        found.setdefault(f"{name}@{folder.name}", []).append(folder)
    if not found:
        raise UserError(f"--results {results}: no results of mteb are here (MODEL/REVISION/TASK.json)")
    names = [name for name in found if wanted is None or wanted in _ways(name)]
    if len(names) != 1:
        what = "several models have results" if wanted is None else f"{len(names)} of these are {wanted}"
        raise UserError(f"--results {results}: {what}: name one with --results-of: {', '.join(found)}")
    return found[names[0]]


def _ways(name: str) -> tuple[str, ...]:
    """How a model's results may be named."""
    model, _, _ = name.rpartition("@")
    return name, model, model.rpartition("/")[2], name.rpartition("/")[2]


def _scores(file: Path) -> list[Score]:
    from mteb import get_task
    from mteb.results import TaskResult

    try:
        result = TaskResult.from_disk(file, load_historic_data=False)
    except (ValueError, OSError) as error:
        raise UserError(f"--results {file} can't be read as a result of mteb: {str(error).splitlines()[0]}") from None
    try:
        metadata = get_task(result.task_name).metadata
    except KeyError:
        metadata = None
    # A person's own set may bear the name of one of mteb's; its revision is another then.
    if metadata is not None and metadata.revision != result.dataset_revision:
        metadata = None
    found = []
    for part, subsets in result.scores.items():
        for values in subsets:
            retrieval = "ndcg_at_10" in values
            kind = metadata.type if metadata else "Retrieval" if retrieval else "Evaluation"
            found.append(
                Score(
                    result.task_name,
                    str(kind),
                    str(metadata.dataset["path"]) if metadata else None,
                    str(metadata.revision) if metadata else None,
                    values["hf_subset"],
                    part,
                    _metrics(values, metadata.main_score if metadata else None, file),
                    result.mteb_version or "(version unknown)",
                )
            )
    return found


def _metrics(values: Mapping[str, Any], main: str | None, file: Path) -> dict[str, float]:
    """The main score by its own name, then what is said of every retrieval."""
    retrieval = [name for name in _RETRIEVAL if _RETRIEVAL[0] in values and name in values]
    if main is None:
        same = [name for name in retrieval if values[name] == values["main_score"]]
        main = same[0] if same else "main_score"
    chosen = {main: values["main_score"], **{name: values[name] for name in retrieval}}
    for name, value in chosen.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"--results {file}: {name} of {values['hf_subset']} is {value!r}, not a number")
    return {name: float(value) for name, value in chosen.items()}


def _entry(score: Score) -> dict[str, Any]:
    """The hub's form. One entry each: the hub's own writer would join tasks that share a dataset under one name."""
    dataset = {
        "name": score.dataset,
        "type": score.path or score.task,
        "config": score.subset,
        "split": score.split,
        "revision": score.revision,
    }
    return {
        "task": {"type": score.kind, "name": score.kind},
        "dataset": {key: value for key, value in dataset.items() if value is not None},
        "metrics": [{"type": name, "value": value, "name": name} for name, value in score.metrics.items()],
        "source": {"name": f"mteb {score.version}", "url": "https://github.com/embeddings-benchmark/mteb"},
    }


def _read(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--results {file} can't be read: {error}") from None
