"""Write runs/quickstart/report.md and loss.png from what the steps left behind."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from biphasic.report.curves import loss_curve
from biphasic.storage import store
from biphasic.training.jsonl_logger import read_metrics

RUN = Path("runs/quickstart")
TRAINED = RUN / "quickstart-pretrain"


def main() -> int:
    """Write the picture, then the report."""
    metrics = read_metrics(TRAINED / "metrics.jsonl")
    loss_curve(metrics, RUN / "loss.png", "Quickstart: causal language modeling, then masked")
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
    store(str(RUN)).write("report.md", "\n".join(parts).encode())
    return 0


def steps_table(steps: dict[str, dict[str, Any]]) -> list[str]:
    """Each step with its tokens, seconds and tokens a second; no tokens where a step doesn't read any."""
    tokens = tokens_of()
    lines = ["| step | tokens | seconds | tokens/s |", "|-|-:|-:|-:|"]
    for record in in_order(steps):
        name, seconds = record["name"], record.get("seconds")
        count = tokens.get(name)
        rate = f"{count / seconds:,.0f}" if count and seconds else ""
        shown = "" if count is None else f"{count:,}"
        lines.append(f"| {name} | {shown} | {'' if seconds is None else f'{seconds:.1f}'} | {rate} |")
    lines.append("\nSeconds are those of the whole command, start-up and validation included.")
    return lines


def tokens_of() -> dict[str, int]:
    """The tokens that steps went through, as their own records say."""
    splits = read(RUN / "data" / "conversion.json")["splits"]
    converted = sum(split["tokens"] for split in splits.values())
    found = {"convert": converted, "verify": converted}
    found["pretrain"] = read_metrics(TRAINED / "metrics.jsonl")[-1]["tokens"]
    for start in ("encoder", "untrained"):
        found[f"finetune-{start}"] = read(RUN / f"{start}-finetuned" / "record.json")["about"]["tokens"]
    return found


def in_order(steps: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps' records in the order in which they ran; the report itself, still running, left out."""
    named = [{"name": name, **record} for name, record in steps.items() if name != "report"]
    return sorted(named, key=lambda record: record["number"])


def switch(metrics: list[dict[str, Any]]) -> list[str]:
    """What validation says before and after the switch."""
    found = [entry for entry in metrics if "metrics/clm/loss" in entry]
    lines = ["| batch | tokens | CLM loss | MLM loss |", "|-:|-:|-:|-:|"]
    for entry in found:
        clm, mlm = entry["metrics/clm/loss"], entry["metrics/mlm/loss"]
        lines.append(f"| {entry['batch']:,} | {entry['tokens']:,} | {clm:.3f} | {mlm:.3f} |")
    return [*lines, ""]


def retrieval(scores: dict[str, Any]) -> list[str]:
    """The table, and what it says about pretraining."""
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
        verdict = "At this size and time pretraining shows no clear gain: the interval holds zero."
    lines.append(
        f"\nBoth fine-tuned alike, pretraining adds {gain['mean']:+.4f} NDCG@10 ({low:+.4f} to {high:+.4f}, paired over "
        f"queries). {verdict} Mean-pooled embeddings of an untrained network are a bag of words, and a language model "
        "that was never trained to compare texts may score below them."
    )
    return lines


def read(path: Path) -> dict[str, Any]:
    """A JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    raise SystemExit(main())
