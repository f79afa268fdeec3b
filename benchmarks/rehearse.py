"""Rehearse the pretraining YAMLs without a GPU: `make rehearse`.

Each YAML's first batches (CLM, the switch, MLM, validation) run on fake tensors and fake ranks; see
`biphasic.training.rehearsal`. A line is printed for each YAML and number of ranks. The exit status is 1 if a check fails:
tensors on different devices or of other dtypes, FLOPs that differ from the formula by more than 1%, and graph breaks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from biphasic.amounts import format_bytes
from biphasic.config.load import load
from biphasic.config.pretrain import PretrainConfig
from biphasic.errors import ConfigError, UserError

if TYPE_CHECKING:
    from biphasic.training.rehearsal import Rehearsal

ROOT = Path(__file__).parents[1]
YAMLS = (
    ("yamls/210m_biphasic.yaml", (1, 8, 64)),
    ("yamls/610m_biphasic.yaml", (1, 8, 64)),
    ("yamls/1b_biphasic.yaml", (1, 8, 64)),
    ("yamls/210m_clm.yaml", (8,)),
    ("yamls/210m_mlm.yaml", (8,)),
    ("yamls/quickstart.yaml", (1,)),
    ("recipes/mini/pretrain.yaml", (1,)),
)
"""The YAMLs that describe a new model, and their numbers of ranks."""
_WIDTHS = (26, 5, 26, 5, 10, 10, 13, 8, 6)
_HEADER = ("YAML", "ranks", "attention, strategy", "rows", "state", "peak", "FLOPs/formula", "seconds", "")


def main() -> int:
    """Rehearse, print a table, and return the exit status."""
    parser = argparse.ArgumentParser(description="Rehearse the pretraining YAMLs without a GPU.")
    parser.add_argument("files", nargs="*", help="YAMLs; default: those that describe a new model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8], help="numbers of ranks of the given YAMLs")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="key=value", help="replace values, e.g. microbatch_size=2"
    )
    parser.add_argument("--processes", type=int, default=2, help="number of rehearsals at a time")
    options = parser.parse_args()
    runs = [(file, options.ranks) for file in options.files] or YAMLS
    _print_row(_HEADER)
    failures = []
    # In new processes, because a rehearsal replaces parts of PyTorch.
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        futures = {
            (file, ranks): pool.submit(_rehearse, file, ranks, options.set) for file, counts in runs for ranks in counts
        }
        for (file, ranks), future in futures.items():
            columns, problems = future.result()
            _print_row(columns)
            failures += [f"{file}, {ranks} ranks: {problem}" for problem in dict.fromkeys(problems)]
    print("\n".join(failures) or "every check passed", flush=True)
    return 1 if failures else 0


def _rehearse(file: str, ranks: int, overrides: list[str]) -> tuple[tuple[str, ...], list[str]]:
    """Rehearse a YAML. Return the columns of its line, and its problems."""
    os.environ.setdefault("BUCKET", "unused")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from biphasic.training.rehearsal import rehearse  # seconds, which the parent process doesn't need

    begin = time.monotonic()
    try:
        config = load(ROOT / file, overrides, ranks)
        assert isinstance(config, PretrainConfig)
        rehearsal = rehearse(config, ranks)
    except Exception as error:  # what fails in one YAML doesn't hide the others
        if not isinstance(error, ConfigError | UserError):
            traceback.print_exc()
        return (file, f"{ranks}", *[""] * 6, "FAILED"), [f"{type(error).__name__}: {error}"]
    return _columns(file, rehearsal, time.monotonic() - begin), rehearsal.problems


def _columns(file: str, rehearsal: Rehearsal, seconds: float) -> tuple[str, ...]:
    ratios = [counted / expected for batches in rehearsal.flops.values() for counted, expected in batches]
    memory = (format_bytes(rehearsal.state_bytes), format_bytes(rehearsal.peak_bytes))
    flops = f"{min(ratios):.4f}" if max(ratios) - min(ratios) < 5e-5 else f"{min(ratios):.3f}-{max(ratios):.3f}"
    verdict = "FAILED" if rehearsal.problems else "ok"
    attention, rows = rehearsal.setup.partition("attention ")[2].partition(" ")[0], f"{rehearsal.microbatch}"
    setup = f"{attention}, {rehearsal.strategy}"
    return file, f"{rehearsal.ranks}", setup, rows, *memory, flops, f"{seconds:.0f}", verdict


def _print_row(columns: tuple[str, ...]) -> None:
    print("  ".join(f"{text:{width}}" for text, width in zip(columns, _WIDTHS, strict=True)).rstrip(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
