"""The steps around the boundary of two phases that read different data from a bucket.

    python benchmarks/phases.py [--steps 80] [--around 10] [--width 256] [--runs 3]

Each run has two phases of as many steps. The second one reads other data, of rows twice as long, in half as many rows a
batch, so that its batches have as many tokens. The loader of its data starts 50 batches before it. A step lasts from the
request for its batch to the end of its training (`time/step_seconds`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import yaml
from open_dataset import write_rows
from saving import serve_bucket
from tables import save
from workload import write_tokenizer

LENGTH, ROWS = 256, 4


def measure(steps: int = 80, around: int = 10, width: int = 256, runs: int = 3) -> dict[str, Any]:
    """Return the median step, and the longest one within `around` steps of the boundary, in seconds and in medians."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        server, bucket = serve_bucket(folder)
        try:
            for name, length in (("first", LENGTH), ("second", 2 * LENGTH)):
                _store(folder / name, length, ROWS * (steps + 100), bucket)
            write_tokenizer(folder / "tokenizer", 1 << 16)
            measured = [_run(folder, f"run-{number}", steps, width) for number in range(runs)]
        finally:
            server.terminate()
            server.wait(10)
    medians, longest = [], []
    for seconds in measured:
        median = statistics.median(seconds.values())
        medians.append(median)
        longest.append(max(seconds[step] for step in range(steps - around, steps + around + 1)))
    return {
        "median_step_seconds": [round(value, 4) for value in medians],
        "longest_step_near_the_boundary_seconds": [round(value, 4) for value in longest],
        "longest_step_in_medians": [round(a / b, 2) for a, b in zip(longest, medians, strict=True)],
    }


def _store(folder: Path, length: int, rows: int, bucket: str) -> None:
    import boto3

    write_rows(folder, rows, length, size_limit=1 << 20)
    client = boto3.client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"])
    for path in folder.iterdir():
        client.upload_file(str(path), bucket.removeprefix("s3://"), f"{folder.name}/{path.name}")


def _run(folder: Path, name: str, steps: int, width: int) -> dict[int, float]:
    """Train, and return the seconds of each step by batch, without the first ones of a start."""
    from biphasic.config.load import load_job
    from biphasic.config.pretrain import PretrainConfig
    from biphasic.training.metrics_file import read_metrics
    from biphasic.training.recipe import pretrain

    def stream(data: str) -> dict[str, str]:
        return {"remote": f"s3://bench/{data}", "local": str(folder / "cache" / name / data)}

    content = {
        "job": "pretrain", "run_name": name, "output": str(folder / "runs"), "tokenizer": str(folder / "tokenizer"),
        "max_duration": f"{2 * steps}ba", "global_batch_size": ROWS, "microbatch_size": ROWS,
        "model": {"vocab_size": 1 << 16, "hidden_size": width, "intermediate_size": 3 * width, "num_layers": 4,
                  "num_heads": 4},
        "data": {"sequence_length": LENGTH, "train": stream("first"), "num_workers": 1},
        "objective": {"phases": [
            {"name": "clm", "until": f"{steps}ba"},
            {"name": "clm", "data": {"train": stream("second"), "sequence_length": 2 * LENGTH},
             "global_batch_size": ROWS // 2},
        ]},
        "checkpoint": {"interval": f"{2 * steps}ba"}, "optimizer": {"lr": 1e-4},
        "logging": {"tensorboard": False, "progress_bar": False},
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    entries = read_metrics(pretrain(load_job(PretrainConfig, folder / f"{name}.yaml")) / "metrics.jsonl")
    return {entry["batch"]: entry["time/step_seconds"] for entry in entries[5:] if "time/step_seconds" in entry}


def main() -> None:
    """Measure, and write results/phases.{json,md}."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("steps", 80), ("around", 10), ("width", 256), ("runs", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    results = measure(**vars(options))
    rows = [[name.replace("_", " "), json.dumps(value)] for name, value in results.items()]
    command = "python benchmarks/phases.py " + " ".join(f"--{name} {value}" for name, value in vars(options).items())
    print(save("phases", "The steps around a phase with other data", command, ["", "measured"], rows, results))


if __name__ == "__main__":
    main()
