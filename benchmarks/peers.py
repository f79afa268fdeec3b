"""Biphasic against the usual alternative: Hugging Face's Trainer, padded or packed. `make bench-peers`.

    python benchmarks/peers.py [--rounds 3] [--steps 10] [--width 256] …

The same documents, model size, AdamW, clipping and threads, fp32 on the CPU, and about as many real tokens in a step:

    ours      Biphasic's trainer: documents packed best-fit into rows, without attention across documents; CLM, then MLM
    padded    run_mlm.py --line_by_line: one document per sample, truncated to the row's length, padded to the longest
    packed    the default of run_mlm.py and run_clm.py: all documents joined and cut into rows, with attention over the row

Hugging Face's models are LlamaForCausalLM for CLM, and the same backbone with a head over all positions for MLM;
attention is sdpa. Tokens/s are the documents' tokens over the wall time of the steps, without padding and truncated
tokens. The timed steps include no validation, no saving and no logging to services.

Needs accelerate, which Hugging Face's Trainer imports: it is in the `dev` extra.
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
    prepare,
    rates,
    raw,
    run_biphasic,
    say,
    shape_of,
    take_turns,
)

GOALS = {"padded": 1.5, "packed": 1.0}


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    """Run all three in turn; tokens/s by phase, and the ratios of Biphasic to the others.

    Args:
        shape: what is trained.
        rounds: runs of each.
    """
    with tempfile.TemporaryDirectory() as temporary:
        path = prepare(Path(temporary), shape)
        runs = take_turns(
            rounds,
            {
                "ours": lambda round_: run_biphasic(path, f"ours-{round_}", shape),
                "padded": lambda round_: run_hugging_face(path.parent, "padded", round_, shape),
                "packed": lambda round_: run_hugging_face(path.parent, "packed", round_, shape),
            },
        )
    by_trainer = {name: rates(of_trainer, shape) for name, of_trainer in runs.items()}
    speed = {name: {phase: by_trainer[name][phase]["tokens_per_second"] for phase in PHASES} for name in by_trainer}
    return {
        "shape": vars(shape),
        "rounds": rounds,
        "rates": by_trainer,
        "ratios": {name: {phase: speed["ours"][phase] / speed[name][phase] for phase in PHASES} for name in GOALS},
        "runs": {name: raw(of_trainer) for name, of_trainer in runs.items()},
    }


def run_hugging_face(folder: Path, way: str, round_: int, shape: Shape) -> Run:
    """Train both phases with Hugging Face's Trainer in its own process.

    Args:
        folder: the prepared one.
        way: `padded` or `packed`.
        round_: number of the round, from 0.
        shape: that was prepared.
    """
    say(f"{way}-{round_}: Hugging Face's Trainer")
    (folder / "shape.json").write_text(json.dumps(vars(shape)), encoding="utf-8")
    out = folder / f"{way}-{round_}.json"
    started = launch([str(Path(__file__)), "--part", way, str(folder), str(out)], 1, shape.threads)
    return Run(started=started, **json.loads(out.read_text(encoding="utf-8")))


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table's header and rows."""
    rows = []
    for phase in PHASES:
        for name in ("ours", *GOALS):
            rate = results["rates"][name][phase]
            ratio = [f"{results['ratios'][name][phase]:.2f}", f"≥ {GOALS[name]}"] if name in GOALS else ["", ""]
            trainer = "Biphasic" if name == "ours" else f"Hugging Face, {name}"
            speed = f"{rate['tokens_per_second']:,.0f}"
            rows.append(
                [f"{phase.upper()}: {trainer}", f"{rate['tokens']:,.0f}", f"{rate['seconds']:.3f}", speed, *ratio]
            )
    return ["", "real tokens a step", "seconds a step (median)", "tokens/s", "Biphasic over it", "goal"], rows


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser, steps=10)
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if importlib.util.find_spec("accelerate") is None:
        sys.exit("accelerate isn't installed, which Hugging Face's Trainer needs: uv pip install '.[dev]', or make env")
    if options.part:
        from hugging_face import run

        run(options.part[0], Path(options.part[1]), Path(options.part[2]))
        return
    shape = shape_of(options)
    results = measure(shape, options.rounds)
    header, rows = table(results)
    title = "Biphasic against Hugging Face's Trainer"
    print(save("peers", title, command("bench-peers"), header, rows, results, note=shape.describe()))


if __name__ == "__main__":
    main()
