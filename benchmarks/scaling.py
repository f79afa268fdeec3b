"""Two ranks against one, Biphasic's trainer and the bare loop under DistributedDataParallel. `make bench-scaling`.

    python benchmarks/scaling.py [--rounds 2] [--steps 12] [--width 256] …

The same rows a step, so that two ranks have half of them each; one thread a rank, also where there is only one. gloo on the
CPUs of one machine. Ours is started by `composer`, the bare loop by `torchrun`, and with one rank both by `python`. A
step of CLM and one of MLM are counted together. Losses must agree at every step, over ranks, strategies and loops.

Efficiency is the speed of two ranks over twice that of one (with DDP, which one rank doesn't need).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tables import save
from workload import (
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

WAYS = {
    "bare_1": ("bare loop, 1 rank", 1, None),
    "bare_2": ("bare loop, 2 ranks, DDP", 2, None),
    "ours_1": ("Biphasic, 1 rank", 1, "ddp"),
    "ours_2": ("Biphasic, 2 ranks, DDP", 2, "ddp"),
    "fsdp_2": ("Biphasic, 2 ranks, FSDP2", 2, "fsdp"),
}
"""Name in the table, ranks, and the strategy that the YAML is given; the bare loop has none."""


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    """Run each in turn.

    Args:
        shape: what is trained; its rows divide by two.
        rounds: runs of each.

    Raises:
        Disagreement: they don't train the same.
    """
    with tempfile.TemporaryDirectory() as temporary:
        path = prepare(Path(temporary), shape)
        agreed = Agreement()

        def maker(name: str) -> Callable[[int], Run]:
            what, ranks, strategy = WAYS[name]

            def make(turn: int) -> Run:
                run_name = f"{name}-{turn}"
                if strategy is None:
                    run = bare(path, run_name, shape, ranks)
                else:
                    run = ours(path, run_name, shape, ranks, f"parallelism.strategy={strategy}")
                return agreed(run, f"the bare loop and {what}")

            return make

        runs = take_turns(rounds, {name: maker(name) for name in WAYS})
    found = {name: rates(made, shape) for name, made in runs.items()}
    speed = {name: one["both"]["tokens_per_second"] for name, one in found.items()}
    alone = {name: name.partition("_")[0].replace("fsdp", "ours") + "_1" for name in WAYS}
    return {
        "shape": vars(shape),
        "rounds": rounds,
        "largest_difference_of_losses": agreed.largest,
        "rates": found,
        "over_bare": {
            name: speed[name] / speed[f"bare_{ranks}"] for name, (_, ranks, strategy) in WAYS.items() if strategy
        },
        "efficiency": {
            name: speed[name] / (2 * speed[alone[name]]) for name, (_, ranks, _) in WAYS.items() if ranks == 2
        },
        "runs": {name: raw(made) for name, made in runs.items()},
    }


def table(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table's header and rows."""
    rows = []
    for name, (what, _, _) in WAYS.items():
        speed = found["rates"][name]["both"]["tokens_per_second"]
        ratios = [found[key].get(name) for key in ("over_bare", "efficiency")]
        rows.append([what, f"{speed:,.0f}", *("" if ratio is None else f"{ratio:.3f}" for ratio in ratios)])
    return ["", "tokens/s", "over the bare loop's", "efficiency"], rows


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser, threads=1, rounds=2, steps=12)
    given = parser.parse_args()
    shape = shape_of(given)
    try:
        found = measure(shape, given.rounds)
    except Disagreement as error:
        sys.exit(str(error))
    header, rows = table(found)
    title = "Two ranks against one"
    print(save("scaling", title, command("bench-scaling"), header, rows, found, note=shape.describe()))


if __name__ == "__main__":
    main()
