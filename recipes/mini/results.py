"""Tables, a figure and the raw records of the mini study over its pretraining seeds, for docs/results.md.

    python recipes/mini/results.py FOLDER          # the folder of run.sh; writes recipes/mini/results/ and docs/pilot.png
    python recipes/mini/results.py                 # tables and figure from the records that are there

A model's score with a pretraining seed is the mean over its fine-tuning seeds, at the learning rate that validation chooses.
Intervals are 95%, over pretraining seeds where there are several (paired by seed in differences), otherwise over
fine-tuning seeds. p-values of the differences are corrected by Holm's method over all of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import nan
from pathlib import Path
from statistics import fmean

import pandas as pd
from raw_records import FIRST_SEED, UNTRAINED, Records, read_run, read_written, write_records

from biphasic.config.load import load
from biphasic.config.model_names import Facets, facets_of_models
from biphasic.config.study import StudyConfig, expand
from biphasic.errors import UserError
from biphasic.report.drawing import default_style, line_style, make_panels, png
from biphasic.report.formatting import (
    format_interval,
    format_p,
    format_points,
    format_signed,
    markdown_page,
    markdown_table,
)
from biphasic.report.statistics import Interval, holm, mean_interval
from biphasic.storage import open_store

HERE = Path(__file__).parent
RECORDS = HERE / "results"
PICTURE = HERE.parents[1] / "docs" / "pilot.png"
TASKS = ("types", "parameters", "questions", "retrieval")
MAIN = {"MLM": 0.0, "CLM→MLM": 0.5, "CLM": 1.0}
"""The objectives of the main table by their share of CLM steps."""
TOKENS_PER_BATCH = 4096
_TASK_TITLES = tuple(f"`{task}`" for task in TASKS)


@dataclass(frozen=True)
class Results:
    """What is computed from the records."""

    records: Records

    @cached_property
    def models(self) -> dict[str, Facets]:
        """The models with scores, but the untrained one."""
        studies = [load(str(HERE / name)) for name in ("study.yaml", "long.yaml")]
        configs = {name: run for study in studies if isinstance(study, StudyConfig) for name, run in expand(study).items()}
        return facets_of_models({trial.model for trial in self.records.trials}, configs)[0]

    @cached_property
    def scores(self) -> dict[tuple[str, str], dict[int, list[float]]]:
        """Test scores at the chosen rate, one for each fine-tuning seed, by (model, task) and pretraining seed."""
        scores: dict[tuple[str, str], dict[int, list[float]]] = {}
        for trial in self.records.trials:
            if trial.chosen and trial.test is not None:
                by_seed = scores.setdefault((trial.model, trial.task), {})
                by_seed.setdefault(trial.pretraining_seed, []).append(trial.test)
        return scores

    def of_first_seed(self) -> Results:
        """Return what the first pretraining seed measured, the only one of most models. Its intervals can be compared."""
        return Results(self.records.with_seed(FIRST_SEED))

    def rate_ranges(self, model: str, task: str) -> pd.Series:
        """Return the best minus the worst rate's validation score by pretraining seed.

        Both are those of the fine-tuning seed that chooses the rate.
        """
        by_seed: dict[int, list[float]] = {}
        for trial in self.records.trials:
            if (trial.model, trial.task) == (model, task) and trial.finetuning_seed == 0 and trial.validation is not None:
                by_seed.setdefault(trial.pretraining_seed, []).append(trial.validation)
        return pd.Series({seed: max(values) - min(values) for seed, values in by_seed.items()}, dtype=float)

    def final(self, is_wanted: Callable[[Facets], bool]) -> list[Facets]:
        """Return the ends of the runs for which `is_wanted` is true, from the fewest to the most steps."""
        found = [model for model in self.models.values() if model.steps == model.total_steps and is_wanted(model)]
        return sorted(found, key=lambda model: (model.total_steps, clm_share(model), model.masking_ratio or 0, model.run))

    def at_forty_percent(self) -> list[Facets]:
        """Return the ends of the runs from initial weights whose MLM, if they have any, masks 40%."""
        return self.final(lambda model: model.continued_from is None and model.masking_ratio in (None, 0.4))

    def means(self, model: str, task: str) -> pd.Series:
        """Return a model's mean score on a task by pretraining seed."""
        by_seed = self.scores.get((model, task), {})
        return pd.Series({seed: fmean(values) for seed, values in by_seed.items()}, dtype=float)

    @cached_property
    def seeds(self) -> int:
        """The number of pretraining seeds of the models that have most."""
        return max((len(by_seed) for by_seed in self.scores.values()), default=0)

    def has_all_seeds(self, model: str) -> bool:
        """Return whether a model has scores with as many pretraining seeds as any."""
        return any(len(self.means(model, task)) == self.seeds for task in TASKS)

    def interval(self, model: str, task: str) -> Interval | None:
        """Return a model's mean score on a task with its interval; None without scores."""
        by_seed = self.scores.get((model, task), {})
        if len(by_seed) > 1:
            return mean_interval(self.means(model, task))
        return next((mean_interval(values) for values in by_seed.values()), None)

    def cell(self, model: str, task: str) -> str:
        """Return a model's score on a task in points, as text."""
        interval = self.interval(model, task)
        return "missing" if interval is None else format_interval(interval.mean, interval.half)


