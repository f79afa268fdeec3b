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

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from workload import (
    PHASES,
    Run,
    Shape,
    launch,
    parse_options,
    prepare,
    rates,
    raw,
    report,
    run_biphasic,
    say,
    take_turns,
)

GOALS = {"padded": 1.5, "packed": 1.0}


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
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
    say(f"{way}-{round_}: Hugging Face's Trainer")
    (folder / "shape.json").write_text(json.dumps(vars(shape)), encoding="utf-8")
    out = folder / f"{way}-{round_}.json"
    script = str(Path(__file__).with_name("hugging_face.py"))
    started = launch([script, "pretrain", str(folder), way, str(out)], 1, shape.threads)
    return Run(started=started, **json.loads(out.read_text(encoding="utf-8")))


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for phase in PHASES:
        for name in ("ours", *GOALS):
            rate = results["rates"][name][phase]
            ratio = [f"{results['ratios'][name][phase]:.2f}", f"≥ {GOALS[name]}"] if name in GOALS else ["", ""]
            trainer = "Biphasic" if name == "ours" else f"Hugging Face, {name}"
            speed = f"{rate['tokens_per_second']:,.0f}"
            rows.append([f"{phase.upper()}: {trainer}", f"{rate['tokens']:,.0f}", f"{rate['seconds']:.3f}", speed, *ratio])
    return ["", "real tokens a step", "seconds a step (median)", "tokens/s", "Biphasic over it", "goal"], rows


def main() -> None:
    shape, options = parse_options(Shape, __doc__, steps=10, rounds=3)
    if importlib.util.find_spec("accelerate") is None:
        sys.exit("accelerate isn't installed, which Hugging Face's Trainer needs: uv pip install '.[dev]', or make env")
    results = measure(shape, options.rounds)
    report("peers", "Biphasic against Hugging Face's Trainer", *table(results), results, note=shape.describe())


if __name__ == "__main__":
    main()
