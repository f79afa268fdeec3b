"""Tables, a figure and the raw records of the mini study over its pretraining seeds, for docs/results.md.

    python recipes/mini/results.py FOLDER     # the folder of run.sh; writes recipes/mini/results/ and docs/results.png

A model's score with a pretraining seed is the mean over its fine-tuning seeds, at the learning rate that validation chooses.
Intervals are 95%, over pretraining seeds where there are several (paired by seed in differences), otherwise over
fine-tuning seeds. p-values of the differences are corrected by Holm's method over all of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import cached_property
from itertools import combinations
from math import nan
from pathlib import Path
from statistics import fmean

from biphasic.errors import UserError
from biphasic.report.drawing import default_style, line_style, make_panels, png
from biphasic.report.formatting import (
    csv_table,
    format_interval,
    format_p,
    format_points,
    format_signed,
    markdown_table,
)
from biphasic.report.statistics import Interval, holm, mean_interval, paired_difference
from biphasic.report.study_folder import Study, read_study
from biphasic.report.study_models import Facets
from biphasic.report.sweep_scores import collect_scores
from biphasic.storage import open_store
from biphasic.sweep.records import read_grid, read_records
from biphasic.training.metrics_file import parse_metrics

HERE = Path(__file__).parent
PICTURE = HERE.parents[1] / "docs" / "results.png"
TASKS = ("types", "parameters", "questions", "retrieval")
MAIN = {"MLM": 0.0, "CLM→MLM": 0.5, "CLM": 1.0}
"""The objectives of the main table by their share of CLM steps."""
TOKENS_PER_BATCH = 4096
UNTRAINED = "untrained"
_TASK_TITLES = tuple(f"`{task}`" for task in TASKS)
_FIRST_SEED = 42


@dataclass(frozen=True)
class Trial:
    """A fine-tuning. Scores are from 0 to 1."""

    pretraining_seed: int
    model: str
    task: str
    lr: float
    finetuning_seed: int
    validation: float | None
    test: float | None
    chosen: bool
    """Whether its rate is the one that validation chose for this model and task."""


@dataclass(frozen=True)
class Results:
    """What the studies of all pretraining seeds measured."""

    models: Mapping[str, Facets]
    trials: Sequence[Trial]
    losses: Mapping[tuple[str, str], Mapping[int, float]]
    """Validation losses at the end of each run, in nats, by (model, objective) and pretraining seed."""

    @cached_property
    def scores(self) -> dict[tuple[str, str], dict[int, list[float]]]:
        """Test scores at the chosen rate, one for each fine-tuning seed, by (model, task) and pretraining seed."""
        scores: dict[tuple[str, str], dict[int, list[float]]] = {}
        for trial in self.trials:
            if trial.chosen and trial.test is not None:
                by_seed = scores.setdefault((trial.model, trial.task), {})
                by_seed.setdefault(trial.pretraining_seed, []).append(trial.test)
        return scores

    def of_first_seed(self) -> Results:
        """Return what the first pretraining seed measured, the only one of most models. Its intervals can be compared."""
        losses = {
            key: {_FIRST_SEED: by_seed[_FIRST_SEED]} for key, by_seed in self.losses.items() if _FIRST_SEED in by_seed
        }
        trials = [trial for trial in self.trials if trial.pretraining_seed == _FIRST_SEED]
        return Results(self.models, trials, losses)

    def rate_range(self, model: str, task: str) -> str:
        """Return the best minus the worst rate's validation score in points, as text.

        Both are those of the fine-tuning seed that chooses the rate; the mean over pretraining seeds.
        """
        by_seed: dict[int, list[float]] = {}
        for trial in self.trials:
            if (
                (trial.model, trial.task) == (model, task)
                and trial.finetuning_seed == 0
                and trial.validation is not None
            ):
                by_seed.setdefault(trial.pretraining_seed, []).append(trial.validation)
        ranges = [max(values) - min(values) for values in by_seed.values()]
        return format_points(fmean(ranges)) if ranges else "missing"

    def final(self, is_wanted: Callable[[Facets], bool]) -> list[Facets]:
        """Return the ends of the runs for which `is_wanted` is true, from the fewest to the most steps."""
        found = [model for model in self.models.values() if model.is_final and is_wanted(model)]
        return sorted(
            found, key=lambda model: (model.total_steps, clm_share(model), model.masking_ratio or 0, model.run)
        )

    def at_forty_percent(self) -> list[Facets]:
        """Return the ends of the runs from initial weights whose MLM, if they have any, masks 40%."""
        return self.final(lambda model: model.continued_from is None and model.masking_ratio in (None, 0.4))

    def means(self, model: str, task: str) -> dict[int, float]:
        """Return a model's mean score on a task by pretraining seed."""
        return {seed: fmean(values) for seed, values in self.scores.get((model, task), {}).items()}

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
            return mean_interval(list(self.means(model, task).values()))
        return next((mean_interval(values) for values in by_seed.values()), None)

    def cell(self, model: str, task: str) -> str:
        """Return a model's score on a task in points, as text."""
        interval = self.interval(model, task)
        return "missing" if interval is None else format_interval(interval, format_points)


