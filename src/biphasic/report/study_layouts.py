"""Choose the models of each of the paper's figures, and their line and position in it.

Every function takes the facets of all models with scores, by name, and raises `MissingModels` if the figure needs others.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from biphasic.report.study_models import Facets, parameters_in_size, short_steps

Models = Mapping[str, Facets]
PAPER_RATIO = 0.4
"""The masking ratio of most of the paper's models. It decides between ratios that equally many models have."""


class MissingModels(Exception):
    """A figure can't be drawn; the message says which models it needs."""


@dataclass(frozen=True)
class Placement:
    """A model's place in a figure."""

    line: str
    """The line to which the point belongs, as in the legend."""
    x: float
    model: str


@dataclass(frozen=True)
class Layout:
    """The models of a figure."""

    placements: tuple[Placement, ...]
    """By line, and within a line by x."""
    ticks: Mapping[float, str] | None = None
    """The labels of an axis that has no numbers, by x."""
    hidden: Mapping[str, str] = field(default_factory=dict)
    """Models that aren't shown, by name, each with the model that has its place."""


@dataclass(frozen=True)
class StudyFigure:
    """A figure of scores that a study's report draws."""

    name: str
    """The name of its files, without suffix."""
    title: str
    caption: str
    x_label: str
    arrange: Callable[[Models], Layout]
    each_task: bool = False
    """Whether it has a panel for each test set, after those of the groups."""


def objective_by_size(models: Models) -> Layout:
    """CLM and MLM models of each size, with the same number of steps and the usual masking ratio."""
    ratio = _usual_ratio(models)
    by_size: dict[str, dict[tuple[int, str], str]] = defaultdict(dict)
    hidden: dict[str, str] = {}
    for name, facets in _from_scratch(models).items():
        if facets.objective == "clm" or (facets.objective == "mlm" and facets.masking_ratio == ratio):
            _place(by_size[facets.size], (facets.total_steps, facets.objective), name, hidden)
    pairs: dict[str, dict[str, str]] = {}
    for size in _sorted_sizes(by_size):
        budgets = [
            steps for steps, objective in by_size[size] if objective == "clm" and (steps, "mlm") in by_size[size]
        ]
        if budgets:
            pairs[size] = {objective: by_size[size][max(budgets), objective] for objective in ("clm", "mlm")}
    if not pairs:
        raise MissingModels("needs a CLM and an MLM model of the same size and number of steps")
    lines = {"clm": "CLM", "mlm": f"MLM {100 * (ratio or 0):g}%"}
    placements = [
        Placement(label, index, pair[objective])
        for objective, label in lines.items()
        for index, pair in enumerate(pairs.values())
    ]
    return _layout(placements, hidden, dict(enumerate(pairs)))


def masking_ratio(models: Models) -> Layout:
    """MLM models with several masking ratios, by size, with the number of steps for which there are most ratios."""
    by_size: dict[str, dict[int, dict[float, str]]] = defaultdict(lambda: defaultdict(dict))
    hidden: dict[str, str] = {}
    for name, facets in _from_scratch(models).items():
        if facets.objective == "mlm" and facets.masking_ratio is not None:
            _place(by_size[facets.size][facets.total_steps], facets.masking_ratio, name, hidden)
    placements: list[Placement] = []
    for size in _sorted_sizes(by_size):
        steps = max(by_size[size], key=lambda steps: (len(by_size[size][steps]), steps))
        if len(by_size[size][steps]) > 1:
            line = f"{size}, {short_steps(steps)} steps"
            placements += [Placement(line, 100 * ratio, name) for ratio, name in sorted(by_size[size][steps].items())]
    if not placements:
        raise MissingModels("needs MLM models of one size and number of steps with different masking ratios")
    return _layout(placements, hidden)


def clm_share(models: Models) -> Layout:
    """CLM, biphasic and MLM models of the usual masking ratio by the share of CLM steps, a line for each budget."""
    ratio = _usual_ratio(models)
    lines: dict[tuple[str, int], dict[float, str]] = defaultdict(dict)
    hidden: dict[str, str] = {}
    for name, facets in _from_scratch(models).items():
        if facets.objective == "clm" or (facets.objective in ("mlm", "clm-mlm") and facets.masking_ratio == ratio):
            _place(lines[facets.size, facets.total_steps], facets.clm_steps / facets.total_steps, name, hidden)
    placements: list[Placement] = []
    for size, steps in sorted(lines, key=lambda line: (parameters_in_size(line[0]), *line)):
        shares = lines[size, steps]
        if len(shares) > 1 and any(0 < share < 1 for share in shares):
            line = f"{size}, {short_steps(steps)} steps"
            placements += [Placement(line, 100 * share, name) for share, name in sorted(shares.items())]
    if not placements:
        raise MissingModels("needs a CLM-then-MLM model, and another CLM share of the same size and number of steps")
    return _layout(placements, hidden)


