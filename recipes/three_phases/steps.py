"""Print the step times of a study's phases and around their boundaries, and the last validation loss of each run.

python recipes/three_phases/steps.py runs/mini/three_phases/study
"""

import argparse
import sys
from pathlib import Path
from statistics import median

from biphasic.report.formatting import markdown_table
from biphasic.training.metrics_file import read_metrics

AROUND = 10
"""How many batches before and after a boundary are looked at."""


def main(arguments: list[str] | None = None) -> int:
    """Print the tables. Exit status 2 when the folder has no run."""
    parser = argparse.ArgumentParser(description="Print step times by phase, and validation losses.")
    parser.add_argument("study", type=Path, help="a study's folder on this machine")
    study, phases, boundaries, losses = parser.parse_args(arguments).study, [], [], []
    if not (files := sorted(study.glob("*/metrics.jsonl"))):
        print(f"{study}: has no run with a metrics.jsonl", file=sys.stderr)
        return 2
    for file in files:
        run, batches = file.parent.name, read_metrics(file)
        # The first step of a process has no time.
        seconds = {entry["batch"]: entry["time/step_seconds"] for entry in batches if "time/step_seconds" in entry}
        phase_of = {entry["batch"]: int(entry["objective/phase"]) for entry in batches}
        medians = {}
        for phase in sorted(set(phase_of.values())):
            own = [seconds[batch] for batch in seconds if phase_of[batch] == phase]
            medians[phase] = median(own)
            phases.append([run, phase, len(own), f"{medians[phase]:.3f}", f"{max(own):.3f}"])
        for batch in phase_of:
            if phase_of.get(batch - 1, phase_of[batch]) != phase_of[batch]:
                around = range(batch - AROUND, batch + AROUND)
                ratios = {near: seconds[near] / medians[phase_of[near]] for near in around if near in seconds}
                longest = max(ratios, key=lambda near: ratios[near])
                boundaries.append([run, f"{batch - 1:,}", f"{longest - 1:,}", f"{ratios[longest]:.2f}"])
        validations = [entry["metrics/mlm/loss"] for entry in batches if "metrics/mlm/loss" in entry]
        losses.append([run, f"{validations[-1]:.4f}" if validations else ""])
    print("\n".join(markdown_table(["run", "phase", "steps", "median, s", "longest, s"], phases)))
    print("\n".join(markdown_table(["run", "first batch of a phase", "longest step near it", "medians"], boundaries)))
    print("\n".join(markdown_table(["run", "validation loss (MLM)"], losses)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
