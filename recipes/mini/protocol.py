"""The tests of protocol.md, from the records of its pretraining seeds.

    python recipes/mini/protocol.py      # writes recipes/mini/protocol/results.md and docs/protocol.png

It computes nothing before the records of all seeds are there (protocol.sh writes them).
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import nan
from pathlib import Path

import numpy as np
import pandas as pd
from results import TASKS
from scipy import stats
from seed_records import PUBLIC, SeedRuns, mean_scores, read_scores, write_tables

from biphasic.errors import UserError
from biphasic.report.drawing import default_style, line_style, make_panels, png
from biphasic.report.formatting import format_interval, format_p, format_signed, markdown_table
from biphasic.report.statistics import Interval, holm, mean_interval
from biphasic.storage import open_store

HERE = Path(__file__).parent
PICTURE = HERE.parents[1] / "docs" / "protocol.png"
MODELS = {
    "1m-clm-2560": "clm",
    "1m-mlm40-3521": "mlm",
    "1m-mlm40-2560": "mlm",
    "1m-clm-1280-mlm40-2560": "clm-mlm",
    "1m-clm-640": "clm",
    "1m-mlm40-880": "mlm",
    "1m-mlm40-640": "mlm",
    "1m-clm-320-mlm40-640": "clm-mlm",
    "mlm-mean": "mlm",
    "clm-mlm-mean": "clm-mlm",
}
"""The models that are fine-tuned, with the objective whose rates they take."""
PRIMARY_MODELS = ("1m-mlm40-2560", "1m-mlm40-3521", "1m-clm-1280-mlm40-2560")
"""Those of the two questions: fine-tuned with two seeds, and on the public sets as well."""
LEVEL = 0.05
MARGIN = 0.01
"""Differences within a point are called equal, if a test shows it."""
BUDGETS = {"10.5 M": ("2560", "1280", "3521"), "2.6 M": ("640", "320", "880")}
"""For each number of tokens the batches of the models, of the CLM phase, and of MLM with as many FLOPs."""
MEAN_AND_EACH = (TASKS, *((task,) for task in TASKS))
"""The tasks whose scores are compared: the mean of all, and each alone."""


def finetuning_seeds(model: str, task: str) -> tuple[int, ...]:
    """Return the seeds with which a model is fine-tuned on a task."""
    if task in PUBLIC:
        return (0,) if model in PRIMARY_MODELS else ()
    return (0, 1) if model in PRIMARY_MODELS else (0,)


RUNS = SeedRuns("protocol", tuple(range(3, 15)), MODELS, finetuning_seeds)


@dataclass(frozen=True)
class Comparison:
    """A test of the protocol: the scores of `first` minus those of `second`, as means over `tasks`."""

    title: str
    tokens: str
    first: str
    second: str
    tasks: tuple[str, ...] = TASKS

    @property
    def tasks_title(self) -> str:
        """The tasks in a table."""
        means = {TASKS: "mean of four", tuple(PUBLIC): "mean of four, public"}
        return means.get(self.tasks) or f"`{self.tasks[0]}`"


def comparisons(tokens: str, *tasks: str) -> tuple[Comparison, Comparison, Comparison]:
    """Return the comparisons of CLM→MLM at a budget: with MLM at equal tokens, at equal FLOPs, and with CLM."""
    batches, switch, equal_flops = BUDGETS[tokens]
    both = f"1m-clm-{switch}-mlm40-{batches}"
    return (
        Comparison("CLM→MLM minus MLM, equal tokens", tokens, both, f"1m-mlm40-{batches}", tasks),
        Comparison("CLM→MLM minus MLM, equal FLOPs", tokens, both, f"1m-mlm40-{equal_flops}", tasks),
        Comparison("CLM→MLM minus CLM", tokens, both, f"1m-clm-{batches}", tasks),
    )


PRIMARY = comparisons("10.5 M", *TASKS)[:2]
SECONDARY = (
    *(
        comparison
        for tokens, tasks in product(BUDGETS, MEAN_AND_EACH)
        for comparison in comparisons(tokens, *tasks)
        if comparison not in PRIMARY
    ),
    Comparison("MLM: mean of checkpoints minus decay", "10.5 M", "mlm-mean", "1m-mlm40-2560"),
    Comparison("CLM→MLM: mean of checkpoints minus decay", "10.5 M", "clm-mlm-mean", "1m-clm-1280-mlm40-2560"),
)
ON_PUBLIC_SETS = tuple(
    comparison
    for tasks in (tuple(PUBLIC), *((task,) for task in PUBLIC))
    for comparison in comparisons("10.5 M", *tasks)[:2]
)
UNPLANNED = tuple(
    Comparison("CLM minus MLM", tokens, f"1m-clm-{batches}", f"1m-mlm40-{batches}", tasks)
    for (tokens, (batches, _, _)), tasks in product(BUDGETS.items(), MEAN_AND_EACH)
)
"""What nobody had planned to compare, of models that were trained for other comparisons."""


@dataclass(frozen=True)
class Outcome:
    """A comparison's result over the pretraining seeds."""

    comparison: Comparison
    interval: Interval
    """Mean difference, its 95% interval, and the p-value of the paired t-test."""
    sign_flip: float
    """p-value of the exact test that the signs of the differences are random."""
    p_equivalence: float
    """p-value of two one-sided t-tests that the mean is within the margin, corrected as `p`."""
    above: int
    """With how many seeds the difference is above zero."""
    p: float = nan
    """The t-test's p-value, corrected by Holm's method over its family."""

    @property
    def verdict(self) -> str:
        """What the protocol lets us say."""
        near = self.p_equivalence < LEVEL and self.comparison.tasks != ("retrieval",)
        if self.p < LEVEL:
            return ("better" if self.interval.mean > 0 else "worse") + (" by less than a point" if near else "")
        return "equal within a point" if near else "not decided"


