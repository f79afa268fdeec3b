"""Fine-tune the models of protocol.md and followup.md, and write a record for each pretraining seed.

    python recipes/mini/protocol_run.py finetune protocol runs/mini 3 4    # resumes after an interruption
    python recipes/mini/protocol_run.py record protocol runs/mini 3 4      # writes recipes/mini/protocol/seed-*.json

`protocol`, `longer` or `ratios` is the name of a study, and `runs/mini` the folder of run.sh, in which `<name>.yaml` has
trained and exported the models of these seeds. Nothing here prints a score.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from followup import LONGER, RATIOS
from protocol import RUNS
from results import TASKS
from seed_records import PUBLIC, RATES, SeedRuns, Sources, Trial, record_bytes

from biphasic.errors import UserError
from biphasic.report.formatting import format_rate
from biphasic.storage import open_store
from biphasic.sweep.records import TRIALS_FOLDER, read_records
from biphasic.training.metrics_file import parse_metrics

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STUDIES = {runs.name: runs for runs in (RUNS, LONGER, RATIOS)}


def sweeps(runs: SeedRuns, folder: Path, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the sweeps: one for each task, and its rates and numbers of seeds."""
    files = {task: f"recipes/mini/finetune_{task}.yaml" for task in TASKS}
    files |= {task: f"recipes/mini/public/finetune_{task}.yaml" for task in PUBLIC}
    groups: dict[tuple[float, str, tuple[int, ...]], list[str]] = defaultdict(list)
    for (model, objective), task in product(runs.models.items(), files):
        if numbers := runs.finetuning_seeds(model, task):
            groups[RATES[objective][PUBLIC.get(task, task)], task, numbers].append(model)
    for (rate, task, numbers), models in groups.items():
        yield {
            "job": "sweep",
            "output": str(folder / runs.name / "sweeps" / f"{task}-{format_rate(rate)}-{len(numbers)}"),
            "models": {
                f"{model}-s{seed}": {"path": str(folder / runs.name / f"seed{seed}" / model / "encoder")}
                for seed in seeds
                for model in models
            },
            "tasks": {task: files[task]},
            "learning_rates": [rate],
            "seeds": list(numbers),
        }


def finetune(runs: SeedRuns, folder: Path, seeds: Sequence[int]) -> None:
    """Run the sweeps, one after another. What they print, which includes scores, goes to `<output>.log`."""
    for sweep in sweeps(runs, folder, seeds):
        output = Path(sweep["output"])
        output.parent.mkdir(parents=True, exist_ok=True)
        yaml_file, log = (output.with_name(output.name + suffix) for suffix in (".yaml", ".log"))
        yaml_file.write_text(yaml.safe_dump(sweep, sort_keys=False))
        print(f"{output}: fine-tuning; its output is in {log}", flush=True)
        with log.open("a") as file:
            command = [sys.executable, "src/main.py", str(yaml_file)]
            if subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, check=False).returncode:
                raise UserError(f"{output}: the sweep failed, and {log} says why; the same command resumes")


def record(runs: SeedRuns, folder: Path, seed: int) -> dict[str, Any]:
    """Return what a seed's record holds.

    Raises:
        UserError: a fine-tuning is missing or failed.
    """
    sources, trials, seconds = Sources(), list[Trial](), 0.0
    for sweep in sweeps(runs, folder, [seed]):
        store = open_store(sweep["output"])
        # Not the grid's: it is that of the last call, which may have had other seeds.
        names = [file.stem for file in Path(sweep["output"], TRIALS_FOLDER).glob("*.json")]
        for done in read_records(store, names).values():
            cell = done.cell
            model, _, number = cell.model.rpartition("-s")
            if int(number) != seed:
                continue
            if done.status != "done":
                raise UserError(f"seed {seed}: {model} on {cell.task} failed: {done.error}")
            (result,) = done.results
            assert result.validation is not None and result.test is not None
            seconds += done.seconds["total"]
            source = sources.index(done.about)
            trials.append(Trial(model, cell.task, cell.lr, cell.seed, result.validation, result.test, source))
    found, expected = {(trial.model, trial.task, trial.seed) for trial in trials}, set(runs.cells())
    if found != expected or len(trials) != len(expected):
        raise UserError(
            f"seed {seed}: {len(trials)} fine-tunings, expected {len(expected)}; missing: {sorted(expected - found)}"
        )
    trained = sorted((folder / runs.name / f"seed{seed}").glob("*/metrics.jsonl"))
    return {
        "seed": seed,
        "data": data_hashes(folder),
        "sources": sources.rows,
        "pretraining": {metrics.parent.name: _pretraining(metrics.parent, sources) for metrics in trained},
        "finetuning_seconds": round(seconds),
        "trials": sorted(trials),
    }


def data_hashes(folder: Path) -> dict[str, str]:
    """Return hashes of the rows, the tokenizer and the tasks, by which records of several machines are compared."""
    conversion = json.loads((folder / "data" / "conversion.json").read_text())
    hashes = {
        "rows": conversion["splits"]["train"]["index_sha256"],
        "validation": conversion["splits"]["validation"]["index_sha256"],
        "tokenizer": conversion["tokenizer"]["sha256"],
    }
    sources = {task: folder / "text" / "sources" / task for task in TASKS}
    for task, tables in (sources | {task: folder / "public" / task for task in PUBLIC}).items():
        digest = hashlib.sha256()
        for file in sorted(tables.rglob("*.parquet")):
            digest.update(file.name.encode() + file.read_bytes())
        hashes[task] = digest.hexdigest()
    return hashes


def _pretraining(run: Path, sources: Sources) -> dict[str, Any]:
    """Return a run's source, the seconds of its steps, and its last validation losses in nats."""
    entries = parse_metrics((run / "metrics.jsonl").read_text())
    losses = {key: entry[key] for entry in entries for key in ("metrics/clm/loss", "metrics/mlm/loss") if key in entry}
    return {
        "source": sources.index_of_run(run),
        "seconds": round(sum(entry.get("time/step_seconds", 0.0) for entry in entries)),
        "losses": losses,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run a step for the given seeds."""
    parser = argparse.ArgumentParser(description="Fine-tune a study's models, or write their records.")
    parser.add_argument("step", choices=["finetune", "record"])
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("folder", type=Path, help="the folder of run.sh")
    parser.add_argument("seeds", type=int, nargs="+", help="pretraining seeds")
    options = parser.parse_args(arguments)
    runs, folder = STUDIES[options.study], options.folder.resolve()
    try:
        if not folder.is_dir():
            raise UserError(f"{options.folder}: doesn't exist; recipes/mini/run.sh makes it")
        if options.step == "finetune":
            finetune(runs, folder, options.seeds)
        for seed in options.seeds if options.step == "record" else ():
            data = record_bytes(record(runs, folder, seed), "trials")
            open_store(str(runs.records)).write(f"seed-{seed}.json", data)
            print(runs.records / f"seed-{seed}.json")
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