def ratio_sensitivity(models: Models) -> Layout:
    """Models with several masking ratios, trained with MLM alone, and with the same number of steps after CLM."""
    by_budget: dict[tuple[str, int], dict[int, dict[float, str]]] = defaultdict(lambda: defaultdict(dict))
    hidden: dict[str, str] = {}
    for name, facets in _from_scratch(models).items():
        if facets.objective in ("mlm", "clm-mlm") and facets.masking_ratio is not None:
            _place(by_budget[facets.size, facets.total_steps][facets.clm_steps], facets.masking_ratio, name, hidden)
    placements: list[Placement] = []
    for size, steps in sorted(by_budget, key=lambda budget: (parameters_in_size(budget[0]), *budget)):
        lines = {clm: by_ratio for clm, by_ratio in by_budget[size, steps].items() if len(by_ratio) > 1}
        if 0 not in lines or len(lines) == 1:
            continue
        for clm, by_ratio in sorted(lines.items()):
            kind = f"CLM {short_steps(clm)}, then MLM" if clm else "MLM alone"
            line = f"{size}, {short_steps(steps)} steps: {kind}"
            placements += [Placement(line, 100 * ratio, name) for ratio, name in sorted(by_ratio.items())]
    if not placements:
        raise MissingModels(
            "needs two masking ratios with CLM first and two without, of the same size and number of steps"
        )
    return _layout(placements, hidden)


def learning_curves(models: Models) -> Layout:
    """Runs with scores of several checkpoints."""
    runs: dict[str, dict[int, str]] = defaultdict(dict)
    hidden: dict[str, str] = {}
    for name, facets in models.items():
        _place(runs[facets.run], facets.steps, name, hidden)
    placements = [
        Placement(run, steps, name)
        for run, checkpoints in runs.items()
        if len(checkpoints) > 1
        for steps, name in sorted(checkpoints.items())
    ]
    if not placements:
        raise MissingModels("needs scores of at least two checkpoints of a run, such as 610m-mlm40-42k-5000")
    return _layout(placements, hidden)


def continued_pretraining(models: Models) -> Layout:
    """Continued models by their additional steps, a line for each model that is continued; 0 steps is that model."""
    lines: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    hidden: dict[str, str] = {}
    for name, facets in models.items():
        if facets.continued_from is not None and facets.is_final:
            ratio = "" if facets.masking_ratio is None else f" {100 * facets.masking_ratio:g}%"
            kind = facets.objective.upper().replace("-", ", ") + ratio
            _place(lines[facets.continued_from, kind], facets.total_steps - facets.base_steps, name, hidden)
    placements: list[Placement] = []
    for (base, kind), by_steps in lines.items():
        points = {0: base, **by_steps} if base in models else by_steps
        if len(points) > 1:
            placements += [Placement(f"{kind} from {base}", steps, name) for steps, name in sorted(points.items())]
    if not placements:
        raise MissingModels("needs a model that continues a decayed one, and that one or another number of steps")
    return _layout(placements, hidden)


FIGURES = (
    StudyFigure(
        "objective-by-size",
        "Objective and size",
        "Models trained with one objective, by size.",
        "size",
        objective_by_size,
    ),
    StudyFigure(
        "masking-ratio",
        "Masking ratio, size and task",
        "Models trained with MLM, by masking ratio.",
        "masking ratio (%)",
        masking_ratio,
        each_task=True,
    ),
    StudyFigure(
        "clm-share",
        "CLM share and budget",
        "CLM first, then MLM: models by the share of CLM in all steps. 0% is MLM alone, 100% CLM alone.",
        "CLM steps (% of all)",
        clm_share,
    ),
    StudyFigure(
        "ratio-sensitivity",
        "Sensitivity to the masking ratio, with and without CLM",
        "Models by masking ratio, trained with MLM alone, or with CLM first in the same number of steps.",
        "masking ratio (%)",
        ratio_sensitivity,
    ),
    StudyFigure(
        "learning-curves",
        "Learning curves",
        "Checkpoints of runs by pretraining steps.",
        "pretraining steps",
        learning_curves,
    ),
    StudyFigure(
        "continued-pretraining",
        "Continued pretraining",
        "Decayed models, and models that continue them, by the additional steps.",
        "additional steps",
        continued_pretraining,
    ),
)
"""The figures of scores. `losses` is drawn from the runs' metrics, see `study_losses`."""


def _place(points: dict[Any, str], key: Any, name: str, hidden: dict[str, str]) -> None:
    """Give a model its place, unless another model has it (one with another optimizer, for example)."""
    if (shown := points.setdefault(key, name)) != name:
        hidden[name] = shown


def _layout(
    placements: Iterable[Placement], hidden: Mapping[str, str], ticks: Mapping[float, str] | None = None
) -> Layout:
    placements = tuple(placements)
    models = {placement.model for placement in placements}
    return Layout(placements, ticks, {name: shown for name, shown in hidden.items() if shown in models})


def _from_scratch(models: Models) -> dict[str, Facets]:
    """Return the final models that don't continue another one."""
    return {name: facets for name, facets in models.items() if facets.is_final and facets.continued_from is None}


def _usual_ratio(models: Models) -> float | None:
    """Return the masking ratio that most models from initial weights have; of several, the nearest to the paper's."""
    counts = Counter(f.masking_ratio for f in _from_scratch(models).values() if f.masking_ratio is not None)
    return min(counts, key=lambda ratio: (-counts[ratio], abs(ratio - PAPER_RATIO), ratio), default=None)


def _sorted_sizes(sizes: Iterable[str]) -> list[str]:
    return sorted(sizes, key=lambda size: (parameters_in_size(size), size))
