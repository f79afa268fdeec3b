"""Which models each pretraining seed of protocol.md and followup.md trains and fine-tunes, and the records of them."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd
from results import TASKS

from biphasic.checkpointing.manifest import newest_first
from biphasic.errors import UserError
from biphasic.model.checkpoint import read_record
from biphasic.report.formatting import markdown_page
from biphasic.storage import open_store

HERE = Path(__file__).parent
RATES = {
    "mlm": {"types": 4e-3, "parameters": 16e-3, "questions": 4e-3, "retrieval": 8e-3},
    "clm-mlm": {"types": 4e-3, "parameters": 8e-3, "questions": 4e-3, "retrieval": 4e-3},
    "clm": {"types": 2e-3, "parameters": 8e-3, "questions": 4e-3, "retrieval": 4e-3},
}
"""Fine-tuning rates by objective and task, from the protocol's pilot."""
PUBLIC = {"sst2": "types", "uner": "parameters", "squad": "questions", "scifact": "retrieval"}
"""Public sets (recipes/mini/public), each with the task of the same family, whose rates it takes."""


class Trial(NamedTuple):
    """A fine-tuning. Scores are from 0 to 1; `source` is an index into the record's `sources`."""

    model: str
    task: str
    lr: float
    seed: int
    validation: float
    test: float
    source: int


@dataclass(frozen=True)
class SeedRuns:
    """What `<name>.yaml` trains and protocol_run.py fine-tunes for each pretraining seed.

    The models are in `<name>/seed<seed>` of run.sh's folder, and the records in `recipes/mini/<name>`.
    """

    name: str
    seeds: tuple[int, ...]
    """Of pretraining."""
    models: Mapping[str, str]
    """The models that are fine-tuned, with the objective whose rates they take."""
    finetuning_seeds: Callable[[str, str], tuple[int, ...]]
    """Given a model and a task, returns the seeds with which the model is fine-tuned on it."""

    @property
    def records(self) -> Path:
        """The folder of the records."""
        return HERE / self.name

    def cells(self) -> Iterator[tuple[str, str, int]]:
        """Yield (model, task, fine-tuning seed) of each fine-tuning of a pretraining seed."""
        for model, task in product(self.models, (*TASKS, *PUBLIC)):
            for seed in self.finetuning_seeds(model, task):
                yield model, task, seed


def read_scores(runs: SeedRuns, folder: Path) -> pd.DataFrame:
    """Return test scores by seed, model and task: the means over the fine-tuning seeds.

    Raises:
        UserError: a seed has no record or an incomplete one, or two seeds had other rows, another tokenizer or other tasks.
    """
    files = {seed: folder / f"seed-{seed}.json" for seed in runs.seeds}
    records = {seed: json.loads(file.read_text(encoding="utf-8")) for seed, file in files.items() if file.exists()}
    if missing := [str(seed) for seed in runs.seeds if seed not in records]:
        raise UserError(f"{folder}: nothing is computed before all seeds are there; missing: {', '.join(missing)}")
    rows = list[dict[str, Any]]()
    for seed, record in records.items():
        check_same_data(f"{folder}: seeds {runs.seeds[0]} and {seed}", records[runs.seeds[0]], record)
        scores = {(trial["model"], trial["task"], trial["seed"]): trial["test"] for trial in record["trials"]}
        if absent := [cell for cell in runs.cells() if cell not in scores]:
            raise UserError(f"{folder}: seed {seed} has no fine-tuning {absent[0]}")
        for model, task in dict.fromkeys(cell[:2] for cell in runs.cells()):
            score = fmean(scores[model, task, number] for number in runs.finetuning_seeds(model, task))
            rows.append({"seed": seed, "model": model, "task": task, "score": score})
    return pd.DataFrame(rows)


def check_same_data(names: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Raise a UserError, which begins with `names`, if two seeds' records are of other rows, tokenizers or tasks."""
    if other := [name for name in first["data"] if second["data"].get(name) != first["data"][name]]:
        raise UserError(f"{names} differ in {', '.join(other)}, so they can't be compared")


def mean_scores(scores: pd.DataFrame, model: str, tasks: Sequence[str]) -> pd.Series:
    """Return a model's mean test score over tasks, by pretraining seed."""
    return scores[(scores.model == model) & scores.task.isin(tasks)].groupby("seed").score.mean()


def write_tables(runs: SeedRuns, lines: Sequence[str]) -> None:
    """Write results.md beside a study's records, and print its name."""
    open_store(str(runs.records)).write("results.md", markdown_page(lines))
    print(runs.records / "results.md")


class Sources:
    """Distinct sources. A record names one by its index in `rows`."""

    def __init__(self) -> None:
        self.rows = list[dict[str, Any]]()
        """Commit, host, hardware and versions of each."""

    def index(self, about: dict[str, Any]) -> int:
        """Return the index of the source that a fine-tuning's or a checkpoint's record names."""
        source = {key: about[key] for key in ("commit", "host", "hardware", "versions")}
        if source not in self.rows:
            self.rows.append(source)
        return self.rows.index(source)

    def index_of_run(self, run: Path) -> int:
        """Return the index of the source of a run's newest checkpoint."""
        checkpoints = run / "checkpoints"
        newest = next(each.manifest for each in newest_first(open_store(str(checkpoints))) if each.manifest is not None)
        return self.index(read_record(str(checkpoints / newest.path)))


def record_bytes(record: dict[str, Any], *lists: str) -> bytes:
    """Return a record as JSON, with a line for each entry (a named tuple) of the lists that are named."""
    text = json.dumps({**record, **{name: [] for name in lists}}, indent=1)
    for name in lists:
        rows = ",\n".join(f"  {json.dumps(row._asdict())}" for row in record[name])
        text = text.replace(f'"{name}": []', f'"{name}": [\n{rows}\n ]')
    return text.encode() + b"\n"
