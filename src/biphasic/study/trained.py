"""Add up what the runs of a study have trained, from their metrics, to compare it with the plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from biphasic.config.plan import training_flops
from biphasic.config.study import StudyConfig
from biphasic.study.plan import StudyPlan, architecture_in
from biphasic.study.tree import study_runs
from biphasic.training.metrics_file import trained_batches

_METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class TrainedTotals:
    """What the runs of a study have trained. A batch that is trained again after an interruption counts twice."""

    batches: int
    flops: float | None
    """None if the size of a model is unknown."""
    without_record: tuple[str, ...]
    """Models whose run has no metrics on this machine."""


def trained_totals(study: StudyConfig) -> TrainedTotals:
    """Read the metrics of all runs in the study's local folder. Raises a UserError if two histories are equal."""
    configs, tree = study_runs(study)
    total, flops, without_record = 0, list[float | None](), list[str]()
    for name, config in configs.items():
        file = Path(study.local_folder) / name / _METRICS_FILE
        if not file.is_file():
            without_record.append(name)
            continue
        shape = architecture_in(name, tree, configs)
        for batch in trained_batches(file.read_text(encoding="utf-8")):
            total += 1
            flops.append(None if shape is None else training_flops(config, shape, batch - 1, batch))
    known = [value for value in flops if value is not None]
    return TrainedTotals(total, sum(known) if len(known) == len(flops) else None, tuple(without_record))


def describe_totals(trained: TrainedTotals, plan: StudyPlan) -> str:
    """Format the totals, compared with the plan's and with those of training each model alone."""
    if trained.without_record:
        return f"the trained totals are unknown: this machine has no metrics of {', '.join(trained.without_record)}"
    lines = [f"trained, by the runs' records: {_amount(trained.batches, trained.flops)}"]
    for label, totals in (("planned", plan.shared), ("each model alone", plan.alone)):
        if trained.flops is not None and totals.flops:
            share, unit = trained.flops / totals.flops, "FLOPs"
        else:
            share, unit = trained.batches / totals.batches, "batches"
        lines.append(f"  {label}: {_amount(totals.batches, totals.flops)}; trained {share:.1%} of these {unit}")
    return "\n".join(lines)


def _amount(batches: int, flops: float | None) -> str:
    return f"{batches:,} batches" + ("" if flops is None else f", {flops:.4g} FLOPs")
