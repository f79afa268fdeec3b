"""When a run validates and saves, and that its last checkpoint has the losses of its last validation."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from composer.core import State, Timestamp

from biphasic.checkpointing.save import interval_schedule
from biphasic.config.plan import saved_checkpoints
from biphasic.model.checkpoint import read_record
from biphasic.training.metrics_file import read_metrics
from conftest import Write
from helpers.tiny import config_of, train, write_rows

KEYS = [f"metrics/{label}/loss" for label in ("clm", "mlm")]


def validations(folder: Path) -> dict[int, list[float]]:
    """The validation losses by batch. A batch that is validated twice has two entries in the file and is refused."""
    entries = [entry for entry in read_metrics(folder / "metrics.jsonl") if KEYS[0] in entry]
    assert len({entry["batch"] for entry in entries}) == len(entries)
    return {entry["batch"]: [entry[key] for key in KEYS] for entry in entries}


@pytest.mark.parametrize(
    ("length", "interval", "batches"),
    [
        ("12ba", "5ba", [5, 10, 12]),
        ("12ba", "4ba", [4, 8, 12]),
        ("12ba", "0.3dur", [4, 8, 12]),
        ("12ba", None, [12]),
        ("4ep", "1ep", [3, 6, 9, 12]),
        ("4ep", "3ep", [9, 12]),
        ("96sp", "50sp", [7, 12]),
    ],
)
def test_the_last_checkpoint_has_the_last_validation(
    write_yaml: Write, tmp_path: Path, length: str, interval: str | None, batches: list[int]
) -> None:
    """Three batches are an epoch. The checkpoint after the last batch is also due by its interval."""
    validation = tmp_path / "data" / "validation"
    changes: dict[str, Any] = {"evaluation__interval": interval} if interval else {}
    path = write_yaml("validated", max_duration=length, schedule={}, data__validation={"local": str(validation)}, **changes)
    for split in ("train", "validation"):
        for file in (tmp_path / "data" / split).iterdir():
            file.unlink()
    write_rows(tmp_path / "data" / "train", 40, seed=1)
    write_rows(validation, 20, seed=2)
    folder = train(config_of(path))
    losses = validations(folder)
    assert list(losses) == batches
    record = read_record(str(folder / "checkpoints" / "ba12-rank0.pt"))
    assert [record["losses"][key] for key in KEYS] == losses[12]


@pytest.mark.parametrize("interval", ["7ba", "0.07dur", "0.3dur", "0.001dur", "60sp", "1000tok", "5sp"])
def test_a_run_saves_when_the_plan_says(write_yaml: Write, interval: str) -> None:
    """0.07 * 100 is 7.000000000000001. A batch has 8 rows and 256 tokens: multiples of 60 rows lie within batches."""
    keys: dict[str, Any] = {"schedule": {}, "objective__phases": [{"name": "clm"}]}
    config = config_of(write_yaml(max_duration="100ba", checkpoint__interval=interval, **keys))
    is_due = interval_schedule(config.checkpoint.interval, config.max_duration)
    times = [Timestamp(batch=batch, sample=8 * batch, token=256 * batch) for batch in range(101)]
    loader = SimpleNamespace(ended_epochs=lambda batches: 0)

    def is_saved(batch: int) -> bool:
        state = SimpleNamespace(previous_timestamp=times[batch - 1], timestamp=times[batch], train_dataloader=loader)
        return is_due(cast(State, state))

    saved = list(filter(is_saved, range(1, 101)))
    assert saved == saved_checkpoints(config)[0]
    assert saved_checkpoints(config, start=30)[0] == [batch for batch in saved if batch > 30]
