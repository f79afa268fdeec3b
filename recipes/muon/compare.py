"""Tables of recipes/muon: losses at each learning rate, the tokens after which Muon has AdamW's final loss, and task scores.

    python recipes/muon/compare.py runs/mini    # the folder of the mini study: writes records.json, and the tables
    python recipes/muon/compare.py              # the tables of the published records

Both files are written beside this one; the tables are in results.md.
"""

import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import pandas as pd

sys.path.append(str(Path(__file__).parents[1] / "mini"))

from seed_records import Sources, record_bytes

from biphasic.errors import UserError
from biphasic.report.formatting import format_interval, format_p, format_signed, markdown_page, markdown_table
from biphasic.report.statistics import mean_interval
from biphasic.storage import open_store
from biphasic.sweep.records import read_grid, read_records
from biphasic.training.metrics_file import read_metrics

HERE = Path(__file__).parent
OBJECTIVES = {"mlm": "MLM", "clm-mlm": "CLM, then MLM"}
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}
RECORDS, TABLES = "records.json", "results.md"


class Run(NamedTuple):
    """The end of a run. `source` is an index into the records' `sources`."""

    study: str
    model: str
    tokens: int
    loss: float
    """MLM loss on the validation split, in nats."""
    source: int


class Trial(NamedTuple):
    """A fine-tuning on `parameters`. Scores are from 0 to 1."""

    model: str
    lr: float
    seed: int
    validation: float
    test: float
    source: int


class Records(NamedTuple):
    """What the two studies measured."""

    runs: Sequence[Run]
    trials: Sequence[Trial]

    def finals(self, study: str) -> dict[str, Run]:
        """Return a study's runs by their models' names."""
        return {run.model: run for run in self.runs if run.study == study}


def read_folder(folder: Path) -> bytes:
    """Return the records of the mini study's folder, as JSON.

    Raises:
        UserError: a run or a fine-tuning is missing or failed.
    """
    sources, runs, trials = Sources(), list[Run](), list[Trial]()
    for study in ("rates", "seeds"):
        for metrics in sorted((folder / "muon" / study).glob("*/metrics.jsonl")):
            lines = read_metrics(metrics)
            # The last batch's line has the validation of the run's end.
            if not lines or "metrics/mlm/loss" not in lines[-1]:
                problem = "has no MLM loss after its last batch, so it has not ended"
                raise UserError(f"{metrics.parent}: {problem}: python src/main.py recipes/muon/{study}.yaml")
            source, last = sources.index_of_run(metrics.parent), lines[-1]
            runs.append(Run(study, metrics.parent.name, last["tokens"], last["metrics/mlm/loss"], source))
    sweep = open_store(str(folder / "muon" / "seeds" / "sweep"))
    names = read_grid(sweep).trials
    done = read_records(sweep, names)
    for name, cell in names.items():
        if name not in done or done[name].status != "done":
            raise UserError(f"{sweep.root}: {name} is missing or failed: python src/main.py recipes/muon/sweep.yaml")
        (result,), source = done[name].results, sources.index(done[name].about)
        assert result.validation is not None and result.test is not None
        trials.append(Trial(cell.model, cell.lr, cell.seed, result.validation, result.test, source))
    return record_bytes({"sources": sources.rows, "runs": runs, "trials": trials}, "runs", "trials")


def parse(data: bytes) -> Records:
    """Return the records in a file."""
    record = json.loads(data)
    return Records([Run(**run) for run in record["runs"]], [Trial(**trial) for trial in record["trials"]])


def tokens_to(loss: float, runs: Sequence[Run]) -> float | None:
    """Return the tokens after which runs of several lengths, each with its own decay, have a loss.

    Between two lengths, the loss is linear in the logarithm of the tokens. None: no length is long or short enough.
    """
    for short, long in itertools.pairwise(sorted(runs, key=lambda run: run.tokens)):
        if long.loss <= loss <= short.loss:
            share = (short.loss - loss) / (short.loss - long.loss)
            return math.exp(math.log(short.tokens) + share * math.log(long.tokens / short.tokens))
    return None


