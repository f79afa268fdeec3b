"""The tables of a sweep's report, in Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from biphasic.amounts import in_time
from biphasic.report.statistics import Difference, holm, paired_difference
from biphasic.report.sweep_scores import Entry, Row, Sweep, stability
from biphasic.sweep.selection import audited, keep_share, replay

MISSING = "missing"
NONE = "n/a"
"""A number that these scores can't give: a spread of a single value."""
LISTED = 300
"""Differences up to which all are in the report; `differences.csv` has them all in any case."""


@dataclass(frozen=True)
class Compared:
    """Two models in a row of the main table."""

    row: Row
    first: str
    second: str
    difference: Difference | None
    """`first` less `second`, shares of 1; None when no seed has both."""
    corrected: float | None
    """p after Holm's correction over all differences of the same table: of test sets, or of families."""
    settled: bool
    """Whether both models' rates are."""


def summary(sweep: Sweep) -> list[str]:
    """What the report rests on, and the main table."""
    return [*_basis(sweep), *_main_table(sweep)]


def details(sweep: Sweep, compared: Sequence[Compared]) -> list[str]:
    """Everything after the main table, but the pictures."""
    return [
        *_rates(sweep),
        *_differences(sweep, compared),
        *_stability(sweep),
        *_steps(sweep),
        *_halving(sweep),
        *_failures(sweep),
    ]


def compare(sweep: Sweep) -> list[Compared]:
    """Every pair of models in every row, rows as in the main table."""
    models = [model.name for model in sweep.grid.models]
    pairs = [(first, second) for at, first in enumerate(models) for second in models[at + 1 :]]
    found: dict[Row, list[Compared]] = {row: [] for row in sweep.rows}
    for rows in ([r for r in sweep.rows if r.task is not None], [r for r in sweep.rows if r.task is None]):
        cells = [(row, *pair) for row in rows for pair in pairs]
        entries = [(sweep.entries[first, row], sweep.entries[second, row]) for row, first, second in cells]
        differences = [paired_difference(one.scores, other.scores) for one, other in entries]
        corrected = holm([difference.p if difference else None for difference in differences])
        for cell, (one, other), difference, p in zip(cells, entries, differences, corrected, strict=True):
            found[cell[0]].append(Compared(*cell, difference, p, one.settled and other.settled))
    return [one for row in sweep.rows for one in found[row]]


def escaped(text: str) -> str:
    """On one line, with Markdown's signs as themselves; an underscore within a word is none."""
    text = " ".join(text.split())
    return re.sub(r"[\\`*\[\]<>|~#$&]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", lambda found: "\\" + found[0], text)


def rate(lr: float) -> str:
    """`5e-5`."""
    digits, power = f"{lr:.9e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def _basis(sweep: Sweep) -> list[str]:
    grid, counts = sweep.grid, sweep.counts()
    columns = ["done", "failed", "missing", "pruned"]
    lines = ["# Sweep", "", "## What it rests on", ""]
    rates = ", ".join(rate(lr) for lr in grid.learning_rates)
    lines += _table(
        ["", "", ""],
        [
            ["models", str(len(grid.models)), ", ".join(escaped(model.name) for model in grid.models)],
            ["tasks", str(len(grid.tasks)), ", ".join(escaped(task.name) for task in grid.tasks)],
            ["learning rates", str(len(grid.learning_rates)), rates],
            ["seeds", str(len(grid.seeds)), ", ".join(str(seed) for seed in grid.seeds)],
            ["trials", str(len(grid.trials)), ", ".join(f"{counts[column]} {column}" for column in columns)],
        ],
    )
    if len(grid.models) > 1 and counts["done"] < len(grid.trials):
        each = [(model.name, sweep.counts(model.name)) for model in grid.models]
        lines += _table(
            ["model", *columns], [[escaped(name), *(str(found[c]) for c in columns)] for name, found in each]
        )
    if counts["missing"]:
        lines += [f"**{counts['missing']} trials are missing: what rests on them is not final.**", ""]
    return lines