def clm_share(model: Facets) -> float:
    """Return the share of CLM steps in a run."""
    return model.clm_steps / (model.total_steps - model.base_steps)


def study_folders(folder: Path) -> list[tuple[int, Path]]:
    """Return `study/`, `untrained/`, and `seed<N>/` and `long<N>/`, if there, each with its pretraining seed."""
    folders = [(_FIRST_SEED, folder / "study"), (_FIRST_SEED, folder / UNTRAINED)]
    for name in ("seed", "long"):
        folders += [(int(part.name.removeprefix(name)), part) for part in sorted(folder.glob(f"{name}*"))]
    return folders


def machine_hours(folder: Path) -> tuple[float, float]:
    """Return the machine's hours in pretraining steps, of two ranks each, and in fine-tunings, two at a time."""
    steps, finetunings = 0.0, 0.0
    for _, part in study_folders(folder):
        for file in part.glob("*/metrics.jsonl"):
            steps += sum(entry.get("time/step_seconds", 0.0) for entry in parse_metrics(file.read_text()))
        store = open_store(str(part / "sweep"))
        records = read_records(store, read_grid(store).trials).values()
        finetunings += sum(record.seconds.get("total", 0.0) for record in records if "copy_of" not in record.about)
    return steps / 3600, finetunings / 3600 / 2


def read_results(folder: Path) -> Results:
    """Read the studies of the recipe's folder, and the scores of the untrained model."""
    models: dict[str, Facets] = {}
    trials = list[Trial]()
    losses: dict[tuple[str, str], dict[int, float]] = {}
    for seed, part in study_folders(folder):
        study = read_study([str(part)])
        models |= study.models
        trials += read_trials(part / "sweep", seed)
        for (model, objective), loss in _last_losses(study).items():
            losses.setdefault((model, objective), {})[seed] = loss
    return Results(models, trials, losses)


def read_trials(folder: Path, pretraining_seed: int) -> Iterator[Trial]:
    """Yield the finished trials of a sweep's folder."""
    store = open_store(str(folder))
    grid = read_grid(store)
    sweep = collect_scores(grid, read_records(store, grid.trials))
    for name, cell in sweep.planned.items():
        if sweep.status(name) != "done":
            continue
        [result] = sweep.records[name].results
        chosen = name in sweep.chosen[cell.model, cell.task, result.name].trials.values()
        yield Trial(pretraining_seed, cell.model, cell.task, cell.lr, cell.seed, result.validation, result.test, chosen)


def _last_losses(study: Study) -> dict[tuple[str, str], float]:
    points = sorted((point for point in study.losses if point.split == "validation"), key=lambda point: point.step)
    return {(point.run, point.objective): point.loss for point in points}


