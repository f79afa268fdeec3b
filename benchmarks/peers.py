"""Biphasic against what one would run instead: Hugging Face's Trainer, padded or packed. `make bench-peers`.

    python benchmarks/peers.py [--rounds 3] [--steps 10] [--width 256] …

The same documents, the same size of model, AdamW, clipping and threads, fp32 on the CPU, about as many real tokens a step:

    ours      Biphasic's trainer: documents packed into rows best-fit, each attends to itself alone; CLM, then MLM
    padded    run_mlm.py --line_by_line: a document a sample, cut off at the row's length, padded to the batch's longest
    packed    run_mlm.py's and run_clm.py's default: all documents joined and cut into rows, which attend to all of
              themselves

Theirs: LlamaForCausalLM for CLM, and for MLM the same backbone and head over all positions; attention is sdpa. Tokens/s are
the documents' tokens over the steps' wall time: padding isn't counted, nor what padded cuts off. In the timed steps nobody
validates, saves or logs to services.

Needs accelerate, without which Hugging Face's Trainer doesn't start: it is in the `dev` extra.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tables import save
from workload import (
    PHASES,
    Run,
    Shape,
    add_options,
    command,
    launch,
    ours,
    prepare,
    rates,
    raw,
    say,
    shape_of,
    take_turns,
)

GOALS = {"padded": 1.5, "packed": 1.0}


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    """Run all three in turn: tokens/s by phase, and ours over theirs.

    Args:
        shape: what is trained.
        rounds: runs of each.
    """
    with tempfile.TemporaryDirectory() as temporary:
        path = prepare(Path(temporary), shape)
        runs = take_turns(
            rounds,
            {
                "ours": lambda turn: ours(path, f"ours-{turn}", shape),
                "padded": lambda turn: theirs(path.parent, "padded", turn, shape),
                "packed": lambda turn: theirs(path.parent, "packed", turn, shape),
            },
        )
    found = {name: rates(made, shape) for name, made in runs.items()}
    speed = {name: {phase: found[name][phase]["tokens_per_second"] for phase in PHASES} for name in found}
    return {
        "shape": vars(shape),
        "rounds": rounds,
        "rates": found,
        "ratios": {name: {phase: speed["ours"][phase] / speed[name][phase] for phase in PHASES} for name in GOALS},
        "runs": {name: raw(made) for name, made in runs.items()},
    }


def theirs(folder: Path, way: str, turn: int, shape: Shape) -> Run:
    """Train both phases with Hugging Face's Trainer, in a process of its own.

    Args:
        folder: what was prepared.
        way: `padded` or `packed`.
        turn: of the rounds.
        shape: that was prepared.
    """
    say(f"{way}-{turn}: Hugging Face's Trainer")
    (folder / "shape.json").write_text(json.dumps(vars(shape)), encoding="utf-8")
    out = folder / f"{way}-{turn}.json"
    started = launch([str(Path(__file__)), "--part", way, str(folder), str(out)], 1, shape.threads)
    return Run(started=started, **json.loads(out.read_text(encoding="utf-8")))


def table(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table's header and rows."""
    rows = []
    for phase in PHASES:
        for name in ("ours", *GOALS):
            one = found["rates"][name][phase]
            ratio = [f"{found['ratios'][name][phase]:.2f}", f"≥ {GOALS[name]}"] if name in GOALS else ["", ""]
            who = "Biphasic" if name == "ours" else f"Hugging Face, {name}"
            speed = f"{one['tokens_per_second']:,.0f}"
            rows.append([f"{phase.upper()}: {who}", f"{one['tokens']:,.0f}", f"{one['seconds']:.3f}", speed, *ratio])
    return ["", "real tokens a step", "seconds a step (median)", "tokens/s", "Biphasic over it", "goal"], rows


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser, steps=10)
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if importlib.util.find_spec("accelerate") is None:
        sys.exit("accelerate isn't installed, which Hugging Face's Trainer needs: uv pip install '.[dev]', or make env")
    if given.part:
        from hugging_face import run

        run(given.part[0], Path(given.part[1]), Path(given.part[2]))
        return
    shape = shape_of(given)
    found = measure(shape, given.rounds)
    header, rows = table(found)
    title = "Biphasic against Hugging Face's Trainer"
    print(save("peers", title, command("bench-peers"), header, rows, found, note=shape.describe()))


if __name__ == "__main__":
    main()
