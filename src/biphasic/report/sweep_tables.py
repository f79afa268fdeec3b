"""Write the tables of a sweep's report in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from biphasic.report.formatting import (
    NOT_AVAILABLE,
    escape,
    format_interval,
    format_p,
    format_points,
    format_rate,
    format_signed,
    markdown_table,
)
from biphasic.report.statistics import Difference, holm, paired_difference
from biphasic.report.sweep_scores import ModelScore, SweepScores, TableRow, scores_by_rate, stability

MISSING = "missing"
MAX_DIFFERENCES = 300
"""The report lists all differences up to this number; `differences.csv` always has all."""


@dataclass(frozen=True)
class Comparison:
    """The difference between two models in a row of the main table."""

    row: TableRow
    first: str
    second: str
    difference: Difference | None
    """`first` minus `second`, for scores from 0 to 1; None if no seed has scores of both."""
    corrected_p: float | None
    """The p-value after Holm's correction over all differences of the same kind (test sets or families)."""
    settled: bool
    """Whether both models' rates are settled."""


def summary(sweep: SweepScores) -> list[str]:
    """Return the lines of the grid's overview, the learning rates and the main table."""
    return [*_overview(sweep), *_rates(sweep), *_main_table(sweep)]


def details(sweep: SweepScores, comparisons: Sequence[Comparison]) -> list[str]:
    """Return the lines after the main table, except the figures."""
    return [
        *_differences(sweep, comparisons),
        *_stability(sweep),
        *_steps(sweep),
        *_failures(sweep),
    ]


def compare_models(sweep: SweepScores) -> list[Comparison]:
    """Compare every pair of models in every row of the main table, in the order of the rows."""
    models = [model.name for model in sweep.grid.models]
    pairs = [(first, second) for index, first in enumerate(models) for second in models[index + 1 :]]
    comparisons: list[Comparison] = []
    for is_family in (False, True):
        cells = [(row, *pair) for row in sweep.rows if (row.task is None) == is_family for pair in pairs]
        scores = [(sweep.scores[first, row], sweep.scores[second, row]) for row, first, second in cells]
        differences = [paired_difference(first.by_seed, second.by_seed) for first, second in scores]
        corrected = holm([difference.p if difference else None for difference in differences])
        for cell, (first, second), difference, p in zip(cells, scores, differences, corrected, strict=True):
            comparisons.append(Comparison(*cell, difference, p, first.settled and second.settled))
    return sorted(comparisons, key=lambda comparison: sweep.rows.index(comparison.row))


def _overview(sweep: SweepScores) -> list[str]:
    grid, counts = sweep.grid, sweep.counts()
    columns = ["done", "failed", "missing"]
    values = {
        "models": [escape(model.name) for model in grid.models],
        "tasks": [escape(task.name) for task in grid.tasks],
        "learning rates": [format_rate(lr) for lr in grid.learning_rates],
        "seeds": [str(seed) for seed in grid.seeds],
    }
    rows = [[name, str(len(items)), ", ".join(items)] for name, items in values.items()]
    rows.append(["trials", str(len(sweep.planned)), ", ".join(f"{counts[column]} {column}" for column in columns)])
    lines = ["# Sweep", "", "## Grid", "", *markdown_table(["", "", ""], rows)]
    if len(grid.models) > 1 and counts["done"] < len(sweep.planned):
        by_model = [(model.name, sweep.counts(model.name)) for model in grid.models]
        rows = [[escape(name), *(str(of_model[column]) for column in columns)] for name, of_model in by_model]
        lines += markdown_table(["model", *columns], rows)
    if counts["missing"]:
        lines += [f"**{counts['missing']} trials are missing: numbers that depend on them are not final.**", ""]
    return lines


def _main_table(sweep: SweepScores) -> list[str]:
    names = [model.name for model in sweep.grid.models]
    body = []
    for row in sweep.rows:
        scores = [sweep.scores[name, row] for name in names]
        # An incomplete mean may still change, so it can't be the best.
        complete = [format_points(score.interval.mean) for score in scores if score.complete and score.interval]
        best = max(complete, key=float) if len(complete) > 1 else None
        cells = [_score(score, best, _absent(sweep, row)) for score in scores]
        body.append([_title(row), escape(row.metric), *cells])
    return [
        *["## Test scores", ""],
        *markdown_table(["", "metric", *map(escape, names)], body),
        "Points (100 times the score): mean ± half of the 95% interval over seeds, with the number of seeds in brackets.",
        "Bold: the best of the complete ones. `3 of 5`: the other seeds have no score. `rate open`: missing trials could",
        f"change the chosen learning rate. `{MISSING}`: no score so far. `{NOT_AVAILABLE}`: no test set.",
        "",
    ]


def _rates(sweep: SweepScores) -> list[str]:
    rates, choosing = sweep.grid.learning_rates, sweep.grid.seeds[: sweep.grid.rate_seeds]
    body = []
    for row in _test_sets(sweep):
        for model in (model.name for model in sweep.grid.models):
            choice = sweep.chosen[model, row.task or "", row.name]
            chosen = MISSING if choice.lr is None else format_rate(choice.lr) + ("" if choice.complete else " (open)")
            by_rate = scores_by_rate(sweep, model, row, "validation")
            of_rate = [[score for seed, score in by_rate[lr].items() if seed in choosing] for lr in rates]
            means = [format_points(fmean(scores)) if scores else MISSING for scores in of_rate]
            body.append([_title(row), escape(model), chosen, *means])
    seeds = f"seed{'' if len(choosing) == 1 else 's'} {', '.join(map(str, choosing))}"
    return [
        *["## Chosen learning rates", ""],
        f"By the validation score in points, of {seeds}, at each rate: the mean over the seeds with a score.",
        "",
        *markdown_table(["", "model", "chosen", *map(format_rate, rates)], body),
    ]


