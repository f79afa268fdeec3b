"""The folder of a small study, as pretraining, sweeps and evaluations leave it, from a list of models."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from biphasic.config.load import dump
from biphasic.config.model_names import Facets
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.sweep import SweepConfig
from biphasic.storage import open_store
from biphasic.sweep.grid import build_grid, trial_configs
from biphasic.sweep.records import Cell, GridTask, TrialRecord, write_grid, write_record
from helpers.sweeps import MNLI, MSMARCO, SST2, Score, grid_of, records_of

MODELS = (
    *("210m-clm-400", "210m-mlm20-400", "210m-mlm40-400"),
    *("610m-clm-400", "610m-mlm20-400", "610m-mlm40-400"),
    *("610m-clm-100-mlm40-400", "610m-clm-200-mlm40-400", "610m-clm-100-mlm20-400"),
    *("610m-clm-60-mlm40-200", "610m-mlm40-200", "610m-clm-200"),
    *("610m-mlm40-dec400-mlm40-420", "610m-mlm40-dec400-mlm40-500"),
    *("610m-clm-dec400-mlm40-420", "610m-clm-dec400-mlm40-500"),
    *("610m-clm-400-100", "610m-mlm40-400-100"),
)
"""Models for every figure. The last two are checkpoints."""
RATES, SEEDS = (1e-5, 5e-5), (0, 1, 2)
STEP_SECONDS = 0.25
_PHASE = re.compile(r"-(clm|mlm(?P<percent>\d\d))-(?P<decayed>dec)?(?P<end>[\d.]+k?)(?=-|$)")


def facets_of_name(name: str) -> Facets:
    """What a name of the paper says: `610m-mlm40-dec42k-mlm40-54k`, or with a checkpoint's steps at the end."""

    def steps_of(text: str) -> int:
        return round(float(text.removesuffix("k")) * (1000 if text.endswith("k") else 1))

    size, _, rest = name.partition("-")
    phases = list(_PHASE.finditer(f"-{rest}"))
    end = size + f"-{rest}"[: phases[-1].end()]
    start = base_steps = clm_steps = 0
    continued_from, objectives, ratios = None, [], set[float]()
    for phase in phases:
        steps = steps_of(phase["end"])
        if phase["decayed"]:
            continued_from, base_steps = (size + f"-{rest}"[: phase.end()]).replace("-dec", "-"), steps
            objectives, ratios, clm_steps = [], set(), 0
        else:
            objectives.append(phase[1][:3])
            ratios |= {int(phase["percent"]) / 100} if phase["percent"] else set()
            clm_steps += 0 if phase["percent"] else steps - start
        start = steps
    checkpoint = steps_of(name.removeprefix(f"{end}-")) if name != end else start
    ratio = ratios.pop() if len(ratios) == 1 else None
    return Facets(end, size, "-".join(objectives), ratio, clm_steps, start, checkpoint, continued_from, base_steps)


def config_of(name: str, **changes: Any) -> PretrainConfig:
    """The resolved configuration of a model's run, by the name."""
    facets = facets_of_name(name)
    own = facets.total_steps - facets.base_steps
    mlm = {"name": "mlm", "masking_ratio": facets.masking_ratio}
    phases: list[dict[str, Any]] = {
        "clm": [{"name": "clm"}],
        "mlm": [mlm],
        "clm-mlm": [{"name": "clm", "until": f"{facets.clm_steps}ba"}, mlm],
    }[facets.objective]
    model = {"preset": facets.size}
    if facets.continued_from is not None:
        model = {"init_from": f"runs/study/{facets.continued_from}/checkpoints"}
    values = {
        "job": "pretrain",
        "run_name": name,
        "tokenizer": "tokenizer",
        "max_duration": f"{own}ba",
        "global_batch_size": 8,
        "model": model,
        "data": {"sequence_length": 32, "train": {"local": "data/train"}},
        "objective": {"phases": phases},
        "schedule": {"warmup": "10ba", "decay": "20ba"} if own > 30 else {},
    }
    return PretrainConfig.model_validate({**values, **changes})


