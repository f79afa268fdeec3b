"""Two ranks against one, Biphasic's trainer and the bare loop, with DDP and FSDP2. `make bench-scaling`.

    python benchmarks/scaling.py [--rounds 2] [--steps 12] [--width 256] …

A step has the same rows with one rank and with two, and each rank has one thread. The ranks communicate by gloo on
the CPUs of one machine. `composer` starts Biphasic, `torchrun` the bare loop, and `python` both with one rank. A rate
counts one step of CLM and one of MLM. Losses must agree at every step, over ranks, strategies and loops.

Efficiency is the speed of two ranks over twice the speed of one.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workload import (
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

WAYS = {
    "bare_1": ("bare loop, 1 rank", 1, "ddp"),
    "bare_ddp": ("bare loop, 2 ranks, DDP", 2, "ddp"),
    "bare_fsdp": ("bare loop, 2 ranks, FSDP2", 2, "fsdp"),
    "ours_1": ("Biphasic, 1 rank", 1, "ddp"),
    "ours_ddp": ("Biphasic, 2 ranks, DDP", 2, "ddp"),
    "ours_fsdp": ("Biphasic, 2 ranks, FSDP2", 2, "fsdp"),
}
"""Name in the table, ranks, and the strategy in the YAML."""


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    """Run each in turn; the shape's rows are even. Raises a Disagreement if they don't train the same model."""
    with tempfile.TemporaryDirectory() as temporary:
        path = prepare(Path(temporary), shape)
        agreed = Agreement()

        def maker(name: str) -> Callable[[int], Run]:
            label, ranks, strategy = WAYS[name]
            run = run_bare_loop if name.startswith("bare") else run_biphasic

            def make(round_: int) -> Run:
                made = run(path, f"{name}-{round_}", shape, ranks, f"parallelism.strategy={strategy}")
                return agreed(made, f"the bare loop and {label}")

            return make

        runs = take_turns(rounds, {name: maker(name) for name in WAYS})
    by_way = {name: rates(of_way, shape) for name, of_way in runs.items()}
    speed = {name: rate["both"]["tokens_per_second"] for name, rate in by_way.items()}
    return {
        "shape": vars(shape),
        "rounds": rounds,
        "largest_difference_of_losses": agreed.largest,
        "rates": by_way,
        "over_bare": {name: speed[name] / speed[name.replace("ours", "bare")] for name in WAYS if name.startswith("ours")},
        "efficiency": {
            name: speed[name] / (2 * speed[f"{name.partition('_')[0]}_1"])
            for name, (_, ranks, _) in WAYS.items()
            if ranks == 2
        },
        "runs": {name: raw(of_way) for name, of_way in runs.items()},
    }


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for name, (label, _, _) in WAYS.items():
        speed = results["rates"][name]["both"]["tokens_per_second"]
        ratios = [results[key].get(name) for key in ("over_bare", "efficiency")]
        rows.append([label, f"{speed:,.0f}", *("" if ratio is None else f"{ratio:.3f}" for ratio in ratios)])
    return ["", "tokens/s", "over the bare loop's", "efficiency"], rows


def main() -> None:
    shape, options = parse_options(Shape, __doc__, threads=1, rounds=2, steps=12)
    try:
        results = measure(shape, options.rounds)
    except Disagreement as error:
        sys.exit(str(error))
    report("scaling", "Two ranks against one", *table(results), results, note=shape.describe())


if __name__ == "__main__":
    main()
