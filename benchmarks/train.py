"""Biphasic's trainer against the barest correct loop: the same model, batches, masks and updates. `make bench-train`.

    python benchmarks/train.py [--rounds 3] [--steps 14] [--width 256] …

Each runs in its own process, in turn. A run trains both phases, CLM first, and the losses of the two must agree at
every step. A step's time starts at the end of the previous step, and the first step starts when its batch has
arrived.

Biphasic saves a checkpoint at the switch. The cost of the switch is the longest of the five steps around it, divided
by the median of the step's phase. The bare loop writes nothing: its cost shows how much steps vary.
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from workload import (
    PHASES,
    Agreement,
    Disagreement,
    Run,
    Shape,
    parse_options,
    prepare,
    rates,
    raw,
    report,
    run_bare_loop,
    run_biphasic,
    take_turns,
)

GOAL = 0.95


def measure(shape: Shape, rounds: int, seed: int | None = None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        path = prepare(Path(temporary), shape)
        agreed, label = Agreement(), "Biphasic and the bare loop"
        runs = take_turns(
            rounds,
            {
                "ours": lambda round_: agreed(run_biphasic(path, f"ours-{round_}", shape), label),
                "bare": lambda round_: agreed(run_bare_loop(path, f"bare-{round_}", shape, seed=seed), label),
            },
        )
    by_loop = {name: rates(of_loop, shape) for name, of_loop in runs.items()}
    start = {name: statistics.median(run.start_seconds for run in of_loop) for name, of_loop in runs.items()}
    return {
        "shape": vars(shape),
        "rounds": rounds,
        "largest_difference_of_losses": agreed.largest,
        "rates": by_loop,
        "ratios": {
            phase: by_loop["ours"][phase]["tokens_per_second"] / by_loop["bare"][phase]["tokens_per_second"]
            for phase in PHASES
        },
        "start_seconds": start,
        "switch": {name: [switch_cost(run, shape, by_loop[name]) for run in of_loop] for name, of_loop in runs.items()},
        "runs": {name: raw(of_loop) for name, of_loop in runs.items()},
    }


def switch_cost(run: Run, shape: Shape, medians: dict[str, dict[str, float]]) -> float:
    """The longest of the two steps before and the three after the switch, each divided by its phase's median."""
    steps = range(shape.steps - 2, shape.steps + 3)
    return max(run.seconds[step] / medians[PHASES[step >= shape.steps]]["seconds"] for step in steps)


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    biphasic_rates, bare_rates = results["rates"]["ours"], results["rates"]["bare"]
    rows = []
    for phase in PHASES:
        biphasic, bare_loop = biphasic_rates[phase], bare_rates[phase]
        seconds = [f"{rate['seconds']:.3f}" for rate in (biphasic, bare_loop)]
        rows.append([f"{phase.upper()}: seconds a step (median)", *seconds, "", ""])
        speed = [f"{rate['tokens_per_second']:,.0f}" for rate in (biphasic, bare_loop)]
        rows.append([f"{phase.upper()}: tokens/s", *speed, f"{results['ratios'][phase]:.3f}", f"≥ {GOAL}"])
    start = results["start_seconds"]
    rows.append(
        ["seconds to the first step", *(f"{start[name]:.1f}" for name in ("ours", "bare")),
         f"{start['ours'] / start['bare']:.2f}", ""]
    )  # fmt: skip
    switch = {name: statistics.median(costs) for name, costs in results["switch"].items()}
    longest = [f"{switch[name]:.2f}" for name in ("ours", "bare")]
    rows.append(["longest of 5 steps around the switch, over the median", *longest, "", ""])
    return ["", "Biphasic", "bare loop", "Biphasic over bare", "goal"], rows


def main() -> None:
    shape, options = parse_options(Shape, __doc__, rounds=3, bare_seed=None)
    try:
        results = measure(shape, options.rounds, options.bare_seed)
    except Disagreement as error:
        sys.exit(str(error))
    report("train", "Biphasic's trainer against a bare PyTorch loop", *table(results), results, note=shape.describe())


if __name__ == "__main__":
    main()
