"""The tests of followup.md, from the records of its pretraining seeds and those of protocol.md.

    python recipes/mini/followup.py      # writes recipes/mini/longer/results.md and recipes/mini/ratios/results.md

It computes nothing before the records of all seeds are there (protocol.sh writes them).
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import pandas as pd
from protocol import MEAN_AND_EACH, RUNS, Comparison, outcome_table, outcomes, score_table, unplanned_table
from results import TASKS
from seed_records import PUBLIC, SeedRuns, check_same_data, read_scores, write_tables

from biphasic.errors import UserError

LONGER = SeedRuns(
    "longer",
    (15, 16, 17),
    {
        "1m-mlm40-10240": "mlm",
        "1m-clm-2560-mlm40-10240": "clm-mlm",
        "1m-clm-5120-mlm40-10240": "clm-mlm",
        "1m-clm-10240": "clm",
        "mlm-mean": "mlm",
        "clm-mlm-mean": "clm-mlm",
        **{f"1m-clm-dec10240-mlm40-{batches}": "clm-mlm" for batches in (10728, 13166, 15604)},
        **{f"1m-mlm40-dec10240-mlm40-{batches}": "mlm" for batches in (10728, 13166, 15604)},
    },
    lambda _, task: () if task in PUBLIC else (0, 1),
)
RATIOS = SeedRuns(
    "ratios",
    RUNS.seeds,
    {"1m-mlm20-640": "mlm", "1m-clm-320-mlm20-640": "clm-mlm"},
    lambda _, task: () if task in PUBLIC else (0,),
)
GAINS: dict[str, tuple[str, str]] = {
    f"the end from {start}": (f"1m-{start}-dec10240-mlm40-15604", f"1m-{start}-dec10240-mlm40-13166")
    for start in ("clm", "mlm40")
}
"""The gain of continued pretraining from 29 to 52%, as the difference of two models."""
RANGES: dict[str, tuple[str, str]] = {
    "ratios alone": ("1m-mlm40-640", "1m-mlm20-640"),
    "ratios after CLM": ("1m-clm-320-mlm40-640", "1m-clm-320-mlm20-640"),
}
"""What the masking ratio changes, as the absolute difference of two models."""


def _at_42_million(title: str, first: str, second: str, tasks: tuple[str, ...] = TASKS) -> Comparison:
    return Comparison(title, "42 M", first, second, tasks)


LONGER_COMPARISONS = (
    _at_42_million("25% CLM minus MLM", "1m-clm-2560-mlm40-10240", "1m-mlm40-10240"),
    _at_42_million("50% CLM minus MLM", "1m-clm-5120-mlm40-10240", "1m-mlm40-10240"),
    _at_42_million("25% CLM minus 50% CLM", "1m-clm-2560-mlm40-10240", "1m-clm-5120-mlm40-10240"),
    _at_42_million("50% CLM minus CLM", "1m-clm-5120-mlm40-10240", "1m-clm-10240"),
    *(
        Comparison(
            f"continued by {percent}%, from CLM minus from MLM",
            tokens,
            f"1m-clm-dec10240-mlm40-{batches}",
            f"1m-mlm40-dec10240-mlm40-{batches}",
        )
        for percent, tokens, batches in ((5, "44 M", 10728), (29, "54 M", 13166), (52, "64 M", 15604))
    ),
    Comparison("gain from 29 to 52%, from CLM minus from MLM", "64 M", "the end from clm", "the end from mlm40"),
    _at_42_million("MLM: mean of checkpoints minus decay", "mlm-mean", "1m-mlm40-10240"),
    _at_42_million("50% CLM: mean of checkpoints minus decay", "clm-mlm-mean", "1m-clm-5120-mlm40-10240"),
)
LONGER_UNPLANNED = (
    *(_at_42_million("CLM minus MLM", "1m-clm-10240", "1m-mlm40-10240", tasks) for tasks in MEAN_AND_EACH),
    *(
        _at_42_million(f"{percent}% CLM minus MLM", f"1m-clm-{batches}-mlm40-10240", "1m-mlm40-10240", tasks)
        for (percent, batches), tasks in product(((25, 2560), (50, 5120)), MEAN_AND_EACH[1:])
    ),
)
RATIO_COMPARISONS = (
    Comparison("MLM, 40% minus 20%", "2.6 M", "1m-mlm40-640", "1m-mlm20-640"),
    Comparison("CLM→MLM, 40% minus 20%", "2.6 M", "1m-clm-320-mlm40-640", "1m-clm-320-mlm20-640"),
    Comparison("absolute differences of 40 and 20%, MLM minus CLM→MLM", "2.6 M", "ratios alone", "ratios after CLM"),
)


def with_differences(
    scores: pd.DataFrame, pairs: Mapping[str, tuple[str, str]], change: Callable[[pd.Series], pd.Series]
) -> pd.DataFrame:
    """Return the scores with more "models", whose scores are `change` of the differences of two models, by seed and task."""
    by_model = scores.set_index(["model", "seed", "task"]).score
    more = [
        change(by_model[first] - by_model[second]).reset_index().assign(model=name)
        for name, (first, second) in pairs.items()
    ]
    return pd.concat([scores, *more], ignore_index=True)


def longer_tables(scores: pd.DataFrame) -> list[str]:
    """Return the lines of longer/results.md."""
    all_scores = with_differences(scores, GAINS, lambda values: values)
    planned = _tables(LONGER, LONGER_COMPARISONS, all_scores, tuple(LONGER.models))
    return [*planned, *unplanned_table(scores, LONGER_UNPLANNED)]


def ratio_tables(scores: pd.DataFrame) -> list[str]:
    """Return the lines of ratios/results.md. The scores are those of RATIOS and of the protocol."""
    all_scores = with_differences(scores, RANGES, lambda values: values.abs())
    return _tables(RATIOS, RATIO_COMPARISONS, all_scores, [model for pair in RANGES.values() for model in pair])


def _tables(runs: SeedRuns, comparisons: Sequence[Comparison], scores: pd.DataFrame, models: Sequence[str]) -> list[str]:
    title = f"## {runs.name} ({len(runs.seeds)} pretraining seeds, corrected over all {len(comparisons)})"
    return [title, "", *outcome_table(outcomes(scores, comparisons)), *score_table(scores, models, TASKS)]


def main() -> int:
    """Write the tables of both studies, and print their names."""
    try:
        protocol, ratios, longer = (read_scores(runs, runs.records) for runs in (RUNS, RATIOS, LONGER))
        first, second = (json.loads((runs.records / "seed-3.json").read_bytes()) for runs in (RUNS, RATIOS))
        check_same_data("the records of protocol and ratios", first, second)
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    write_tables(RATIOS, ratio_tables(pd.concat([protocol, ratios])))
    write_tables(LONGER, longer_tables(longer))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
