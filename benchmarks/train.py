"""Biphasic's trainer against the barest correct loop: the same model, batches, masks and updates. `make bench-train`.

    python benchmarks/train.py [--rounds 3] [--steps 14] [--width 256] …

Both run in processes of their own and take turns. Both phases are trained in one run, CLM first; the losses of the two
must agree at every step. A step's time runs from the end of the step before it. The first step begins when its batch is
there.

Biphasic saves a checkpoint at the switch. Its cost is the longest of the five steps around it over the median of the
step's phase; the bare loop's, which writes nothing, shows how much steps vary.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tables import save
from workload import (
    PHASES,
    Agreement,
    Disagreement,
    Run,
    Shape,
    add_options,
    bare,
    command,
    ours,
    prepare,
    rates,
    raw,
    shape_of,
    take_turns,
)

GOAL = 0.95


def measure(shape: Shape, rounds: int, seed: int | None = None) -> dict[str, Any]:
    """Run both in turn.

    Args:
        shape: what is trained.
        rounds: runs of each.
        seed: of the bare loop; default the trainer's. Another one makes them disagree.

    Raises:
        Disagreement: they don't train the same.
    """
    with tempfile.TemporaryDirectory() as temporary:
        path = prepare(Path(temporary), shape)
        agreed, what = Agreement(), "Biphasic and the bare loop"
        runs = take_turns(
            rounds,
            {
                "ours": lambda turn: agreed(ours(path, f"ours-{turn}", shape), what),
                "bare": lambda turn: agreed(bare(path, f"bare-{turn}", shape, seed=seed), what),
            },
        )
    found = {name: rates(made, shape) for name, made in runs.items()}
    start = {name: statistics.median(run.start_seconds for run in made) for name, made in runs.items()}
    return {
        "shape": vars(shape),
        "rounds": rounds,
        "largest_difference_of_losses": agreed.largest,
        "rates": found,
        "ratios": {
            phase: found["ours"][phase]["tokens_per_second"] / found["bare"][phase]["tokens_per_second"]
            for phase in PHASES
        },
        "start_seconds": start,
        "switch": {name: [switch_cost(run, shape, found[name]) for run in made] for name, made in runs.items()},
        "runs": {name: raw(made) for name, made in runs.items()},
    }


def switch_cost(run: Run, shape: Shape, medians: dict[str, dict[str, float]]) -> float:
    """The longest of the five steps around the switch (two before it, the first after it, two more), each over its phase's
    median."""
    around = range(shape.steps - 2, shape.steps + 3)
    return max(run.seconds[at] / medians[PHASES[at >= shape.steps]]["seconds"] for at in around)


def table(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table's header and rows."""
    ours, bare = found["rates"]["ours"], found["rates"]["bare"]
    rows = []
    for phase in PHASES:
        mine, theirs = ours[phase], bare[phase]
        seconds = [f"{one['seconds']:.3f}" for one in (mine, theirs)]
        rows.append([f"{phase.upper()}: seconds a step (median)", *seconds, "", ""])
        speed = [f"{one['tokens_per_second']:,.0f}" for one in (mine, theirs)]
        rows.append([f"{phase.upper()}: tokens/s", *speed, f"{found['ratios'][phase]:.3f}", f"≥ {GOAL}"])
    start = found["start_seconds"]
    rows.append(
        ["seconds to the first step", *(f"{start[name]:.1f}" for name in ("ours", "bare")),
         f"{start['ours'] / start['bare']:.2f}", ""]
    )  # fmt: skip
    switch = {name: statistics.median(costs) for name, costs in found["switch"].items()}
    longest = [f"{switch[name]:.2f}" for name in ("ours", "bare")]
    rows.append(["longest of 5 steps around the switch, over the median", *longest, "", ""])
    return ["", "Biphasic", "bare loop", "Biphasic over bare", "goal"], rows


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser)
    parser.add_argument("--bare-seed", type=int, help="another one for the bare loop: the benchmark must refuse")
    given = parser.parse_args()
    shape = shape_of(given)
    try:
        found = measure(shape, given.rounds, given.bare_seed)
    except Disagreement as error:
        sys.exit(str(error))
    header, rows = table(found)
    title = "Biphasic's trainer against a bare PyTorch loop"
    print(save("train", title, command("bench-train"), header, rows, found, note=shape.describe()))


if __name__ == "__main__":
    main()
