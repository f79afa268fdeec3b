"""A run of a minute for test_slurm.sh: a small dataset, its YAML, and what must be true of the finished run.

PYTHONPATH=tests python tests/launch/tiny_run.py write FOLDER BATCHES     # prints the YAML's path
PYTHONPATH=tests python tests/launch/tiny_run.py check FOLDER BATCHES     # status 1, and why
PYTHONPATH=tests python tests/launch/tiny_run.py study FOLDER BATCHES     # prints the path of a study's YAML
PYTHONPATH=tests python tests/launch/tiny_run.py check-study FOLDER BATCHES     # status 1, and why
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from helpers.tiny import content_of, write_rows, write_tokenizer  # pyright: ignore[reportMissingImports]


def write(folder: Path, batches: int) -> Path:
    """Rows, tokenizer and YAML, in an empty folder."""
    write_rows(folder / "data" / "train", 700, seed=1)
    write_tokenizer(folder / "data" / "tokenizer")
    content = {
        **content_of("run", folder / "runs", folder / "data"),
        "max_duration": f"{batches}ba",
        "parallelism": {"strategy": "ddp"},
        "objective": {"phases": [{"name": "mlm", "masking_ratio": 0.4}]},
        # No switch, no decay and no interval that would save: the only checkpoint before the last is the preemption's.
        "schedule": {"warmup": "3ba", "decay": "0ba"},
        "checkpoint": {"interval": f"{10 * batches}ba", "keep": 10},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def write_study(folder: Path, batches: int) -> Path:
    """A trunk, and two branches that share a third and two thirds of it, for Slurm's partition `low`."""
    base = yaml.safe_load(write(folder, batches).read_text())
    for key in ("job", "run_name", "output"):
        del base[key]
    base["checkpoint"]["interval"] = f"{batches // 10}ba"

    def switch_at(batch: int) -> dict[str, object]:
        return {"objective": {"phases": [{"name": "mlm", "until": f"{batch}ba"}, {"name": "clm"}]}}

    content = {
        "job": "study",
        "folder": str(folder / "study"),
        "base": base,
        "models": {"trunk": {}, "early": switch_at(batches // 3), "late": switch_at(2 * batches // 3)},
        "executor": {"kind": "slurm", "options": ["--partition=low", f"--output={folder}/%x-%j.out"]},
    }
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def attempts_of(run: Path) -> list[dict[str, Any]]:
    """The run's attempts, which are printed."""
    attempts = [json.loads(path.read_text()) for path in sorted((run / "checkpoints" / "attempts").glob("*.json"))]
    for attempt in attempts:
        print(run.name, {key: attempt.get(key) for key in ("attempt", "since", "ranks", "from", "batch", "reason")})
    return attempts


def study_problems(folder: Path, batches: int) -> list[str]:
    """What is not as it should be: a trunk that was preempted and killed, and branches that train their own batches only."""
    problems = []
    study = folder / "study"
    attempts = attempts_of(study / "trunk")
    if len(attempts) != 3:
        problems.append(f"the trunk had {len(attempts)} attempts: expected one each until preempted, killed and finished")
    elif not 0 < attempts[0]["batch"] <= attempts[2]["from"]["batch"] < batches:
        problems.append(
            f"the trunk's last attempt began at {attempts[2]['from']}, the first ended at {attempts[0]['batch']}"
        )
    for name, first in (("early", batches // 3), ("late", 2 * batches // 3)):
        attempts = attempts_of(study / name)
        if [attempt["from"]["batch"] for attempt in attempts] != [first]:
            problems.append(f"{name} did not begin at batch {first}, or not once")
        lines = [json.loads(line) for line in (study / name / "metrics.jsonl").read_text().splitlines()]
        trained = [line["batch"] for line in lines if "loss/train/total" in line]
        if trained != list(range(first + 1, batches + 1)):
            problems.append(f"{name} trained {len(trained)} batches, not those from {first + 1} to {batches}")
    return problems


def problems(folder: Path, batches: int) -> list[str]:
    """What is not as it should be: each batch trained once, in two attempts, the second from the first's checkpoint."""
    run = folder / "runs" / "run"
    # The lines themselves: read_metrics passes over what was trained twice.
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [line["batch"] for line in lines if "loss/train/total" in line]
    found = []
    if trained != list(range(1, batches + 1)):
        found.append(f"{len(trained)} batches were trained, {len(set(trained))} different ones, of {batches}")
    attempts = attempts_of(run)
    saved = sorted(int(path.stem[2:]) for path in (run / "checkpoints").glob("ba*.json"))
    if len(saved) != 2 or not 0 < saved[0] < saved[-1] == batches:
        found.append(f"checkpoints at {saved}: expected the preemption's and the last, {batches}")
    if len(attempts) != 2:
        found.append(f"{len(attempts)} attempts, not 2")
    elif attempts[1]["from"] is None or attempts[1]["from"]["batch"] != attempts[0]["batch"]:
        found.append(f"the first attempt ended at batch {attempts[0]['batch']}, the second began at {attempts[1]['from']}")
    return found


def main(command: str, folder: str, batches: str) -> int:
    """Exit status: 1 if something is not as it should be."""
    if command in ("write", "study"):
        make = write if command == "write" else write_study
        print(make(Path(folder), int(batches)))
        return 0
    found = (study_problems if command == "check-study" else problems)(Path(folder), int(batches))
    print("\n".join(found) or f"each of the {batches} batches was trained as expected")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