def tables(results: Results, hours: tuple[float, float]) -> list[str]:
    """Return the lines of results.md; `hours` are those of `machine_hours`."""
    scratch = results.at_forty_percent()
    main = [model for model in scratch if clm_share(model) in MAIN.values()]
    names = {share: name for name, share in MAIN.items()}
    replicated = [model for model in main if results.has_all_seeds(model.run)]
    lines = [f"## Objectives by budget ({results.seeds} pretraining seeds)", ""]
    initial = ["0", UNTRAINED, *(results.cell(UNTRAINED, task) for task in TASKS), ""]
    lines += _score_table(results, replicated, "objective", lambda model: names[clm_share(model)], [initial])
    lines += ["## Differences", "", *_difference_table(results, replicated)]
    first = results.of_first_seed()
    lines += [f"## Share of CLM (pretraining seed {_FIRST_SEED})", ""]
    lines += _score_table(first, scratch, "CLM share", lambda model: f"{clm_share(model):.0%}")
    ratios = results.final(
        lambda model: model.continued_from is None and model.masking_ratio is not None and model.total_steps == 640
        and clm_share(model) in (0, 0.5)
    )  # fmt: skip
    lines += [f"## Masking ratio (pretraining seed {_FIRST_SEED})", ""]
    lines += _score_table(first, ratios, "model", lambda model: f"{names[clm_share(model)]}, {model.masking_ratio:.0%}")
    continued = results.final(lambda model: model.continued_from is not None)
    lines += [f"## Continued pretraining with MLM (pretraining seed {_FIRST_SEED})", ""]
    lines += _score_table(
        first, continued, "from the decayed", lambda model: "CLM" if "-clm-" in str(model.continued_from) else "MLM"
    )
    checkpoints = [name for name, model in sorted(results.models.items()) if not model.is_final]
    body = [[name, *(first.cell(name, task) for task in TASKS)] for name in checkpoints]
    lines += [
        f"## Checkpoints before the decay (pretraining seed {_FIRST_SEED})",
        "",
        *markdown_table(["checkpoint", *_TASK_TITLES], body),
    ]
    lines += ["## Best minus worst of four learning rates, validation", ""]
    body = [
        [_tokens(model), names[clm_share(model)], *(results.rate_range(model.run, task) for task in TASKS)]
        for model in main
    ]
    lines += markdown_table(["tokens", "objective", *_TASK_TITLES], body)
    lines += ["## Validation losses", "", *_loss_table(results)]
    steps, finetunings = hours
    lines += ["## Compute", "", f"- Pretraining steps: {steps:.2f} hours of two cores"]
    lines += [f"- {len(results.trials):,} fine-tunings: {finetunings:.2f} hours of two cores"]
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
                means = [results.means(str(run), task) for run in pair]
                difference = paired_difference(*means)
                if difference is not None:
                    compared.append((steps, first, second, task, difference))
    corrected = holm([row[-1].p for row in compared])
    body = [
        [f"{steps * TOKENS_PER_BATCH / 1e6:.2f} M", f"{first} minus {second}", f"`{task}`",
         format_interval(difference, format_signed), format_p(difference.p), format_p(p)]
        for (steps, first, second, task, difference), p in zip(compared, corrected, strict=True)
    ]  # fmt: skip
    return markdown_table(["tokens", "difference", "task", "points", "p", "p, Holm"], body)


def _loss_table(results: Results) -> list[str]:
    models = results.final(lambda model: True)
    body = [[model.run, *(_loss(results, model.run, objective) for objective in ("clm", "mlm"))] for model in models]
    return markdown_table(["model", "CLM, nats", "MLM, nats"], body)


def _loss(results: Results, model: str, objective: str = "mlm") -> str:
    values = results.losses.get((model, objective))
    return f"{fmean(values.values()):.3f}" if values else ""


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
                    [
                        100 * interval.half if interval.half is not None and results.has_all_seeds(run) else nan
                        for _, interval, run in points
                    ],
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
    parser.add_argument("folder", type=Path, help="the folder of run.sh")
    try:
        folder = parser.parse_args(arguments).folder
        results, hours = read_results(folder), machine_hours(folder)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    trials = sorted(map(astuple, results.trials))
    losses = [(seed, *key, loss) for key, by_seed in sorted(results.losses.items()) for seed, loss in by_seed.items()]
    target = open_store(str(HERE / "results"))
    target.write("trials.csv", csv_table(" ".join(field.name for field in fields(Trial)), trials))
    target.write("losses.csv", csv_table("pretraining_seed model objective loss", losses))
    target.write("results.md", ("\n".join(tables(results, hours)).rstrip() + "\n").encode())
    open_store(str(PICTURE.parent)).write(PICTURE.name, draw(results))
    print("\n".join(map(str, (*sorted((HERE / "results").iterdir()), PICTURE))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