def metrics_of(facets: Facets) -> list[dict[str, Any]]:
    """Falling losses of a run's batches, with a validation every 50 batches."""
    lines = []
    for batch in range(1, facets.total_steps - facets.base_steps + 1):
        objective = "clm" if batch <= facets.clm_steps else "mlm"
        loss = 2 + 3 / (1 + batch / 50) + 0.01 * (batch % 7)
        line: dict[str, Any] = {"batch": batch, "tokens": 250 * batch, "time": float(batch)}
        line |= {"loss/train/total": loss, f"loss/train/{objective}": loss, "time/step_seconds": STEP_SECONDS}
        if batch % 50 == 0:
            line |= {"metrics/clm/loss": loss + 0.1, "metrics/mlm/loss": loss + 0.2}
        lines.append(line)
    return lines


def score(cell: Cell, name: str) -> tuple[float, float]:
    """Better with more steps and with the larger size; the second rate is best."""
    facets = facets_of_name(cell.model)
    base = 0.5 + 0.0002 * facets.steps + 0.0001 * facets.clm_steps + (0.03 if facets.size == "610m" else 0)
    noise = 0.002 * ((cell.seed * 7 + len(name) * 3 + len(cell.model)) % 5)
    return base + 1000 * cell.lr, base + noise + 1000 * cell.lr


def count_batches(metrics: Path) -> int:
    """The number of batches that all attempts of a run have trained."""
    return sum('"loss/train/total"' in line for line in metrics.read_text(encoding="utf-8").splitlines())


def write_run(folder: Path, name: str, shown_as: str | None = None) -> None:
    """Write a run's configuration and metrics, into the folder `shown_as`."""
    run = folder / (shown_as or name)
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump(config_of(name)), encoding="utf-8")
    lines = [json.dumps(line) + "\n" for line in metrics_of(facets_of_name(name))]
    (run / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")


def write_sweep(
    folder: Path,
    models: Sequence[str],
    scores: Score | Callable[[Cell, str], Any] = score,
    tasks: Sequence[GridTask] = (SST2, MNLI, MSMARCO),
) -> None:
    """Write a sweep over the tasks in the folder."""
    grid = grid_of(models, tasks, RATES, SEEDS)
    store = open_store(str(folder))
    for record in records_of(grid, scores).values():
        write_record(store, record)
    write_grid(store, grid)


def write_study(folder: Path, models: Sequence[str] = MODELS) -> None:
    """Write a study's folder with all models' runs, and a sweep over all models."""
    for name in models:
        if facets_of_name(name).run == name:
            write_run(folder, name)
    write_sweep(folder / "sweep", models)


def score_rows(scores: dict[tuple[str, str, str, str, int], float]) -> pd.DataFrame:
    """Rows for `score_table`, from scores by model, group, task, test set and seed, at settled rates."""
    names = ["model", "group", "task", "test_set", "seed"]
    rows = pd.DataFrame([(*key, value) for key, value in scores.items()], columns=[*names, "score"])
    in_mean = ~rows.duplicated(["model", "group", "task", "seed"])
    values: dict[str, Any] = {"metric": "accuracy", "lr": 1e-5, "chosen_validation": 0.5, "settled": True}
    return rows.assign(trained_on=rows.task, in_mean=in_mean, **values)


def fine_tune(sweep: SweepConfig) -> None:
    """Run a sweep's trials in this process, and write the records that workers write."""
    from biphasic.finetuning import trial

    configs, store = trial_configs(sweep), open_store(sweep.output)
    grid = build_grid(sweep, configs)
    for name, cell in grid.trials.items():
        write_record(store, TrialRecord(name, cell, "done", tuple(trial.run_trial(configs[cell]).results)))
    write_grid(store, grid)
