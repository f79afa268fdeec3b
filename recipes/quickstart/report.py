"""Write runs/quickstart/report.md and loss.png from the steps' records."""

from __future__ import annotations

import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

from biphasic.storage import open_store
from biphasic.training.loggers import read_metrics

RUN = Path("runs/quickstart")
TRAINED = RUN / "quickstart-pretrain"
COLORS = {"clm": "#1f6f8b", "mlm": "#c8553d"}


def main() -> int:
    """Write the figure, then the report."""
    metrics = read_metrics(TRAINED / "metrics.jsonl")
    draw_losses(metrics, RUN / "loss.png", "Quickstart: causal language modeling, then masked")
    steps = {path.stem: read(path) for path in (RUN / "steps").glob("*.json")}
    scores = read(RUN / "scores" / "scores.json")
    last = metrics[-1]
    parts = [
        "# Quickstart\n",
        "Text in, a biphasic encoder out, on this machine. Run it again: `make quickstart`.\n",
        "## Steps\n",
        *steps_table(steps),
        "\n## Pretraining\n",
        "![loss](loss.png)\n",
        f"{last['tokens']:,} tokens in {last['batch']:,} batches. Validation at the end: CLM loss "
        f"{last['metrics/clm/loss']:.3f}, MLM loss {last['metrics/mlm/loss']:.3f} nats per predicted token.\n",
        *switch(metrics),
        "## Retrieval\n",
        *retrieval(scores),
        "\n## Commands\n",
        "```",
        *(shlex.join(record["command"]) for record in in_order(steps)),
        "```\n",
    ]
    open_store(str(RUN)).write("report.md", "\n".join(parts).encode())
    return 0


def steps_table(steps: dict[str, dict[str, Any]]) -> list[str]:
    """Each step with its tokens, seconds and tokens/s; no tokens where a step reads none."""
    tokens = tokens_of()
    lines = ["| step | tokens | seconds | tokens/s |", "|-|-:|-:|-:|"]
    for record in in_order(steps):
        name, seconds = record["name"], record.get("seconds")
        count = tokens.get(name)
        rate = f"{count / seconds:,.0f}" if count and seconds else ""
        shown = "" if count is None else f"{count:,}"
        lines.append(f"| {name} | {shown} | {'' if seconds is None else f'{seconds:.1f}'} | {rate} |")
    lines.append("\nSeconds are those of the complete command, including start-up and validation.")
    return lines


def tokens_of() -> dict[str, int]:
    """The tokens that each step processed, from its own record."""
    splits = read(RUN / "data" / "conversion.json")["splits"]
    converted = sum(split["tokens"] for split in splits.values())
    tokens = {"convert": converted, "verify": converted}
    tokens["pretrain"] = read_metrics(TRAINED / "metrics.jsonl")[-1]["tokens"]
    for start in ("encoder", "untrained"):
        tokens[f"finetune-{start}"] = read(RUN / f"{start}-finetuned" / "record.json")["about"]["tokens"]
    return tokens


def in_order(steps: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of the steps before the report, in the order in which they ran."""
    named = [{"name": name, **record} for name, record in steps.items() if name != "report"]
    return sorted(named, key=lambda record: record["number"])


def switch(metrics: list[dict[str, Any]]) -> list[str]:
    """The validation losses before and after the switch."""
    validations = [entry for entry in metrics if "metrics/clm/loss" in entry]
    lines = ["| batch | tokens | CLM loss | MLM loss |", "|-:|-:|-:|-:|"]
    for entry in validations:
        clm, mlm = entry["metrics/clm/loss"], entry["metrics/mlm/loss"]
        lines.append(f"| {entry['batch']:,} | {entry['tokens']:,} | {clm:.3f} | {mlm:.3f} |")
    return [*lines, ""]


def retrieval(scores: dict[str, Any]) -> list[str]:
    """The table of scores, and the gain of pretraining."""
    lines = [
        f"{scores['queries']:,} held-out queries over {scores['documents']:,} documents, scored with mteb; 95% bootstrap "
        "intervals over queries. A docstring's first line should find the rest of it.\n",
        "| system | NDCG@10 | interval | MRR@10 | Recall@100 |",
        "|-|-:|-|-:|-:|",
    ]
    for name, values in scores["scores"].items():
        low, high = values["interval"]
        lines.append(
            f"| {name} | {values['ndcg_at_10']:.4f} | {low:.4f} to {high:.4f} | {values['mrr_at_10']:.4f} | "
            f"{values['recall_at_100']:.4f} |"
        )
    gain = scores["gain_of_pretraining"]
    low, high = gain["interval"]
    if low > 0:
        verdict = "Pretraining helps: its gain's interval lies above zero."
    elif high < 0:
        verdict = "Pretraining hurts at this size: its gain's interval lies below zero."
    else:
        verdict = "At this size pretraining shows no clear gain: the interval contains zero."
    lines.append(
        f"\nBoth fine-tuned alike, pretraining adds {gain['mean']:+.4f} NDCG@10 ({low:+.4f} to {high:+.4f}, paired over "
        f"queries). {verdict} Mean-pooled embeddings of an untrained network are a bag of words, and a language model "
        "that was never trained to compare texts may score below them."
    )
    return lines


def read(path: Path) -> dict[str, Any]:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def draw_losses(metrics: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw training and validation losses over tokens as a PNG, with a line at the switch of the objective."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=120)
    for name, color in COLORS.items():
        trained = [(entry["tokens"], entry[f"loss/train/{name}"]) for entry in metrics if f"loss/train/{name}" in entry]
        if trained:
            axes.plot(*zip(*trained, strict=True), color=color, alpha=0.35, linewidth=0.8)
            axes.plot(
                *zip(*moving_average(trained), strict=True),
                color=color,
                linewidth=1.8,
                label=f"{name.upper()}, training",
            )
        validation = [(e["tokens"], e[f"metrics/{name}/loss"]) for e in metrics if f"metrics/{name}/loss" in e]
        if validation:
            style = {"marker": "o", "markersize": 4, "linestyle": ":"}
            axes.plot(*zip(*validation, strict=True), color=color, label=f"{name.upper()}, validation", **style)
    phases = [(entry["tokens"], entry["objective/phase"]) for entry in metrics if "objective/phase" in entry]
    for (at, before), (_, after) in pairwise(phases):
        if before != after:
            axes.axvline(at, color="black", linestyle="--", linewidth=1)
            axes.annotate(
                "switch", (at, 1), xycoords=("data", "axes fraction"), xytext=(4, -12), textcoords="offset points"
            )
    axes.set(xlabel="tokens", ylabel="loss (nats per predicted token)", title=title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def moving_average(points: list[tuple[float, float]], window: int = 10) -> list[tuple[float, float]]:
    """The mean of each point and the `window - 1` before it."""
    means = []
    for index, (at, _) in enumerate(points):
        last = [value for _, value in points[max(0, index - window + 1) : index + 1]]
        means.append((at, sum(last) / len(last)))
    return means


if __name__ == "__main__":
    raise SystemExit(main())
