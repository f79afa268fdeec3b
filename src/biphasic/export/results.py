"""Add mteb's results to a model card, as the hub's `model-index` in its metadata and as a table in its text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from biphasic.errors import UserError
from biphasic.storage import user_errors

_RETRIEVAL = {"ndcg_at_10": "nDCG@10", "mrr_at_10": "MRR@10", "recall_at_100": "Recall@100"}
_ABOUT_JUDGED = """
Tasks named `-judged` search only judged documents, not the complete corpus. That is easier: their scores can't be compared \
with published ones.
"""


def add_results(card: ModelCard, results: Path, model_name: str | None = None) -> None:
    """Add mteb's results to a card's metadata and in a separate section, in place of earlier results.

    Arguments and errors are those of `read_results`.
    """
    scores = read_results(results, model_name)
    title = re.search(r"^# (.+)$", card.text, re.MULTILINE)
    data: Any = card.data
    data.model_name = title.group(1).strip() if title else "model"
    data.eval_results = scores
    text = re.sub(r"\n## Evaluation\n.*?(?=\n## |\Z)", "", card.text, flags=re.DOTALL)
    before, limits, after = text.partition("\n## Limits\n")
    card.text = f"{before}\n## Evaluation\n\n{_table(scores)}{limits}{after}"


def _table(scores: list[EvalResult]) -> str:
    """Return a Markdown table with a row for each task, subset and split."""
    lines = ["| task | kind | subset | split | scores |", "|-|-|-|-|-|"]
    for row, group in groupby(scores, lambda s: (s.dataset_name, s.task_type, s.dataset_config, s.dataset_split)):
        metrics = (f"{_RETRIEVAL.get(s.metric_type, s.metric_type)} {s.metric_value:.4f}" for s in group)
        cells = [str(cell).replace("|", r"\|") for cell in (*row, ", ".join(metrics))]
        lines.append(f"| {' | '.join(cells)} |")
    versions = ", ".join(sorted({str(score.source_name) for score in scores}))
    about = _ABOUT_JUDGED if any("-judged" in score.dataset_name.lower() for score in scores) else ""
    return "\n".join([*lines, f"\nScores from 0 to 1, computed by {versions}.\n"]) + about


def read_results(results: Path, model_name: str | None = None) -> list[EvalResult]:
    """Read one model's scores, sorted by task.

    `results` is a folder with mteb's results (mteb's cache, or the folder of a `job: evaluate`), or its `results/`.
    `model_name` is needed if it has results of several models: the name in mteb, or its part after the slash; with
    `@revision` if there are several revisions.

    Raises:
        UserError: there are no results, several models match, or a file can't be read.
    """
    # `job: evaluate` writes one folder for mteb's tasks and one for others.
    roots = [results / part for part in ("results", "local/results") if (results / part).is_dir()] or [results]
    models: dict[str, list[Path]] = {}
    for file in sorted(path for root in roots for path in root.glob("*/*/*.json") if path.name != "model_meta.json"):
        models.setdefault(f"{file.parts[-3].replace('__', '/')}@{file.parts[-2]}", []).append(file)
    if not models:
        raise UserError(f"--results {results}: there are no results of mteb (MODEL/REVISION/TASK.json)")
    # The name may lack the organisation, the revision or both.
    matching = [name for name in models if model_name is None or f"/{model_name}@" in f"/{name}@"]
    if len(matching) != 1:
        problem = "several models have results" if model_name is None else f"{len(matching)} models match {model_name}"
        raise UserError(f"--results {results}: {problem}: name one with --results-of: {', '.join(models)}")
    files = sorted(models[matching[0]], key=lambda file: file.name)
    scores = [score for file in files for score in _scores(file)]
    # huggingface_hub would merge the results of two tasks with the same dataset under the first task's name.
    names = {(score.unique_identifier, score.dataset_name) for score in scores}
    tasks = Counter(identifier for identifier, _ in names)
    for score in scores:
        if tasks[score.unique_identifier] > 1:
            score.dataset_config = f"{score.dataset_config} of {score.dataset_name}"
    return scores


def _scores(file: Path) -> Iterator[EvalResult]:
    """Yield the main score and, for retrieval, the other retrieval metrics of each of a task's subsets and splits."""
    from mteb.results import TaskResult

    with user_errors(f"--results {file} can't be read as a result of mteb", ValueError):
        result = TaskResult.from_disk(file, load_historic_data=False)
    metadata = None
    with suppress(KeyError):
        # A local task may have the name of one of mteb's, but its dataset revision differs.
        metadata = result.task.metadata if result.task.metadata.revision == result.dataset_revision else None
    for split, subset in ((split, subset) for split, subsets in result.scores.items() for subset in subsets):
        retrieval = {name: subset[name] for name in _RETRIEVAL if name in subset}
        main = metadata.main_score if metadata else "ndcg_at_10" if retrieval else "main_score"
        suffix = "" if subset["hf_subset"] == "default" else f" ({subset['hf_subset']})"
        kind = metadata.type if metadata else "Retrieval" if retrieval else "Evaluation"
        for name, value in {main: subset["main_score"], **retrieval}.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise UserError(f"--results {file}: {name} of {subset['hf_subset']} is {value!r}, not a number")
            yield EvalResult(
                task_type=kind,
                task_name=kind,
                dataset_type=metadata.dataset["path"] if metadata else result.task_name,
                dataset_name=result.task_name + suffix,
                dataset_config=subset["hf_subset"],
                dataset_split=split,
                dataset_revision=metadata.revision if metadata else None,
                metric_type=name,
                metric_name=name,
                metric_value=float(value),
                source_name=f"mteb {result.mteb_version or '(version unknown)'}",
                source_url="https://github.com/embeddings-benchmark/mteb",
            )