def differences(scores: pd.DataFrame, comparison: Comparison) -> pd.Series:
    """Return a comparison's differences by pretraining seed."""
    first, second = (mean_scores(scores, model, comparison.tasks) for model in (comparison.first, comparison.second))
    return first - second


def outcomes(scores: pd.DataFrame, family: Sequence[Comparison]) -> list[Outcome]:
    """Return the results of a family of comparisons, corrected over the family."""
    found = list[Outcome]()
    for comparison in family:
        values = differences(scores, comparison)
        above = int((values > 0).sum())
        found.append(Outcome(comparison, mean_interval(values), _sign_flip(values), _equivalence(values), above))
    p = holm(pd.Series([each.interval.p for each in found], dtype=float))
    near = holm(pd.Series([each.p_equivalence for each in found], dtype=float))
    return [replace(each, p=p[at], p_equivalence=near[at]) for at, each in enumerate(found)]


def _sign_flip(values: pd.Series) -> float:
    """Return the share of all changes of sign with a mean at least as far from zero."""
    sums = np.array(list(product((1, -1), repeat=len(values)))) @ values.to_numpy()
    return float((np.abs(sums) >= abs(values.sum()) - 1e-12).mean())


def _equivalence(values: pd.Series) -> float:
    """Return the larger p-value of the t-tests that the mean is not above -MARGIN, and not below MARGIN."""
    low = stats.ttest_1samp(values, -MARGIN, alternative="greater")
    high = stats.ttest_1samp(values, MARGIN, alternative="less")
    return float(max(low.pvalue, high.pvalue))  # pyright: ignore[reportAttributeAccessIssue]


