"""Draw a study's tree as a Mermaid flowchart, which GitHub and the documentation site render."""

from __future__ import annotations

from biphasic.config.study import StudyConfig
from biphasic.config.timeline import MLMPhase, Phase, RampConfig, resolve_phases
from biphasic.study.tree import study_runs

_COLORS = {"clm": "#cfe0f5", "mlm": "#f8d5b8"}
"""Color of a run by the objective of its last phase."""


def draw_study(study: StudyConfig) -> str:
    """Return the tree of a checked study as a Mermaid flowchart.

    A node is a run with its phases. A solid arrow comes from the run whose checkpoint a run starts from, and names the
    batch. A dotted arrow comes from the run that a run continues. Raises a UserError if two histories are equal.
    """
    configs, tree = study_runs(study)
    ids = {name: f"run{number}" for number, name in enumerate(tree)}
    lines = ["flowchart LR", *(f"  classDef {name} fill:{color},stroke:#666" for name, color in _COLORS.items())]
    for name, run in tree.items():
        spans = resolve_phases(configs[name].objective.phases, configs[name].max_duration)
        phases = ", ".join(_phase(span.phase) for span in spans)
        lines.append(f'  {ids[name]}["{name}<br>{phases}; {run.length:,} batches"]:::{spans[-1].phase.name}')
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
