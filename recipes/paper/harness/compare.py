"""Compare a sweep's scores with those that the paper's authors published, cell by cell at the same rate.

    python recipes/paper/harness/compare.py [runs/harness/report/results.csv]

The difference of two means has the 95% interval of the t-test with pooled variance; with one published seed, the spread is
that of ours. A cell agrees if the interval includes zero. The exit status is 1 if a cell differs, and 2 if there is nothing
to compare.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
from scipy import stats

from biphasic.report.formatting import format_points, markdown_table

CELLS = Path(__file__).with_name("cells.csv")
TEST_SETS = {"mldr_en": "mldr", "mnli_m": "mnli-m", "uner_en": "uner"}
"""Our names of the authors' datasets where they differ."""
_KEY = ["model", "test_set", "lr", "split"]


def compare(measured: pd.DataFrame, cells: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each cell that both have: means, numbers of seeds, difference, half of its interval, and `agrees`.

    `measured` is a sweep's `results.csv`, and `cells` has the columns of `cells.csv`. Cells with fewer than two measured
    seeds are left out.
    """
    ours = measured.melt(["model", "test_set", "lr", "seed"], ["validation", "test"], "split", "score").dropna()
    theirs = cells.assign(test_set=cells.dataset.replace(TEST_SETS), lr=cells.rate)
    statistics = [table.groupby(_KEY).score.agg(["mean", "var", "count"]) for table in (ours, theirs)]
    both = statistics[0].join(statistics[1], how="inner", lsuffix="_measured", rsuffix="_published")
    both = both[both.count_measured > 1].reset_index()
    counts = both.count_measured, both.count_published
    freedom = counts[0] + counts[1] - 2
    squares = both.var_measured * (counts[0] - 1) + both.var_published.fillna(0.0) * (counts[1] - 1)
    error = (squares / freedom * (1 / counts[0] + 1 / counts[1])) ** 0.5
    difference = both.mean_measured - both.mean_published
    half = stats.t.ppf(0.975, freedom) * error
    return both.assign(difference=difference, half=half, agrees=difference.abs() <= half)


def main(arguments: list[str]) -> int:
    """Print the table, and return the exit status."""
    file = Path(arguments[0] if arguments else "runs/harness/report/results.csv")
    if not file.is_file():
        print(f"{file}: there is no such file; run the sweep first (recipes/paper/harness/README.md)", file=sys.stderr)
        return 2
    table = compare(pd.read_csv(file), pd.read_csv(CELLS))
    if table.empty:
        print(f"{file}: has no cell of {CELLS.name} with two or more seeds", file=sys.stderr)
        return 2
    body = [
        [
            row.model, row.test_set, row.split, f"{row.lr:g}",
            f"{format_points(row.mean_measured)} ({row.count_measured})",
            f"{format_points(row.mean_published)} ({row.count_published})",
            f"{100 * row.difference:+.2f} ± {100 * row.half:.2f}", "yes" if row.agrees else "no",
        ]
        for row in table.itertuples()
    ]  # fmt: skip
    header = ["model", "set", "split", "rate", "measured (seeds)", "published (seeds)", "difference", "agrees"]
    print("\n".join(markdown_table(header, body)))
    return 0 if table.agrees.all() else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