def clm_share(model: Facets) -> float:
    """Return the share of CLM steps in a run."""
    return model.clm_steps / (model.total_steps - model.base_steps)


def tables(results: Results) -> list[str]:
    """Return the lines of results.md."""
    scratch = results.at_forty_percent()
    main = [model for model in scratch if clm_share(model) in MAIN.values()]
    names = {share: name for name, share in MAIN.items()}
    replicated = [model for model in main if results.has_all_seeds(model.run)]
    lines = [f"## Objectives by budget ({results.seeds} pretraining seeds)", ""]
    initial = ["0", UNTRAINED, *(results.cell(UNTRAINED, task) for task in TASKS), ""]
    lines += _score_table(results, replicated, "objective", lambda model: names[clm_share(model)], [initial])
    lines += ["## Differences", "", *_difference_table(results, replicated)]
    first = results.of_first_seed()
    lines += [f"## Share of CLM (pretraining seed {FIRST_SEED})", ""]
    lines += _score_table(first, scratch, "CLM share", lambda model: f"{clm_share(model):.0%}")
    ratios = results.final(
        lambda model: model.continued_from is None and model.masking_ratio is not None and model.total_steps == 640
        and clm_share(model) in (0, 0.5)
    )  # fmt: skip
    lines += [f"## Masking ratio (pretraining seed {FIRST_SEED})", ""]
    lines += _score_table(first, ratios, "model", lambda model: f"{names[clm_share(model)]}, {model.masking_ratio:.0%}")
    continued = results.final(lambda model: model.continued_from is not None)
    lines += [f"## Continued pretraining with MLM (pretraining seed {FIRST_SEED})", ""]
    lines += _score_table(
        first, continued, "from the decayed", lambda model: "CLM" if "-clm-" in str(model.continued_from) else "MLM"
    )
    lines += ["## Best minus worst of four learning rates, validation", ""]
    body = [
        [_tokens(model), names[clm_share(model)], *(_mean_range(results, model.run, task) for task in TASKS)]
        for model in main
    ]
    lines += markdown_table(["tokens", "objective", *_TASK_TITLES], body)
    lines += ["The differences of these, CLM minus MLM:", "", *_range_differences(results, replicated)]
    pretraining, finetuning = results.records.total_hours
    lines += ["## Compute", "", f"- Pretraining steps: {pretraining:.2f} hours of two cores"]
    lines += [f"- {len(results.records.trials):,} fine-tunings: {finetuning:.2f} hours of two cores"]
    return lines


def _score_table(
    results: Results,
    models: Iterable[Facets],
    title: str,
    label: Callable[[Facets], str],
    first_rows: Iterable[list[str]] = (),
) -> list[str]:
    body = [
        *first_rows,
        *(
            [
                _tokens(model),
                label(model),
                *(results.cell(model.run, task) for task in TASKS),
                _loss(results, model.run),
            ]
            for model in models
        ),
    ]
    return markdown_table(["tokens", title, *_TASK_TITLES, "MLM loss"], body)


def _difference_table(results: Results, main: list[Facets]) -> list[str]:
    by_place = {(model.total_steps, clm_share(model)): model.run for model in main}
    compared = []
    for steps in sorted({model.total_steps for model in main}):
        for first, second in combinations(reversed(MAIN), 2):
            pair = [by_place.get((steps, MAIN[name])) for name in (first, second)]
            for task in TASKS:
                first_means, second_means = (results.means(str(run), task) for run in pair)
                difference = mean_interval(first_means - second_means)
                if difference.count:
                    compared.append((steps, first, second, task, difference))
    corrected = holm(pd.Series([row[-1].p for row in compared], dtype=float))
    body = [
        [f"{steps * TOKENS_PER_BATCH / 1e6:.2f} M", f"{first} minus {second}", f"`{task}`",
         format_interval(difference.mean, difference.half, format_signed), format_p(difference.p), format_p(p)]
        for (steps, first, second, task, difference), p in zip(compared, corrected, strict=True)
    ]  # fmt: skip
    return markdown_table(["tokens", "difference", "task", "points", "p", "p, Holm"], body)


