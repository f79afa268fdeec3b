"""Draw a study's tree as a Mermaid flowchart, which GitHub and the documentation's site show as a picture."""

from __future__ import annotations

from collections.abc import Mapping

from biphasic.config.pretrain import PretrainConfig
from biphasic.config.study import StudyConfig
from biphasic.config.study_models import expand
from biphasic.config.timeline import MLMPhase, Phase, RampConfig, resolve_phases
from biphasic.study.tree import StudyRun, study_tree

_COLORS = {"clm": "#cfe0f5", "mlm": "#f8d5b8"}
"""Color of a run by the objective of its last phase."""


def draw_study(study: StudyConfig) -> str:
    """Return the tree of a checked study as the text of a Mermaid flowchart.

    A node is a run with its phases. An arrow comes from the run whose checkpoint it starts from, and names the batch. A
    dotted one comes from the run with whose final weights it starts.

    Raises:
        UserError: two models have the same history.
    """
    configs = expand(study)
    return draw_tree(study_tree(configs, study.continues, study.stages.checkpoints), configs)


def draw_tree(tree: Mapping[str, StudyRun], configs: Mapping[str, PretrainConfig]) -> str:
    """Return the tree as the text of a Mermaid flowchart."""
    ids = {name: f"run{number}" for number, name in enumerate(tree)}
    lines = ["flowchart LR", *(f"  classDef {name} fill:{color},stroke:#666" for name, color in _COLORS.items())]
    for name, run in tree.items():
        config = configs[name]
        phases = [_phase(span.phase) for span in resolve_phases(config.objective.phases, config.max_duration)]
        last = config.objective.phases[-1].name
        lines.append(f'  {ids[name]}["{name}<br>{", ".join(phases)}; {run.length:,} batches"]:::{last}')
        if run.parent is not None:
            lines.append(f'  {ids[run.parent]} -- "{run.start:,}" --> {ids[name]}')
        elif run.continues is not None:
            lines.append(f"  {ids[run.continues]} -.-> {ids[name]}")
    return "\n".join([*lines, ""])


def _phase(phase: Phase) -> str:
    if not isinstance(phase, MLMPhase):
        return "CLM"
    ratio = phase.masking_ratio
    return f"MLM {ratio.start:.0%} to {ratio.end:.0%}" if isinstance(ratio, RampConfig) else f"MLM {ratio:.0%}"
