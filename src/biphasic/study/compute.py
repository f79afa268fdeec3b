"""Add up what the runs of a study have trained, from their own records, to compare with the plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from biphasic.config.plan import training_flops
from biphasic.config.study import StudyConfig
from biphasic.config.study_models import expand
from biphasic.study.plan import StudyPlan, architecture_in
from biphasic.study.tree import study_tree
from biphasic.training.metrics_file import trained_batches

_METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class TrainedCompute:
    """What the runs of a study have trained. A batch that was trained again after an interruption counts again."""

    batches: int
    flops: float | None
    """None if the size of a model is unknown."""
    without_record: tuple[str, ...]
    """Models whose run has no metrics on this machine."""


def trained_compute(study: StudyConfig) -> TrainedCompute:
    """Read the metrics of all runs in the study's local folder.

    Raises:
        UserError: two models have the same history.
    """
    configs = expand(study)
    tree = study_tree(configs, study.continues, study.stages.checkpoints)
    total, flops, without_record = 0, list[float | None](), list[str]()
    for name, config in configs.items():
        file = Path(study.local_folder) / name / _METRICS_FILE
        if not file.is_file():
            without_record.append(name)
            continue
        batches, architecture = trained_batches(file.read_text(encoding="utf-8")), architecture_in(name, tree, configs)
        total += len(batches)
        flops += [
            None if architecture is None else training_flops(config, architecture, batch - 1, batch)
            for batch in batches
        ]
    known = [value for value in flops if value is not None]
    return TrainedCompute(total, sum(known) if len(known) == len(flops) else None, tuple(without_record))


def describe_compute(trained: TrainedCompute, plan: StudyPlan) -> str:
    """Format the totals beside those of the plan, and of training each model alone."""
    if trained.without_record:
        return f"what was trained is not known: no metrics here of {', '.join(trained.without_record)}"
    lines = [f"trained, by the runs' records: {trained.batches:,} batches{_flops(trained.flops)}"]
    for label, totals in (("planned", plan.shared), ("each model alone", plan.alone)):
        if trained.flops is not None and totals.flops:
            compared, unit = trained.flops / totals.flops, "FLOPs"
        else:
            compared, unit = trained.batches / totals.batches, "batches"
        lines.append(
            f"  {label}: {totals.batches:,} batches{_flops(totals.flops)}; trained {compared:.1%} of these {unit}"
        )
    return "\n".join(lines)


def _flops(flops: float | None) -> str:
    return "" if flops is None else f", {flops:.4g} FLOPs"