def _mean_range(results: Results, model: str, task: str) -> str:
    ranges = results.rate_ranges(model, task)
    return format_points(ranges.mean()) if len(ranges) else "missing"


def _range_differences(results: Results, models: list[Facets]) -> list[str]:
    """Return a table of CLM's minus MLM's range of scores over the rates, paired by pretraining seed."""
    by_place = {(model.total_steps, clm_share(model)): model for model in models}
    body = []
    for steps in sorted({model.total_steps for model in models}):
        clm, mlm = by_place.get((steps, MAIN["CLM"])), by_place.get((steps, MAIN["MLM"]))
        if clm is None or mlm is None:
            continue
        differences = [
            mean_interval(results.rate_ranges(clm.run, task) - results.rate_ranges(mlm.run, task)) for task in TASKS
        ]
        body.append([_tokens(clm), *(format_interval(each.mean, each.half, format_signed) for each in differences)])
    return markdown_table(["tokens", *_TASK_TITLES], body)


def _loss(results: Results, model: str, objective: str = "mlm") -> str:
    values = [row.loss for row in results.records.losses if (row.model, row.objective) == (model, objective)]
    return f"{fmean(values):.3f}" if values else ""


def _tokens(model: Facets) -> str:
    return f"{model.total_steps * TOKENS_PER_BATCH / 1e6:.2f} M"


def draw(results: Results) -> bytes:
    """Return the figure of scores against tokens, a panel for each task, as PNG."""
    models = results.at_forty_percent()
    budgets = {tokens: f"{tokens:.2g}" for model in models if (tokens := model.total_steps * TOKENS_PER_BATCH / 1e6)}
    with default_style():
        figure, panels = make_panels(TASKS)
        for task, axes in zip(TASKS, panels, strict=True):
            for index, (name, share) in enumerate(MAIN.items()):
                points = [
                    # Beside one another.
                    (model.total_steps * TOKENS_PER_BATCH / 1e6 * 1.04 ** (index - 1), interval, model.run)
                    for model in models
                    if clm_share(model) == share and (interval := results.interval(model.run, task))
                ]
                # An interval over fine-tuning seeds can't be compared with one over pretraining seeds.
                axes.errorbar(
                    [tokens for tokens, _, _ in points],
                    [100 * interval.mean for _, interval, _ in points],
                    [100 * interval.half if results.has_all_seeds(run) else nan for _, interval, run in points],
                    **line_style(index), label=name, capsize=2, marker="o", markersize=3,
                )  # fmt: skip
                for tokens, interval, run in points:
                    if not results.has_all_seeds(run):
                        style = line_style(index) | {"markerfacecolor": "white", "markersize": 4, "zorder": 3}
                        axes.plot(tokens, 100 * interval.mean, marker="o", **style)
            initial = results.interval(UNTRAINED, task)
            if initial is not None:
                axes.axhline(100 * initial.mean, color="gray", linestyle=":", label=UNTRAINED)
            axes.set_xscale("log")
            axes.set_xticks(list(budgets), list(budgets.values()), minor=False)
            axes.minorticks_off()
            axes.set_xlabel("pretraining tokens, millions")
            axes.set_ylabel("test (points)")
        return png(figure)


def main(arguments: list[str] | None = None) -> int:
    """Write the files, and print their names."""
    parser = argparse.ArgumentParser(description="Write the mini study's results.")
    parser.add_argument("folder", type=Path, nargs="?", help="the folder of run.sh; without one, the records are used")
    options = parser.parse_args(arguments)
    try:
        if options.folder is None:
            records = read_written(RECORDS)
        else:
            records = read_run(options.folder)
            if missing := {"study", UNTRAINED} - {hours.study for hours in records.hours}:
                raise UserError(f"{options.folder}: has no {' and no '.join(sorted(missing))}")
            write_records(records, RECORDS)
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    results = Results(records)
    open_store(str(RECORDS)).write("results.md", markdown_page(tables(results)))
    open_store(str(PICTURE.parent)).write(PICTURE.name, draw(results))
    print("\n".join(map(str, (*sorted(RECORDS.iterdir()), PICTURE))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