def _main_table(sweep: Sweep) -> list[str]:
    names = [model.name for model in sweep.grid.models]
    body = []
    for row in sweep.rows:
        entries = [sweep.entries[name, row] for name in names]
        # What isn't whole may still fall, so it is not marked and nothing is measured by it.
        best = max(
            (_points(entry.mean.mean) for entry in entries if entry.whole and entry.mean), key=float, default=None
        )
        compares = sum(entry.whole for entry in entries) > 1
        body.append(
            [_title(row), escaped(row.metric), *(_cell(entry, best if compares else None) for entry in entries)]
        )
    lines = ["## Test scores", ""]
    lines += _table(["", "metric", *(escaped(name) for name in names)], body)
    return [
        *lines,
        "Points (100 times the score): mean ± half of the 95% interval over seeds, and in brackets the number of seeds.",
        "Bold: the best of those that are whole. `3 of 5`: other seeds have no score; `rate open`: trials are absent that",
        f"could change the chosen learning rate; `{MISSING}`: no score.",
        "",
    ]


def _rates(sweep: Sweep) -> list[str]:
    names = [model.name for model in sweep.grid.models]
    body = []
    for row in (row for row in sweep.rows if row.task is not None):
        found = [sweep.choices[name, row.task or "", row.name] for name in names]
        cells = [
            MISSING if one.lr is None else rate(one.lr) if one.complete else f"{rate(one.lr)} (open)" for one in found
        ]
        body.append([_title(row), *cells])
    lines = ["## Chosen learning rates", "", "By the mean validation score over seeds.", ""]
    return [*lines, *_table(["", *(escaped(name) for name in names)], body)]


def _differences(sweep: Sweep, compared: Sequence[Compared]) -> list[str]:
    if len(sweep.grid.models) < 2:
        return []
    lines = ["## Differences between models", ""]
    lines += [
        "Points, paired over seeds, with the 95% interval; p of the paired t-test, and corrected by Holm's method over"
    ]
    lines += ["all differences of the same kind (families, test sets).", ""]
    if len(compared) > LISTED:
        reference = sweep.grid.models[0].name
        compared = [one for one in compared if one.first == reference]
        lines += [f"Here those with {escaped(reference)}; `differences.csv` has all, over which p is corrected.", ""]
    for title, family in (("Families", True), ("Test sets", False)):
        body = [_compared(one, len(sweep.grid.seeds)) for one in compared if (one.row.task is None) == family]
        if body:
            lines += [f"### {title}", ""]
            lines += _table(["", "model", "less", "difference", "p", "p, Holm", "seeds"], body)
    return lines


def _compared(one: Compared, asked: int) -> list[str]:
    start = [_title(one.row), escaped(one.first), escaped(one.second)]
    if one.difference is None:
        return [*start, MISSING, MISSING, MISSING, f"0 of {asked}"]
    seeds = _of(one.difference.count, asked)
    half = "" if one.difference.half is None else f" ± {_points(one.difference.half)}"
    return [
        *start,
        f"{_signed(one.difference.mean)}{half}",
        _p(one.difference.p),
        _p(one.corrected),
        seeds if one.settled else f"{seeds}, rate open",
    ]


def _stability(sweep: Sweep) -> list[str]:
    if not sweep.rows or not sweep.grid.models:
        return []
    body = []
    for model in (model.name for model in sweep.grid.models):
        for row in (row for row in sweep.rows if row.task is not None):
            found = stability(sweep, model, row)
            body.append([
                escaped(model),
                _title(row),
                _deviation(found.seed_deviation, sweep.entries[model, row]),
                NONE if found.rate_range is None else _points(found.rate_range),
                NONE if found.near is None else f"{found.near} of {found.rates}",
                _of(found.seeds, len(sweep.grid.seeds)),
                f"{found.failed} of {found.trials}",
            ])  # fmt: skip
    header = ["model", "", "sd over seeds", "range over rates", "rates within 1 point", "over seeds", "failed trials"]
    return [
        "## Stability",
        "",
        "Test scores in points: the standard deviation over seeds at the chosen rate; best less worst rate with the same",
        "seed, the mean of these; how many rates come within a point of the best. The last two are over those seeds with",
        "which every rate has a record.",
        "",
        *_table(header, body),
    ]


def _steps(sweep: Sweep) -> list[str]:
    known = sorted((m for m in sweep.grid.models if m.steps is not None), key=lambda model: model.steps or 0)
    families = [row for row in sweep.rows if row.task is None]
    if not known or not families:
        return []
    body = [
        [f"{model.steps:,}", escaped(model.name), *(_cell(sweep.entries[model.name, row], None) for row in families)]
        for model in known
    ]
    return ["## Pretraining steps", "", *_table(["steps", "model", *(escaped(row.title) for row in families)], body)]


