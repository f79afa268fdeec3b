"""Write FOLDER/report.md, report.html, summary.txt, scores.png and losses.png from the quickstart's records.

python recipes/quickstart/report.py runs/quickstart
"""

import argparse
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from biphasic.amounts import format_seconds
from biphasic.config.load import load_job
from biphasic.config.pretrain import PretrainConfig
from biphasic.report.drawing import COLORS, default_style, make_panels, png
from biphasic.report.formatting import format_p, html_page
from biphasic.report.statistics import holm
from biphasic.report.study_losses import loss_events, loss_points
from biphasic.storage import open_store
from biphasic.training.metrics_file import parse_metrics

RUN = Path("runs/quickstart")
LABELLING = (
    "Token labelling: which words of a docstring's parameters are names, which are types? F1 of complete entities on "
    "packages that no model has read; rate by validation, three fine-tuning seeds, 95% intervals, paired differences."
)
RETRIEVAL = (
    "Retrieval, scored with mteb: a docstring's first line finds the rest of it among {documents:,} ({queries:,} queries, "
    "one fine-tuning, bootstrap intervals)."
)
BM25 = (
    "BM25 is ahead because the two parts of a docstring share rare words, which it matches exactly and a tiny encoder "
    "hardly knows."
)
TRUNK = "clm-trunk"
RUNS = {"clm-mlm": "CLM, then MLM", "mlm": "MLM", "clm": "CLM"}
"""The pretraining runs, and their names in tables and pictures."""
NAMES = {**RUNS, "untrained": "untrained"}
COLOR = {
    "MLM": COLORS[1],
    "CLM, then MLM": COLORS[0],
    "CLM": COLORS[2],
    "untrained": COLORS[9],
}
NEXT = """## What next

- **Your own text**, in English with this tokenizer; for another language: `recipes/your_language/README.md`.

      biphasic convert yamls/data/own_text.yaml 'source.paths=[my_text/]' tokenizer=runs/quickstart/tokenizer \\
          sequence_length=256 output=data/mine
      composer src/main.py yamls/quickstart.yaml run_name=mine data.folder=data/mine

- **A GPU**: the paper's smallest model, `python src/main.py yamls/210m_biphasic.yaml --plan`, then
  `composer src/main.py yamls/210m_biphasic.yaml`. `make bench-gpu` measures the throughput.
- **The study**: this comparison with all of the paper's models, budgets and tasks, `recipes/paper/README.md` and
  `python src/main.py recipes/paper/study.yaml --plan`.
"""


def read_runs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the metrics of the pretraining runs. Those that start from the trunk begin with its metrics."""
    trunk = read_run(folder / TRUNK)
    runs = {}
    for run in RUNS:
        metrics = read_run(folder / run)
        runs[run] = [entry for entry in trunk if entry["batch"] < metrics[0]["batch"]] + metrics
    return runs


def read_run(folder: Path) -> list[dict[str, Any]]:
    """Return a run's metrics by batch."""
    return parse_metrics((folder / "metrics.jsonl").read_text(encoding="utf-8"))


def draw_losses(folder: Path, runs: dict[str, list[dict[str, Any]]]) -> bytes:
    """Draw the losses of all runs over millions of tokens as PNG: means of bins of batches, and validation as dots."""
    objectives = ("mlm", "clm")
    with default_style():
        titles = [f"{objective.upper()} loss (nats per predicted token)" for objective in objectives]
        figure, panels = make_panels(titles, columns=2, size=(4.6, 3.4))
        for run, metrics in runs.items():
            name, millions = RUNS[run], metrics[-1]["tokens"] / metrics[-1]["batch"] / 1e6
            points = loss_points(name, metrics, 0)
            for objective, axes in zip(objectives, panels, strict=True):
                styles: dict[str, dict[str, Any]] = {
                    "training": {"linewidth": 1.0, "alpha": 0.45},
                    "validation": {"linewidth": 1.4, "marker": "o", "markersize": 3.5, "label": name},
                }
                for split, style in styles.items():
                    curve = points[(points.kind == split) & (points.objective == objective)]
                    axes.plot(curve.step * millions, curve.loss, color=COLOR[name], **style)
            for event in loss_events(name, config_of(folder / run), 0).itertuples():
                if event.kind == "switch":
                    for axes in panels:
                        axes.axvline(event.step * millions, color=COLOR[name], linestyle="--", linewidth=1)
                        axes.annotate(
                            "switch", (event.step * millions, 0.96), xycoords=("data", "axes fraction"), fontsize=8,
                            xytext=(4, 0), textcoords="offset points", color=COLOR[name],
                        )  # fmt: skip
        for axes in panels:
            axes.set_xlabel("millions of tokens")
            axes.set_xlim(left=0)
        return png(figure)


