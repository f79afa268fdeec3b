"""Tables of recipes/muon: losses at each learning rate, the tokens after which Muon has AdamW's final loss, and task scores.

    python recipes/muon/compare.py [FOLDER]

FOLDER is the mini study's (runs/mini). It reads the runs' `metrics.jsonl` and the sweep's records.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

from biphasic.report.scores import chosen_scores, read_sweep
from biphasic.training.metrics_file import read_metrics

OBJECTIVES = {"mlm": "MLM", "clm-mlm": "CLM, then MLM"}
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}


class Final(NamedTuple):
    """The end of a run."""

    tokens: int
    loss: float
    """MLM loss on the validation split, in nats."""


def final(run: Path) -> Final:
    """Return the tokens and the validation loss at the end of a run."""
    lines = read_metrics(run / "metrics.jsonl")
    return Final(lines[-1]["tokens"], next(x["metrics/mlm/loss"] for x in reversed(lines) if "metrics/mlm/loss" in x))


def tokens_to(loss: float, runs: list[Final]) -> float | None:
    """Return the tokens after which runs of several lengths, each with its own decay, have a loss.

    Between two lengths, the loss is linear in the logarithm of the tokens. None: no length is long or short enough.
    """
    for short, long in itertools.pairwise(sorted(runs)):
        if long.loss <= loss <= short.loss:
            share = (short.loss - loss) / (short.loss - long.loss)
            return math.exp(math.log(short.tokens) + share * math.log(long.tokens / short.tokens))
    return None


def print_rates(folder: Path) -> None:
    """Print the final loss of each objective and optimizer at each learning rate."""
    rates = sorted({"-".join(run.name.split("-")[-2:]) for run in folder.glob("*e-3")}, key=float)
    print("| final MLM loss | " + " | ".join(rates) + " |\n" + "|-" * (len(rates) + 1) + "|")
    for objective, optimizer in itertools.product(OBJECTIVES, OPTIMIZERS):
        runs = [folder / f"{objective}-{optimizer}-{rate}" for rate in rates]
        losses = [f"{final(run).loss:.3f}" if run.exists() else "" for run in runs]
        print(f"| {OBJECTIVES[objective]}: {OPTIMIZERS[optimizer]} | " + " | ".join(losses) + " |")


def print_tokens(folder: Path) -> None:
    """Print AdamW's and Muon's final losses over the seeds, and the ratio of tokens to AdamW's loss."""
    print(
        "| objective | AdamW's final MLM loss | Muon's | tokens to AdamW's loss: AdamW over Muon, by seed |\n|-|-|-|-|"
    )
    for objective, name in OBJECTIVES.items():
        losses: dict[str, list[float]] = {"adamw": [], "muon": []}
        ratios = []
        for adamw in sorted(folder.glob(f"{objective}-adamw-320-s*")):
            seed = adamw.name.split("-")[-1]
            target, muon = final(adamw), [final(run) for run in sorted(folder.glob(f"{objective}-muon-*-{seed}"))]
            losses["adamw"].append(target.loss)
            losses["muon"].append(max(muon).loss)
            tokens = tokens_to(target.loss, muon)
            ratios.append("outside the lengths" if tokens is None else f"{target.tokens / tokens:.2f}")
        means = [f"{statistics.fmean(of):.3f} ± {statistics.stdev(of):.3f}" for of in losses.values()]
        print(f"| {name} | {means[0]} | {means[1]} | {', '.join(ratios)} |")


def print_scores(sweep: Path) -> None:
    """Print the F1 on `parameters` of the models with 320 batches, at the better fine-tuning rate by validation."""
    by_model = 100 * chosen_scores(read_sweep(str(sweep))[1]).groupby("model").score.mean()
    print("| F1 on `parameters`, test | " + " | ".join(OPTIMIZERS.values()) + " |\n|-|-|-|")
    for objective, name in OBJECTIVES.items():
        means = []
        for optimizer in OPTIMIZERS:
            scores = by_model[by_model.index.str.startswith(f"{objective}-{optimizer}-320-s")]
            means.append(f"{statistics.fmean(scores):.1f} ± {statistics.stdev(scores):.1f}")
        print(f"| {name} | {' | '.join(means)} |")


def main() -> None:
    """Print the tables of what has been run."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/mini") / "muon"
    print_rates(folder / "rates")
    if (folder / "seeds").is_dir():
        print()
        print_tokens(folder / "seeds")
    if (folder / "seeds" / "sweep").is_dir():
        print()
        print_scores(folder / "seeds" / "sweep")


if __name__ == "__main__":
    main()