def tables(scores: pd.DataFrame) -> list[str]:
    """Return the lines of results.md."""
    lines = [
        f"## The two questions ({len(RUNS.seeds)} pretraining seeds)",
        "",
        *outcome_table(outcomes(scores, PRIMARY)),
    ]
    for title, family in (("Secondary comparisons", SECONDARY), ("On public sets", ON_PUBLIC_SETS)):
        lines += [f"## {title} (corrected over all {len(family)})", "", *outcome_table(outcomes(scores, family))]
    lines += ["## Scores", "", *score_table(scores, MODELS, TASKS), *score_table(scores, PRIMARY_MODELS, tuple(PUBLIC))]
    lines += unplanned_table(scores, UNPLANNED)
    primary = [differences(scores, each) for each in PRIMARY]
    body = [[seed, *(format_signed(values[seed]) for values in primary)] for seed in RUNS.seeds]
    lines += ["## The primary differences by seed, points", ""]
    return lines + markdown_table(["seed", *(each.title for each in PRIMARY)], body)


def outcome_table(results: Iterable[Outcome]) -> list[str]:
    """Return the lines of a table of outcomes."""
    about = ["difference", "tokens", "task", "points"]
    header = [*about, "p", "p, Holm", "p, sign flips", "p, within a point, Holm", "seeds above", ""]
    body = [
        [
            *(each.comparison.title, each.comparison.tokens, each.comparison.tasks_title),
            format_interval(each.interval.mean, each.interval.half, format_signed),
            *(format_p(each.interval.p), format_p(each.p), format_p(each.sign_flip), format_p(each.p_equivalence)),
            *(f"{each.above} of {each.interval.count}", each.verdict),
        ]
        for each in results
    ]
    return markdown_table(header, body)


def unplanned_table(scores: pd.DataFrame, family: Iterable[Comparison]) -> list[str]:
    """Return the lines of a section of differences that have intervals but no test."""
    body = list[list[str]]()
    for each in family:
        values = differences(scores, each)
        interval, above = mean_interval(values), int((values > 0).sum())
        points = format_interval(interval.mean, interval.half, format_signed)
        body.append([each.title, each.tokens, each.tasks_title, points, f"{above} of {interval.count}"])
    header = ["difference", "tokens", "task", "points", "seeds above"]
    return ["## Not planned: 95% intervals, not corrected", "", *markdown_table(header, body)]


def score_table(scores: pd.DataFrame, models: Iterable[str], tasks: tuple[str, ...]) -> list[str]:
    """Return the lines of a table of test scores in points, with 95% intervals over the seeds."""
    columns = [*((task,) for task in tasks), tasks]
    body = [[model, *(_cell(mean_scores(scores, model, each)) for each in columns)] for model in models]
    return markdown_table(["model", *(f"`{task}`" for task in tasks), "mean"], body)


def _cell(values: pd.Series) -> str:
    interval = mean_interval(values)
    return format_interval(interval.mean, interval.half)


def draw(scores: pd.DataFrame) -> bytes:
    """Return the figure of the differences to MLM, at equal tokens and at equal FLOPs, as PNG."""
    titles = [f"{tokens.removesuffix(' M')} million tokens" for tokens in BUDGETS]
    with default_style():
        figure, panels = make_panels(titles, size=(4.6, 3.0))
        for tokens, axes in zip(BUDGETS, panels, strict=True):
            for index, name in enumerate(("equal tokens", "equal FLOPs")):
                intervals = [
                    mean_interval(differences(scores, comparisons(tokens, *tasks)[index])) for tasks in MEAN_AND_EACH
                ]
                axes.errorbar(
                    [100 * each.mean for each in intervals],
                    [-at - 0.2 * index for at in range(len(MEAN_AND_EACH))],
                    xerr=[100 * each.half for each in intervals],
                    color=line_style(index)["color"], label=name, fmt="o", markersize=4, capsize=2,
                )  # fmt: skip
            axes.axvline(0, color="gray", linewidth=1)
            axes.set_yticks([-at - 0.1 for at in range(len(MEAN_AND_EACH))], ["mean", *TASKS])
            axes.set_xlabel("CLM→MLM minus MLM, points, 95% interval")
        return png(figure)


def main() -> int:
    """Write the tables and the figure, and print their names."""
    try:
        scores = read_scores(RUNS, RUNS.records)
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    write_tables(RUNS, tables(scores))
    open_store(str(PICTURE.parent)).write(PICTURE.name, draw(scores))
    print(PICTURE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