def rate_table(records: Records) -> list[str]:
    """Return the table of the final loss of each objective and optimizer at each learning rate."""
    runs = records.finals("rates")
    columns = sorted({"-".join(name.split("-")[-2:]) for name in runs}, key=float)
    body = list[list[str]]()
    for objective, optimizer in itertools.product(OBJECTIVES, OPTIMIZERS):
        runs_by_rate = [runs.get(f"{objective}-{optimizer}-{rate}") for rate in columns]
        losses = [f"{run.loss:.3f}" if run else "" for run in runs_by_rate]
        body.append([f"{OBJECTIVES[objective]}: {OPTIMIZERS[optimizer]}", *losses])
    return markdown_table(["final MLM loss", *columns], body)


def token_table(records: Records) -> list[str]:
    """Return the table of AdamW's and Muon's final losses over the seeds, and the ratio of tokens to AdamW's loss."""
    runs, body = records.finals("seeds"), list[list[str]]()
    for objective, name in OBJECTIVES.items():
        losses: dict[str, list[float]] = {"adamw": [], "muon": []}
        ratios = list[str]()
        for seed in _seeds(records):
            target = runs[f"{objective}-adamw-320-{seed}"]
            muon = [
                run for model, run in runs.items() if model.startswith(f"{objective}-muon-") and model.endswith(f"-{seed}")
            ]
            losses["adamw"].append(target.loss)
            losses["muon"].append(max(muon, key=lambda run: run.tokens).loss)
            needed = tokens_to(target.loss, muon)
            ratios.append("outside the lengths" if needed is None else f"{target.tokens / needed:.2f}")
        body.append([name, *(f"{fmean(of):.3f} ± {stdev(of):.3f}" for of in losses.values()), ", ".join(ratios)])
    return markdown_table(
        ["objective", "AdamW's final MLM loss", "Muon's", "tokens to AdamW's loss: AdamW over Muon, by seed"], body
    )


def score_table(records: Records) -> list[str]:
    """Return the table of F1 on `parameters` after 320 batches, at the better fine-tuning rate by validation.

    Scores are means over the fine-tuning seeds; differences are paired by pretraining seed.
    """
    trials = pd.DataFrame(records.trials, columns=list(Trial._fields))
    means = trials.groupby(["model", "lr"], as_index=False)[["validation", "test"]].mean()
    chosen = means.loc[means.groupby("model").validation.idxmax()].set_index("model").test
    body = list[list[str]]()
    for objective, name in OBJECTIVES.items():
        by_seed = {
            optimizer: pd.Series([chosen[f"{objective}-{optimizer}-320-{seed}"] for seed in _seeds(records)])
            for optimizer in OPTIMIZERS
        }
        cells = [mean_interval(values) for values in by_seed.values()]
        change = mean_interval(by_seed["muon"] - by_seed["adamw"])
        texts = [format_interval(cell.mean, cell.half) for cell in cells]
        body.append([name, *texts, format_interval(change.mean, change.half, format_signed), format_p(change.p)])
    return markdown_table(["F1 on `parameters`, test", *OPTIMIZERS.values(), "Muon minus AdamW", "p"], body)


def _seeds(records: Records) -> list[str]:
    return sorted({model.split("-")[-1] for model in records.finals("seeds")})


def main(arguments: Sequence[str] = sys.argv[1:], target: Path = HERE) -> int:
    """Write the records, if a folder is given, and the tables."""
    store = open_store(str(target))
    try:
        if arguments:
            store.write(RECORDS, read_folder(Path(arguments[0])))
        records = parse(store.read(RECORDS))
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    store.write(TABLES, markdown_page([*rate_table(records), *token_table(records), *score_table(records)]))
    print(target / TABLES)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
