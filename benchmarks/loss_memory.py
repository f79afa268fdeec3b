"""Memory and time of the loss with a large vocabulary, with and without full logits. `make bench-loss`.

    python benchmarks/loss_memory.py [--tokens 2048 4096 8192 16384 32768] [--vocabulary 128256] [--width 768]

Forward and backward, fp32 on the CPU, `cross_entropy_at_targets` against the loss of all logits at once. Each point is the
peak memory of its own process, beyond the head's weight, its gradient and the hidden states. CLM predicts every
position, MLM 40% of them. The table marks points that don't fit the machine's free memory.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from workload import MASKING_RATIO, PHASES, report, say

KINDS = ("ours", "full")
TOKENS = (2048, 4096, 8192, 16384, 32768)
SPARE = 1 << 30
"""Bytes of the free memory that are left to other processes."""


def measure(
    tokens: list[int], vocabulary: int, width: int, repeats: int = 1, limit: int | None = None, threads: int = 2
) -> dict[str, Any]:
    """Measure a point for each objective and number of tokens, whose process may allocate `limit` bytes.

    A point has `ours` and `full`: `bytes` and `seconds`, the largest and the smallest of all repeats, or null where it
    doesn't fit; and the `ratio` of the bytes where both do.
    """
    points = []
    for phase in PHASES:
        for count in tokens:
            point: dict[str, Any] = {"phase": phase, "tokens": count}
            for kind in KINDS:
                say(f"{phase}, {count} tokens, {kind}")
                measurements = [_run_point(kind, phase, count, vocabulary, width, limit, threads) for _ in range(repeats)]
                completed = [measurement for measurement in measurements if measurement is not None]
                point[kind] = None
                if len(completed) == repeats:
                    point[kind] = {
                        key: choose(measurement[key] for measurement in completed)
                        for key, choose in (("bytes", max), ("seconds", min))
                    }
            if point["ours"] and point["full"]:
                point["ratio"] = point["ours"]["bytes"] / point["full"]["bytes"]
            points.append(point)
    return {"vocabulary": vocabulary, "width": width, "repeats": repeats, "points": points}


def _run_point(
    kind: str, phase: str, tokens: int, vocabulary: int, width: int, limit: int | None, threads: int
) -> dict[str, float] | None:
    """Measure one point in its own process; None when it doesn't fit."""
    command = [sys.executable, __file__, "--point", kind, phase, *map(str, (tokens, vocabulary, width))]
    if limit is not None:
        command += ["--limit", str(limit)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    if run.returncode == 0:
        return json.loads(run.stdout.splitlines()[-1])
    # -9: the kernel killed it because memory ran out.
    if "allocate memory" in run.stderr or "MemoryError" in run.stderr or run.returncode == -9:
        return None
    raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}:\n{run.stderr[-4000:]}")


def point(kind: str, phase: str, tokens: int, vocabulary: int, width: int) -> dict[str, float]:
    """Measure in this process: `bytes` above weights, their gradients and hidden states, and `seconds`.

    Raises:
        RuntimeError: not enough memory.
    """
    import torch
    import torch.nn.functional as F

    from biphasic.model.losses import IGNORE, cross_entropy_at_targets

    def full_logits(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORE, reduction="sum")

    loss = {"ours": cross_entropy_at_targets, "full": full_logits}[kind]
    # A small warm-up, so that the memory of threads and libraries is not measured.
    small = torch.randn(64, width, requires_grad=True), torch.randn(128, width, requires_grad=True)
    loss(*small, torch.zeros(64, dtype=torch.int64)).backward()
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(vocabulary, width).mul_(0.02))
    weight.grad = torch.zeros_like(weight)
    hidden = torch.randn(tokens, width, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    if phase == "mlm":
        targets[torch.rand(tokens) > MASKING_RATIO] = IGNORE
    before = _peak()
    start = time.perf_counter()
    loss(hidden, weight, targets).backward()
    seconds = time.perf_counter() - start
    assert hidden.grad is not None and hidden.grad.abs().sum() > 0
    return {"bytes": _peak() - before, "seconds": seconds}


def _peak() -> int:
    """This process's peak memory, bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def _free() -> int:
    """Bytes that a process may allocate: its allocation should fail before the kernel kills a process."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    free = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    return max(free - SPARE, SPARE)


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for point in results["points"]:
        cells = []
        for unit, form in (("bytes", "{:,.0f}"), ("seconds", "{:.1f}")):
            cells += ["does not fit" if point[kind] is None else form.format(point[kind][unit]) for kind in KINDS]
        ratio = f"{point['ratio']:.3f}" if "ratio" in point else ""
        rows.append([f"{point['phase'].upper()}, {point['tokens']:,} tokens", *cells[:2], ratio, *cells[2:]])
    return ["", "ours, bytes", "full logits, bytes", "ours over full", "ours, seconds", "full, seconds"], rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, help="bytes that a point's process may allocate; default: what is free")
    parser.add_argument("--point", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        kind, phase, *sizes = options.point
        limit = options.limit or _free()
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        print(json.dumps(point(kind, phase, *map(int, sizes))))
        return
    results = measure(options.tokens, options.vocabulary, options.width, options.repeats, options.limit, options.threads)
    note = (
        f"Width {options.width}, vocabulary {options.vocabulary:,}, fp32, {options.threads} threads, forward and backward; "
        f"bytes are the process's peak above weights, their gradients and hidden states. MLM predicts {MASKING_RATIO:.0%}."
    )
    report("loss_memory", "The loss without logits", *table(results), results, note=note)


if __name__ == "__main__":
    main()
