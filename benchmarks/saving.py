"""The cost of saving to a bucket: one run with alternating stretches of steps, with and without a save to S3.

    python benchmarks/saving.py [--stretches 6] [--steps 15] [--width 384]

Stretches with and without a save alternate in one run, so that both have the same conditions. The share is the additional
time of the stretches with a save. The step that saves waits while the state is copied; this time is compared with a plain
copy of as many bytes in the same process. On a CPU, writing, hashing and uploading compete with training for the same
cores, which are idle on a GPU machine. So does the server, which is usually another machine: the share is an upper bound.
The server's CPU time is shown for each save.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from workload import report, write_tokenizer

sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]
LENGTH = 512


def measure(stretches: int = 6, steps: int = 15, width: int = 384) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        server, bucket = serve_bucket(folder)
        try:
            results = _run(folder, f"{bucket}/saving", stretches, steps, width)
            times = psutil.Process(server.pid).cpu_times()
            return results | {"server_cpu_seconds_a_save": round((times.user + times.system) / stretches, 3)}
        finally:
            server.terminate()
            server.wait(10)


def _run(folder: Path, destination: str, stretches: int, steps: int, width: int) -> dict[str, Any]:
    import yaml

    from biphasic.config.load import load_job
    from biphasic.config.pretrain import PretrainConfig
    from biphasic.training.metrics_file import read_metrics
    from biphasic.training.recipe import pretrain

    last = 2 * stretches * steps
    write_rows(folder / "train", 8 * (last + 2))
    write_tokenizer(folder / "tokenizer", 1 << 16)
    # A save at the first step of every second stretch; the last save is at the run's end.
    saves = [f"{(2 * stretch + 1) * steps}ba" for stretch in range(stretches)]
    content = {
        "job": "pretrain", "run_name": "saving", "output": str(folder / "runs"), "tokenizer": str(folder / "tokenizer"),
        "max_duration": f"{last}ba", "global_batch_size": 2, "microbatch_size": 2,
        "model": {"vocab_size": 1 << 16, "hidden_size": width, "intermediate_size": 3 * width, "num_layers": 4,
                  "num_heads": 6},
        "data": {"sequence_length": LENGTH, "train": {"local": str(folder / "train")}, "num_workers": 1},
        "objective": {"phases": [{"name": "clm"}]}, "optimizer": {"lr": 1e-4},
        "checkpoint": {"folder": destination, "interval": f"{last}ba", "keep": 1, "keep_at": saves[:-1]},
        "logging": {"tensorboard": False, "progress_bar": False},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(content))
    config = load_job(PretrainConfig, folder / "run.yaml")
    entries = [entry for entry in read_metrics(pretrain(config) / "metrics.jsonl") if "loss/train/total" in entry]
    seconds = {after["batch"]: after["time"] - before["time"] for before, after in pairwise(entries)}
    blocked = [entry["checkpoint/blocked_seconds"] for entry in entries if "checkpoint/blocked_seconds" in entry]
    waited = [entry["checkpoint/waited_seconds"] for entry in entries if "checkpoint/waited_seconds" in entry]
    # The line of batch N is written before its checkpoint is: the save falls between N and N + 1.
    with_save, without_save = [], []
    for stretch in range(stretches - 1):
        first = (2 * stretch + 1) * steps + 1
        with_save.append(sum(seconds[batch] for batch in range(first, first + steps)))
        without_save.append(sum(seconds[batch] for batch in range(first + steps, first + 2 * steps)))
    size = sum(path.stat().st_size for path in (folder / "runs" / "saving" / "checkpoints").glob("*.pt"))
    copies = _copies(size, len(blocked))
    return {
        "steps_between_saves": 2 * steps,
        "step_seconds": round(statistics.median(seconds.values()), 4),
        "checkpoint_bytes": size,
        "stretch_seconds_with_a_save": [round(value, 3) for value in with_save],
        "stretch_seconds_without": [round(value, 3) for value in without_save],
        "share_of_step_time": round((sum(with_save) - sum(without_save)) / (sum(with_save) + sum(without_save)), 4),
        "blocked_seconds": [round(value, 4) for value in blocked],
        "waited_seconds": [round(value, 4) for value in waited],
        "bare_copy_seconds": [round(value, 4) for value in copies],
        "blocked_over_copy": round(statistics.median(blocked) / statistics.median(copies), 3),
    }


def write_rows(folder: Path, rows: int) -> None:
    """Write rows of `LENGTH` random tokens, in the columns of a conversion."""
    import numpy as np
    from streaming import MDSWriter

    columns = {"tokens": f"ndarray:uint16:{LENGTH}", "lengths": "ndarray:uint32"}
    generator = np.random.default_rng(0)
    with MDSWriter(out=str(folder), columns=columns, hashes=["xxh64"], compression="zstd", size_limit=1 << 22) as out:
        for _ in range(rows):
            tokens = generator.integers(0, 1 << 16, LENGTH, dtype=np.uint16)
            out.write({"tokens": tokens, "lengths": np.array([LENGTH], np.uint32)})


def _copies(size: int, count: int) -> list[float]:
    """Seconds of `count` copies of `size` bytes in the host's memory."""
    source = torch.ones(size // 4)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return seconds


def serve_bucket(folder: Path) -> tuple[Any, str]:
    from helpers import s3_server

    (folder / "s3").mkdir()
    server, port = s3_server.serve_s3(folder / "s3")
    keys = {"AWS_ACCESS_KEY_ID": s3_server.KEY, "AWS_SECRET_ACCESS_KEY": s3_server.SECRET}
    os.environ.update(keys, S3_ENDPOINT_URL=f"http://127.0.0.1:{port}", AWS_DEFAULT_REGION="us-east-1",
                      AWS_REQUEST_CHECKSUM_CALCULATION="when_required")  # fmt: skip
    import boto3

    boto3.client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"]).create_bucket(Bucket="bench")
    return server, "s3://bench"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stretches", type=int, default=6)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--width", type=int, default=384)
    options = parser.parse_args()
    results = measure(options.stretches, options.steps, options.width)
    rows = [[name.replace("_", " "), json.dumps(value)] for name, value in results.items()]
    report("saving", "The cost of saving to S3", ["", "measured"], rows, results)


if __name__ == "__main__":
    main()
