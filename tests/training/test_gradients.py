"""NaN and Inf in loss and gradient, and loss spikes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.core import Callback, State
from composer.loggers import Logger

from biphasic.commands import main
from biphasic.errors import UserError
from biphasic.training import anomalies
from biphasic.training.metrics_file import read_metrics
from conftest import Write
from helpers.tiny import add_callback, config_of, losses, train, weights


class Spoil(Callback):
    """Replaces a gradient of some batches by a value, or multiplies their loss by it."""

    def __init__(self, batches: set[int], value: float, loss: bool):
        self.batches, self.value, self.loss = batches, value, loss

    def before_loss(self, state: State, logger: Logger) -> None:
        if self.loss and int(state.timestamp.batch) in self.batches:
            total, count = state.outputs
            state.outputs = (total * self.value, count)

    def after_backward(self, state: State, logger: Logger) -> None:
        if not self.loss and int(state.timestamp.batch) in self.batches:
            next(state.model.parameters()).grad[0, 0] = self.value


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Any:
    def spoil(batches: set[int], value: float, loss: bool = False) -> None:
        monkeypatch.undo()
        add_callback(Spoil(batches, value, loss), monkeypatch.setattr)

    return spoil


def anomalous_batches(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "anomalous_batches.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("value", "loss"), [(float("nan"), False), (float("inf"), False), (float("nan"), True)])
def test_the_run_stops_before_the_weights_change(
    write_yaml: Write, spoil: Any, value: float, loss: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    uninterrupted = train(config_of(write_yaml("uninterrupted")))
    spoil({7}, value, loss)
    path = write_yaml("spoiled")
    quantity = "loss" if loss else "gradient's norm"
    with pytest.raises(
        UserError, match=rf"^batch 7: the {quantity} is not a finite number; the batch didn't change the weights"
    ) as error:
        train(config_of(path))
    folder = Path(config_of(path).output) / "spoiled"
    [line] = anomalous_batches(folder)
    assert line["batch"] == 7 and line["anomaly"] == "not finite" and len(line["rows"]) == 8
    # The message names the run's own YAML, which has its overrides.
    command = re.search(r"`biphasic (show .+?)`", str(error.value))
    assert command is not None and f"{folder}/config.yaml" in command[1]
    capsys.readouterr()
    assert main(command[1].split()) == 0
    assert capsys.readouterr().out.startswith(f"=== row {line['rows'][0]}: ")
    # It resumes from the checkpoint before that batch.
    spoil(set(), 0.0)
    train(config_of(path))
    assert losses(folder) == losses(uninterrupted)


def test_a_batch_is_skipped(write_yaml: Write, spoil: Any) -> None:
    spoil({3, 9}, float("inf"))
    path = write_yaml("skips", optimizer__max_skipped_batches=2)
    folder = train(config_of(path))
    entries = read_metrics(folder / "metrics.jsonl")
    assert len(entries) == 12
    assert [entry["optimizer/skipped_batches"] for entry in entries] == [0, 0, 0, *[1] * 6, 2, 2, 2]
    before, after = weights(folder, 3), weights(folder, 4)
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    assert not all(torch.equal(weight, after[name]) for name, weight in weights(folder, 5).items())
    spoil({3, 9}, float("inf"))
    with pytest.raises(UserError, match=r"^batch 9: .* not a finite number \(1 skipped before\)"):
        train(config_of(write_yaml("once", optimizer__max_skipped_batches=1)))


def test_a_spike_is_logged_with_its_rows(write_yaml: Write, spoil: Any, capsys: pytest.CaptureFixture[str]) -> None:
    spoil({30}, 4.0, loss=True)
    path = write_yaml("spike", max_duration="40ba", objective__phases=[{"name": "clm"}], checkpoint__interval="50ba")
    folder = train(config_of(path))
    [line] = anomalous_batches(folder)
    assert line["anomaly"] == "spike" and line["batch"] == 30
    assert line["loss"] > 1.5 * line["median"]
    assert len(set(line["rows"])) == 8
    capsys.readouterr()
    assert main(["show", str(path), *map(str, line["rows"])]) == 0
    text = capsys.readouterr().out
    assert text.count("=== row ") == 8 and all(f"=== row {row}: " in text for row in line["rows"])
    assert "--- segment 1: " in text and "<|eos|>" in text
    assert main(["show", str(path), "99999"]) == 2
    assert capsys.readouterr().err.startswith("row 99999: expected an id from 0 to ")
    assert [entry["batch"] for entry in read_metrics(folder / "metrics.jsonl") if "loss/spike" in entry] == [31]


def test_a_switch_is_not_a_spike(write_yaml: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anomalies, "_THRESHOLD", 1.01)
    path = write_yaml("switch", max_duration="60ba", optimizer__lr=1e-5,
                      objective__phases=[{"name": "clm", "until": "30ba"}, {"name": "mlm"}])  # fmt: skip
    folder = train(config_of(path))
    file = folder / "anomalous_batches.jsonl"
    assert not file.exists() or all(line["batch"] not in range(30, 50) for line in anomalous_batches(folder))