def config_of(run: Path) -> PretrainConfig:
    """Return the configuration that a run wrote into its folder."""
    config = load_job(PretrainConfig, run / "config.yaml")
    return config


@dataclass(frozen=True)
class Labelling:
    """The sweep's test scores, in points of F1."""

    scores: dict[str, tuple[float, float]]
    """Mean over seeds and half of its 95% interval, by model."""
    differences: dict[tuple[str, str], tuple[float, float, float]]
    """Mean, half of its 95% interval and corrected p-value, by the two models: the first minus the second."""
    p: dict[tuple[str, str], float]
    """The p-values before the correction."""


def read_labelling(report: Path) -> Labelling:
    """Read the tables of a sweep's report."""
    means, compared = (pd.read_csv(report / f"{name}.csv") for name in ("table", "differences"))
    means, compared = means[means.test_set == "parameters"], compared[compared.test_set == "parameters"]
    scores = {row.model: (100 * row.score, 100 * row.half_width) for row in means.itertuples()}
    differences, p = dict[tuple[str, str], tuple[float, float, float]](), dict[tuple[str, str], float]()
    for row in compared.itertuples():
        differences[row.first, row.second] = (100 * row.difference, 100 * row.half_width, row.p_holm)
        differences[row.second, row.first] = (-100 * row.difference, 100 * row.half_width, row.p_holm)
        p[row.first, row.second] = p[row.second, row.first] = row.p
    return Labelling(scores, differences, p)


