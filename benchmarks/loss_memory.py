"""Memory and time of the loss at a large vocabulary, with and without whole logits. `make bench-loss`.

    python benchmarks/loss_memory.py [--tokens 2048 4096 8192 16384 32768] [--vocabulary 128256] [--width 768]

Forward and backward, fp32 on the CPU, `cross_entropy_sum` against `full_logits_cross_entropy_sum`, each point in a process
of its own: its largest memory above the head's weight, its gradient and the hidden states. CLM predicts every position, MLM
40% of them. What the machine's free memory can't hold is left out, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tables import save
from workload import MASKING_RATIO, PHASES, command, say

KINDS = ("ours", "full")
TOKENS = (2048, 4096, 8192, 16384, 32768)
SPARE = 1 << 30
"""Bytes of the free memory that are left to everybody else."""


def measure(
    tokens: list[int], vocabulary: int, width: int, repeats: int = 1, limit: int | None = None, threads: int = 2
) -> dict[str, Any]:
    """Every point, in turn.

    Args:
        tokens: positions of each point.
        vocabulary: rows of the head.
        width: of the hidden states.
        repeats: of each point; memory's largest and time's smallest count.
        limit: bytes that a point's process may allocate; default the machine's free memory, but for `SPARE`.
        threads: of each.

    Returns:
        `points`: for each objective and number of tokens, `ours` and `full`: `bytes` and `seconds`, or null where it
        doesn't fit; `ratio` of the bytes where both do.
    """
    points = []
    for phase in PHASES:
        for count in tokens:
            point: dict[str, Any] = {"phase": phase, "tokens": count}
            for kind in KINDS:
                say(f"{phase}, {count} tokens, {kind}")
                made = [_apart(kind, phase, count, vocabulary, width, limit, threads) for _ in range(repeats)]
                fits = [one for one in made if one is not None]
                point[kind] = None
                if len(fits) == repeats:
                    point[kind] = {
                        key: best(one[key] for one in fits) for key, best in (("bytes", max), ("seconds", min))
                    }
            if point["ours"] and point["full"]:
                point["ratio"] = point["ours"]["bytes"] / point["full"]["bytes"]
            points.append(point)
    return {"vocabulary": vocabulary, "width": width, "repeats": repeats, "points": points}


def _apart(
    kind: str, phase: str, tokens: int, vocabulary: int, width: int, limit: int | None, threads: int
) -> dict[str, float] | None:
    """One point in a process of its own; None when it doesn't fit."""
    command = [sys.executable, __file__, "--point", kind, phase, *map(str, (tokens, vocabulary, width))]
    if limit is not None:
        command += ["--limit", str(limit)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    if run.returncode == 0:
        return json.loads(run.stdout.splitlines()[-1])
    # Negative: the kernel ended it, for want of memory.
    if "allocate memory" in run.stderr or "MemoryError" in run.stderr or run.returncode == -9:
        return None
    raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}:\n{run.stderr[-4000:]}")


def point(kind: str, phase: str, tokens: int, vocabulary: int, width: int) -> dict[str, float]:
    """Measure in this process: `bytes` above weights, their gradients and hidden states, and `seconds`.

    Raises:
        RuntimeError: the memory doesn't suffice.
    """
    import torch

    from biphasic.model.losses import IGNORE, cross_entropy_sum, full_logits_cross_entropy_sum

    loss = {"ours": cross_entropy_sum, "full": full_logits_cross_entropy_sum}[kind]
    # Threads and the libraries' own memory, before anything is measured: with little, so that the peak stays below.
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
    """The most memory that this process has had, bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def _free() -> int:
    """What a process may take: it should fail to allocate, instead of being killed, or having somebody else killed."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    free = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    return max(free - SPARE, SPARE)


def table(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table's header and rows."""
    rows = []
    for one in found["points"]:
        cells = []
        for unit, form in (("bytes", "{:,.0f}"), ("seconds", "{:.1f}")):
            cells += ["does not fit" if one[kind] is None else form.format(one[kind][unit]) for kind in KINDS]
        ratio = f"{one['ratio']:.3f}" if "ratio" in one else ""
        rows.append([f"{one['phase'].upper()}, {one['tokens']:,} tokens", *cells[:2], ratio, *cells[2:]])
    return ["", "ours, bytes", "full logits, bytes", "ours over full", "ours, seconds", "full, seconds"], rows


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, help="bytes that a point's process may allocate; default: what is free")
    parser.add_argument("--point", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.point:
        kind, phase, *sizes = given.point
        most = given.limit or _free()
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        print(json.dumps(point(kind, phase, *map(int, sizes))))
        return
    found = measure(given.tokens, given.vocabulary, given.width, given.repeats, given.limit, given.threads)
    header, rows = table(found)
    note = (
        f"Width {given.width}, vocabulary {given.vocabulary:,}, fp32, {given.threads} threads, forward and backward; bytes "
        f"are the process's peak above weights, their gradients and hidden states. MLM predicts {MASKING_RATIO:.0%}."
    )
    print(save("loss_memory", "The loss without logits", command("bench-loss"), header, rows, found, note=note))


if __name__ == "__main__":
    main()