def _differences(sweep: SweepScores, comparisons: Sequence[Comparison]) -> list[str]:
    if len(sweep.grid.models) < 2:
        return []
    lines = [
        *["## Differences between models", ""],
        "Points, paired by seed, with the 95% interval; p of the paired t-test, and p corrected by Holm's method over all",
        "differences of the same kind (families, test sets).",
        "",
    ]
    if len(comparisons) > MAX_DIFFERENCES:
        reference = sweep.grid.models[0].name
        comparisons = [comparison for comparison in comparisons if comparison.first == reference]
        lines += [f"Only those with {escape(reference)}; p is corrected over all, which are in `differences.csv`.", ""]
    for title, is_family in (("Families", True), ("Test sets", False)):
        of_kind = [comparison for comparison in comparisons if (comparison.row.task is None) == is_family]
        body = [_comparison(sweep, comparison) for comparison in of_kind]
        if body:
            header = ["", "model", "minus", "difference", "p", "p, Holm", "seeds"]
            lines += [f"### {title}", "", *markdown_table(header, body)]
    return lines


def _comparison(sweep: SweepScores, comparison: Comparison) -> list[str]:
    seeds, absent = len(sweep.grid.seeds), _absent(sweep, comparison.row)
    cells = [_title(comparison.row), escape(comparison.first), escape(comparison.second)]
    difference = comparison.difference
    if difference is None:
        return [*cells, absent, absent, absent, f"0 of {seeds}"]
    count = _seed_count(difference.count, seeds, comparison.settled)
    return [
        *cells,
        format_interval(difference, format_signed),
        format_p(difference.p),
        format_p(comparison.corrected_p),
        count,
    ]


def _stability(sweep: SweepScores) -> list[str]:
    if not sweep.rows or not sweep.grid.models:
        return []
    body = []
    for model in (model.name for model in sweep.grid.models):
        for row in _test_sets(sweep):
            spread, score = stability(sweep, model, row), sweep.scores[model, row]
            deviation = NOT_AVAILABLE if score.by_seed else _absent(sweep, row)
            if spread.seed_deviation is not None:
                deviation = format_points(spread.seed_deviation) + ("" if score.complete else f" ({_seeds(score)})")
            body.append([
                escape(model),
                _title(row),
                deviation,
                NOT_AVAILABLE if spread.rate_range is None else format_points(spread.rate_range),
                NOT_AVAILABLE if spread.near is None else f"{spread.near} of {spread.rates}",
                _seed_count(spread.seeds, len(sweep.grid.seeds)),
                f"{spread.failed} of {spread.trials}",
            ])  # fmt: skip
    header = ["model", "", "sd over seeds", "range over rates", "rates within 1 point", "over seeds", "failed trials"]
    return [
        *["## Stability", ""],
        "Test scores in points. The standard deviation over seeds is at the chosen rate. The range over rates is the best",
        "minus the worst rate with the same seed, averaged over seeds. The range and the number of rates within a point of",
        "the best one are over the seeds with which every rate has a record.",
        "",
        *markdown_table(header, body),
    ]


def _steps(sweep: SweepScores) -> list[str]:
    models = sorted((m for m in sweep.grid.models if m.steps is not None), key=lambda model: model.steps or 0)
    families = [row for row in sweep.rows if row.task is None]
    if not models or not families:
        return []
    body = [
        [
            f"{model.steps:,}",
            escape(model.name),
            *(_score(sweep.scores[model.name, row], None, _absent(sweep, row)) for row in families),
        ]
        for model in models
    ]
    return [
        "## Pretraining steps",
        "",
        *markdown_table(["steps", "model", *(escape(row.title) for row in families)], body),
    ]


def _failures(sweep: SweepScores) -> list[str]:
    body = []
    for trial, cell in sweep.planned.items():
        if sweep.status(trial) == "failed":
            error = (sweep.records[trial].error or "").strip().splitlines() or ["no message"]
            body.append([escape(cell.model), escape(cell.task), format_rate(cell.lr), str(cell.seed), escape(error[0])])
    table = markdown_table(["model", "task", "learning rate", "seed", "error"], body) if body else ["None.", ""]
    return ["## Failures", "", *table]


def _test_sets(sweep: SweepScores) -> list[TableRow]:
    return [row for row in sweep.rows if row.task is not None]


def _absent(sweep: SweepScores, row: TableRow) -> str:
    """Return what stands in place of a test score that is not there."""
    return NOT_AVAILABLE if row in sweep.without_test_set else MISSING


def _score(score: ModelScore, best: str | None, absent: str) -> str:
    """Format a model's cell, in bold if it is complete and its formatted mean equals `best`; `absent` if it has no score."""
    if score.interval is None:
        return absent
    text = format_interval(score.interval, format_points)
    if score.complete and format_points(score.interval.mean) == best:
        text = f"**{text}**"
    return f"{text} ({_seeds(score)})"


def _seeds(score: ModelScore) -> str:
    return _seed_count(len(score.by_seed), score.expected, score.settled)


def _seed_count(count: int, expected: int, settled: bool = True) -> str:
    return (str(count) if count == expected else f"{count} of {expected}") + ("" if settled else ", rate open")


def _title(row: TableRow) -> str:
    return escape(row.title) if row.task is not None else f"{escape(row.title)}, mean"