def draw_scores(labelling: Labelling) -> bytes:
    """Draw the scores of token labelling with their intervals as PNG."""
    with default_style():
        title = "token labelling: F1 on held-out packages (points), 95% intervals"
        figure, [axes] = make_panels([title], columns=1, size=(6.4, 2.1))
        names = [name for name in NAMES if name in labelling.scores][::-1]
        for position, name in enumerate(names):
            score, half = labelling.scores[name]
            axes.barh(position, score, height=0.6, color=COLOR[NAMES[name]], alpha=0.75)
            axes.errorbar(score, position, xerr=half, color="black", capsize=3, linewidth=1)
            axes.annotate(
                f"{score:.1f}",
                (score + half, position),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axes.set_yticks(range(len(names)), [NAMES[name] for name in names])
        axes.set_xlim(0, 110)
        axes.grid(axis="y", visible=False)
        return png(figure)


def conclusion(labelling: Labelling) -> str:
    """Say in a sentence for each of the two comparisons whether a difference is shown (p, corrected for two, below 0.05)."""
    sentences, others = [], ("mlm", "clm")
    for other, p in zip(others, holm(pd.Series([labelling.p["clm-mlm", other] for other in others])), strict=True):
        mean, half, _ = labelling.differences["clm-mlm", other]
        numbers = f"{mean:+.1f} ± {half:.1f} points of F1, p {format_p(p)}"
        if p < 0.05:
            better = "better" if mean > 0 else "worse"
            sentences.append(f"CLM, then MLM is {better} than {RUNS[other]} alone: {numbers}.")
        else:
            sentences.append(f"Not shown: a difference between CLM, then MLM and {RUNS[other]} alone ({numbers}).")
    sentences.append(
        "One pretraining seed of a tiny model, on one task of four that were tried (docs/results.md has more tasks, seeds "
        "and budgets): it shows the method at work, not what it gains at the paper's size."
    )
    return " ".join(sentences)


def labelling_table(labelling: Labelling) -> list[str]:
    """Return the table of token labelling: F1, and the difference of CLM, then MLM to each other encoder."""
    lines = ["| encoder | F1 | CLM, then MLM minus it | p, corrected |", "|-|-:|-:|-:|"]
    for name, (score, half) in sorted(labelling.scores.items(), key=lambda item: -item[1][0]):
        difference, p = "", ""
        if name != "clm-mlm":
            mean, width, p_holm = labelling.differences["clm-mlm", name]
            difference, p = f"{mean:+.1f} ± {width:.1f}", f"{p_holm:.4f}"
        lines.append(f"| {NAMES[name]} | {score:.1f} ± {half:.1f} | {difference} | {p} |")
    return lines


def retrieval_table(scores: dict[str, Any]) -> list[str]:
    """Return the table of retrieval: NDCG@10 with intervals."""
    lines = ["| system | NDCG@10 | 95% interval |", "|-|-:|-|"]
    for name, values in sorted(scores["scores"].items(), key=lambda item: -item[1]["ndcg_at_10"]):
        low, high = values["interval"]
        lines.append(f"| {name} | {values['ndcg_at_10']:.3f} | {low:.3f} to {high:.3f} |")
    return lines


def comparison(labelling: Labelling, scores: dict[str, Any]) -> list[str]:
    """Return the lines of the two tables, each below what it shows."""
    return [
        LABELLING,
        "",
        *labelling_table(labelling),
        "",
        f"{RETRIEVAL.format(**scores)} {BM25}",
        "",
        *retrieval_table(scores),
    ]


def losses_table(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the table of validation losses at the end."""
    lines = ["| pretraining | tokens | validation CLM loss | validation MLM loss |", "|-|-:|-:|-:|"]
    for run, metrics in runs.items():
        last = metrics[-1]
        losses = f"{last['metrics/clm/loss']:.2f} | {last['metrics/mlm/loss']:.2f}"
        lines.append(f"| {RUNS[run]} | {last['tokens']:,} | {losses} |")
    return lines


def steps_table(folder: Path, records: list[dict[str, Any]]) -> list[str]:
    """Return the table of steps with their tokens and seconds; no tokens where a step reads none."""
    tokens = tokens_of(folder)
    lines = ["| step | tokens | seconds | tokens/s |", "|-|-:|-:|-:|"]
    for record in records:
        name, seconds, count = record["name"], record["seconds"], tokens.get(record["name"])
        rate = f"{count / seconds:,.0f}" if count else ""
        lines.append(f"| {name} | {'' if count is None else f'{count:,}'} | {seconds:.1f} | {rate} |")
    total = format_seconds(sum(record["seconds"] for record in records))
    lines.append(f"\nThe steps' seconds, validation and saving included, add up to {total}; two steps run side by side.")
    return lines


def tokens_of(folder: Path) -> dict[str, int]:
    """Return the tokens that each step processed, from its own record."""
    splits = read(RUN / "data" / "conversion.json")["splits"]
    converted = sum(split["tokens"] for split in splits.values())
    tokens = {"convert": converted, "verify": converted}
    for run in (TRUNK, *RUNS):
        metrics = read_run(folder / run)
        start = metrics[0]["tokens"] * (metrics[0]["batch"] - 1) // metrics[0]["batch"]
        tokens[f"pretrain-{run}"] = metrics[-1]["tokens"] - start
    for name in ("untrained", *RUNS):
        tokens[f"finetune-{name}"] = read(folder / f"{name}-finetuned" / "record.json")["about"]["tokens"]
    return tokens


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the steps before the report, in their order."""
    files = [*(RUN / "steps").glob("*.json"), *(folder / "steps").glob("*.json")]
    records = {file.stem: {"name": file.stem, **read(file)} for file in files}
    before = [record for record in records.values() if "seconds" in record and record["name"] != "report"]
    return sorted(before, key=lambda record: record["number"])


def read(path: Path) -> dict[str, Any]:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def main(arguments: list[str] | None = None) -> int:
    """Write the report. Exit status 2 when something of a run is missing."""
    parser = argparse.ArgumentParser(description="Write the quickstart's report.")
    parser.add_argument("folder", type=Path, help="of the runs")
    try:
        write(parser.parse_args(arguments).folder)
    except OSError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def write(folder: Path) -> None:
    """Write the pictures and the summary, then the report."""
    runs, scores, records = read_runs(folder), read(folder / "scores.json"), read_records(folder)
    labelling = read_labelling(folder / "sweep" / "report")
    store = open_store(str(folder))
    pictures = {"losses.png": draw_losses(folder, runs), "scores.png": draw_scores(labelling)}
    for name, content in pictures.items():
        store.write(name, content)
    tables = comparison(labelling, scores)
    store.write("summary.txt", "\n".join([conclusion(labelling), "", *tables, ""]).encode())
    parts = [
        "# Quickstart\n",
        f"{conclusion(labelling)}\n",
        "Text in, encoders out, on this machine: the same tokens for MLM alone, for CLM and then MLM, and for CLM alone.\n",
        "![F1 of token labelling](scores.png)\n",
        *tables,
        "\nThe sweep's own report, with rates and seeds: `sweep/report/report.md`.",
        "\n## Pretraining\n",
        "![losses](losses.png)\n",
        "Lines with dots are validation; thin lines are training, as means of bins of batches.\n",
        *losses_table(runs),
        "\n## Steps\n",
        *steps_table(folder, records),
        "\n```",
        *(shlex.join(record["command"]) for record in records),
        "```\n",
        NEXT,
    ]
    page = "\n".join(parts)
    store.write("report.md", page.encode())
    store.write("report.html", html_page(page, pictures))


if __name__ == "__main__":
    raise SystemExit(main())