def _halving(sweep: Sweep) -> list[str]:
    grid, keep = sweep.grid, keep_share(sweep.grid)
    lines = ["## Halving", ""]
    if grid.halving is None:
        lines += ["The whole grid was asked for, without halving.", ""]
    else:
        whole = audited(grid)
        groups = "group is" if len(whole) == 1 else "groups are"
        lines += [
            f"{len(sweep.pruned)} of {len(grid.trials)} trials were left out by halving (`keep: {keep:g}`), which saved",
            f"about {in_time(_saved_seconds(sweep))}, at the mean time of the trials of the same model and task.",
            "",
            f"{len(whole)} {groups} run whole as a check{': ' if whole else ''}"
            + ", ".join(f"{escaped(model)} on {escaped(task)}" for model, task in whole)
            + ".",
            "",
        ]
    found = replay(grid, sweep.records, keep)
    if not found.groups:
        return [
            *lines,
            "No model has a record of every trial of a task, so nothing can be said about other choices.",
            "",
        ]
    other = [one for one in found.results if one.full_lr != one.halved_lr]
    lost = [one.lost for one in found.results if one.lost is not None]
    groups = "group that is" if found.groups == 1 else f"{found.groups} groups that are"
    loses = (
        f", and loses {100 * math.fsum(lost) / len(lost):.2f} points of test score in the mean over all" if lost else ""
    )
    lines += [
        f"On the {groups} recorded whole (a group is a model and a task), halving with `keep: {keep:g}` leaves out",
        f"{found.saved_trials} of {found.trials} trials and saves {in_time(found.saved_seconds)} of "
        f"{in_time(found.seconds)}.",
        f"It chooses another rate for {len(other)} of {len(found.results)} models and test sets{loses}.",
        "",
    ]
    if other:
        titles = {(row.task, row.name): _title(row) for row in sweep.rows}
        body = [
            [
                escaped(one.model),
                titles[one.task, one.name],
                rate(one.full_lr),
                rate(one.halved_lr),
                MISSING if one.lost is None else _signed(one.lost),
            ]
            for one in other
        ]
        lines += _table(["model", "", "whole grid", "halving", "points lost"], body)
    return lines


def _saved_seconds(sweep: Sweep) -> float:
    total = []
    for trials in sweep.groups.values():
        taken = [sweep.records[t].seconds.get("total", 0.0) for t in trials.values() if t in sweep.records]
        out = sum(trial in sweep.pruned for trial in trials.values())
        if taken and out:
            total.append(out * math.fsum(taken) / len(taken))
    return math.fsum(total)


def _failures(sweep: Sweep) -> list[str]:
    body = []
    for trial, cell in sweep.grid.trials.items():
        if sweep.status(trial) == "failed":
            error = (sweep.records[trial].error or "").strip().splitlines() or ["no message"]
            body.append([escaped(cell.model), escaped(cell.task), rate(cell.lr), str(cell.seed), escaped(error[0])])
    if not body:
        return ["## Failures", "", "None.", ""]
    return ["## Failures", "", *_table(["model", "task", "learning rate", "seed", "error"], body)]


def _cell(entry: Entry, best: str | None) -> str:
    """A model's cell; bold where it is whole and its mean reads as `best`."""
    found = entry.mean
    if found is None:
        return MISSING
    text = _points(found.mean) + ("" if found.half is None else f" ± {_points(found.half)}")
    if entry.whole and _points(found.mean) == best:
        text = f"**{text}**"
    return f"{text} ({_seeds(entry)})"


def _deviation(value: float | None, entry: Entry) -> str:
    if value is None:
        return NONE if entry.scores else MISSING
    return _points(value) if entry.whole else f"{_points(value)} ({_seeds(entry)})"


def _seeds(entry: Entry) -> str:
    """What it rests on; says so where that isn't everything."""
    seeds = _of(len(entry.scores), entry.asked)
    return seeds if entry.settled else f"{seeds}, rate open"


def _of(count: int, asked: int) -> str:
    return str(count) if count == asked else f"{count} of {asked}"


def _title(row: Row) -> str:
    return escaped(row.title) if row.task is not None else f"{escaped(row.title)}, mean"


def _points(value: float) -> str:
    return f"{100 * value:.2f}"


def _signed(value: float) -> str:
    return f"{round(100 * value, 2) + 0.0:+.2f}"  # -0.0 + 0.0 is 0.0


def _p(value: float | None) -> str:
    if value is None:
        return NONE
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"


def _table(header: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    rows = [header, ["-"] * len(header), *body]
    return [*(f"| {' | '.join(row)} |" for row in rows), ""]
