"""A real pretraining run through the switch, and the same run killed once and resumed: losses, tokens/s, MFU.

    python benchmarks/gpu_run.py [--batches 200] [--results FOLDER] [key=value ...]

Runs `composer src/main.py yamls/210m_biphasic.yaml` on this machine's text (docstrings, packed into rows of 2,048 tokens),
in bf16 on all GPUs of the machine: once without interruption, and once killed in the last third and started again. All
figures come from the runs' own metrics.jsonl. MFU counts FLOPs as docs/throughput.md says. The data is in `runs/gpu_run/`,
the tables in `--results`, written after the first run and at the end. On a CPU: `precision=fp32` and small values of the
model's keys.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from biphasic.training.metrics_file import read_metrics

ROOT = Path(__file__).parents[1]
WORK = Path("runs/gpu_run")
RESULTS = ROOT / "benchmarks" / "results"
LOSS = "loss/train/total"
_GROUP = """
import os, signal, subprocess, sys, threading

def end_with_benchmark():
    os.read(0, 1)  # returns when the other end of the pipe is closed
    os.killpg(0, signal.SIGKILL)

threading.Thread(target=end_with_benchmark, daemon=True).start()
sys.exit(subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL))
"""
"""Runs a command in this process's group, and kills the group when the benchmark ends, however it ends."""


def prepare() -> None:
    """Gather text, train a tokenizer and convert, unless it is done already."""
    python, recipes = sys.executable, "recipes/quickstart"
    biphasic = [python, "-m", "biphasic"]
    yaml, keys = "yamls/data/quickstart.yaml", ["sequence_length=2048", f"output={WORK}/data"]
    steps = [
        (Path("runs/quickstart/text/gathered.json"), [python, f"{recipes}/gather.py"]),
        (Path("runs/quickstart/tokenizer"), [*biphasic, "tokenizer", yaml, "--size", "8192"]),
        (WORK / "data" / "conversion.json", [*biphasic, "convert", yaml, *keys]),
    ]
    for result, command in steps:
        if not result.exists():
            print(" ".join(command), flush=True)
            subprocess.run(command, check=True)


def command(name: str, batches: int, overrides: list[str]) -> list[str]:
    settings = {
        "run_name": name,
        "output": f"{WORK}/runs",
        "data.folder": f"{WORK}/data",
        "checkpoint.folder": "null",
        "max_duration": f"{batches}ba",
        "global_batch_size": 48,  # the paper's batch over 24 GPUs
        "schedule.warmup": f"{batches // 10}ba",
        "schedule.decay": f"{batches // 10}ba",
        "evaluation.interval": f"{batches}ba",
        "checkpoint.interval": f"{batches // 4}ba",
    }
    options = [f"{key}={value}" for key, value in settings.items()]
    return ["composer", "src/main.py", "yamls/210m_biphasic.yaml", *options, *overrides]


def train(name: str, batches: int, overrides: list[str], kill_at: int | None = None) -> float:
    """Start the run and wait for its end, or kill all of its processes once batch `kill_at` is logged; returns seconds.

    They are also killed when this process ends, even by SIGKILL: otherwise they would keep the GPUs.
    """
    start, metrics = time.monotonic(), WORK / "runs" / name / "metrics.jsonl"
    grouped = [sys.executable, "-c", _GROUP, *command(name, batches, overrides)]
    with subprocess.Popen(grouped, stdin=subprocess.PIPE, start_new_session=True) as process:
        while process.poll() is None:
            if kill_at is not None and len(losses(metrics)) >= kill_at:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return time.monotonic() - start
            time.sleep(0.2)
    if process.returncode:
        raise SystemExit(f"{name}: ended with status {process.returncode}")
    return time.monotonic() - start


def losses(metrics: Path) -> dict[int, float]:
    """Training losses by batch; a batch that was trained twice has the later loss."""
    if not metrics.exists():
        return {}
    return {entry["batch"]: entry[LOSS] for entry in read_metrics(metrics) if LOSS in entry}


def figures(metrics: Path) -> dict[str, float]:
    """The run's totals, from its last lines."""
    totals, kinds = dict[str, float](), ("throughput/", "time/", "memory/", "data/")
    for entry in read_metrics(metrics):
        totals |= {key: value for key, value in entry.items() if key.startswith(kinds)}
    return totals


def markdown(record: dict[str, Any]) -> str:
    complete = record["whole"]
    lines = [f"# A run through the switch on {record['machine']['device']}", "",
             f"`{record['command']}`, {record['machine']}", ""]  # fmt: skip
    lines += ["| phase | tokens/s | MFU | step, median | p99 |", "|-|-:|-:|-:|-:|"]
    for phase in ("clm", "mlm"):
        mfu = complete.get(f"throughput/{phase}/mfu")
        share = "" if mfu is None else f"{mfu:.1%}"
        step = [f"{complete[f'time/{phase}/step_seconds_p{percent}']:.3g} s" for percent in (50, 99)]
        speed = f"{complete[f'throughput/{phase}/tokens_per_second']:,.0f}"
        lines.append(f"| {' | '.join([phase, speed, share, *step])} |")
    if "killed_at" in record:
        identical = f"{record['identical']} of {record['compared']} losses are those of the run without a stop"
        difference = f"largest difference {record['largest_difference']:.3g}"
        lines += ["", f"Killed after batch {record['killed_at']} and resumed: {identical}; {difference}."]
    return "\n".join(lines) + "\n"


def write(record: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu-run.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "gpu-run.md").write_text(markdown(record), encoding="utf-8")
    print(markdown(record), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--batches", type=int, default=200, help="of each run; the switch is in the middle")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = options.results.resolve()
    os.chdir(ROOT)
    print(f"gpu_run: two runs of {options.batches} batches in {WORK}/, then {results}/gpu-run.md", flush=True)
    prepare()
    for name in ("whole", "killed"):
        shutil.rmtree(WORK / "runs" / name, ignore_errors=True)
    seconds = [train("whole", options.batches, options.overrides)]
    complete = losses(WORK / "runs" / "whole" / "metrics.jsonl")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "a CPU"
    record = {
        "command": " ".join(["python benchmarks/gpu_run.py", f"--batches {options.batches}", *options.overrides]),
        "machine": {"device": device, "torch": torch.__version__, "date": datetime.now(UTC).date().isoformat()},
        "seconds": seconds,
        "losses": list(complete.values()),
        "whole": figures(WORK / "runs" / "whole" / "metrics.jsonl"),
    }
    write(record, results)  # a machine may be at hand for minutes only
    kill_at = options.batches * 5 // 6
    seconds.append(train("killed", options.batches, options.overrides, kill_at))
    seconds.append(train("killed", options.batches, options.overrides))
    killed = losses(WORK / "runs" / "killed" / "metrics.jsonl")
    differences = [abs(complete[batch] - killed[batch]) for batch in complete]
    record |= {
        "killed_at": kill_at,
        "compared": len(differences),
        "identical": differences.count(0.0),
        "largest_difference": max(differences),
    }
    write(record, results)


if __name__ == "__main__":
    main()
