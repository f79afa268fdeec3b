"""Numbers that are no numbers, and losses that jump."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.core import Callback, State
from composer.loggers import Logger

from biphasic.config.errors import UserError
from biphasic.training import pretrain
from biphasic.training.jsonl_logger import read_metrics
from conftest import Write
from tiny import ROOT, config_of, losses, train, weights


class Spoil(Callback):
    """Makes gradients of some batches no numbers, or losses large."""

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
    before = pretrain.callbacks

    def spoil(batches: set[int], value: float, loss: bool = False) -> None:
        monkeypatch.setattr(pretrain, "callbacks", lambda *given: [*before(*given), Spoil(batches, value, loss)])

    return spoil


def noted(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "odd_batches.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("value", "loss"), [(float("nan"), False), (float("inf"), False), (float("nan"), True)])
def test_the_run_stops_before_the_weights_change(write_yaml: Write, spoil: Any, value: float, loss: bool) -> None:
    whole = train(config_of(write_yaml("whole")))
    spoil({7}, value, loss)
    path = write_yaml("spoiled")
    what = "loss" if loss else "gradient's norm"
    with pytest.raises(UserError, match=rf"^batch 7: the {what} is not a finite number; the weights are as they were"):
        train(config_of(path))
    folder = Path(config_of(path).output) / "spoiled"
    [line] = noted(folder)
    assert line["batch"] == 7 and line["what"] == "not finite" and len(line["rows"]) == 8
    # Its newest checkpoint is the one before, and from there the run is as if nothing had been.
    spoil(set(), 0.0)
    train(config_of(path))
    assert losses(folder) == losses(whole)


def test_a_batch_is_left_out(write_yaml: Write, spoil: Any) -> None:
    spoil({3, 9}, float("inf"))
    path = write_yaml("skips", optimizer__skip_nonfinite=2)
    folder = train(config_of(path))
    entries = read_metrics(folder / "metrics.jsonl")
    assert len(entries) == 12
    assert [entry["optimizer/skipped_batches"] for entry in entries] == [0, 0, 0, 0, *[1] * 6, 2, 2]
    before, after = weights(folder, 3), weights(folder, 4)
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    assert not all(torch.equal(weight, after[name]) for name, weight in weights(folder, 5).items())
    # The count goes on over a restart.
    spoil({3, 9}, float("inf"))
    with pytest.raises(UserError, match=r"^batch 9: .* not a finite number \(1 were left out before\)"):
        train(config_of(write_yaml("once", optimizer__skip_nonfinite=1)))


def test_a_spike_is_noted_with_its_rows(write_yaml: Write, spoil: Any) -> None:
    spoil({30}, 4.0, loss=True)
    path = write_yaml("spike", max_duration="40ba", objective__phases=[{"name": "clm"}], checkpoint__interval="50ba")
    folder = train(config_of(path))
    [line] = noted(folder)
    assert line["what"] == "spike" and line["batch"] == 30
    assert line["loss"] > 1.5 * line["median"]
    assert len(set(line["rows"])) == 8
    command = [sys.executable, str(ROOT / "data_prep" / "show.py"), str(path), *map(str, line["rows"])]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("=== row ") == 8 and all(f"=== row {row}: " in shown.stdout for row in line["rows"])
    assert "--- segment 1: " in shown.stdout and "<|eos|>" in shown.stdout
    beyond = subprocess.run([*command, "99999"], capture_output=True, text=True)
    assert beyond.returncode == 2 and beyond.stderr.startswith("row 99999: expected an id from 0 to ")
    assert [entry["batch"] for entry in read_metrics(folder / "metrics.jsonl") if "loss/spike" in entry] == [31]


def test_a_switch_is_no_spike(write_yaml: Write) -> None:
    path = write_yaml("switch", max_duration="60ba", logging__loss_spike=1.01, optimizer__lr=1e-5,
                      objective__phases=[{"name": "clm", "until": "30ba"}, {"name": "mlm"}])  # fmt: skip
    folder = train(config_of(path))
    file = folder / "odd_batches.jsonl"
    assert not file.exists() or all(line["batch"] not in range(30, 50) for line in noted(folder))
