"""A run's record of its command and its data."""

import json
import shlex
from pathlib import Path
from unittest.mock import Mock

import pytest
from composer.core import Timestamp

from biphasic.config.conversion_checks import conversion_record
from biphasic.data.streams import read_conversions
from biphasic.data.tokenizer import load_tokenizer
from biphasic.objectives.objective import CLM, MLM
from biphasic.training.record import RunRecord
from conftest import Write
from helpers.tiny import LENGTH, config_of

OBJECTIVES = [CLM(until="1ba"), MLM()]


@pytest.mark.parametrize(("commit", "revision"), [("abc123", "abc123"), (None, "main")])
def test_the_commit_is_recorded_not_the_branch(write_yaml: Write, commit: str | None, revision: str) -> None:
    config = config_of(write_yaml())
    tokenizer = load_tokenizer(config.tokenizer)
    source = {"kind": "hub", "path": "org/set", "revision": "main"}
    record = {
        "tokenizer": {"sha256": tokenizer.sha256},
        "sequence_length": LENGTH,
        "config": {"source": source},
        "source": {"commit": commit},
        "splits": {"train": {"tokens": 5, "rows": 1, "documents": 2}},
    }
    local = config.data.streams["data.train"].local
    assert local is not None
    (Path(local).parent / "conversion.json").write_text(json.dumps(record))
    data = conversion_record(config, tokenizer, read_conversions(config.streams))
    assert data["source"] == {**source, "revision": revision}
    assert data["tokens"] == 5


def test_the_command_can_be_run_again(write_yaml: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["src/main.py", "run.yaml", "checkpoint.keep_at=[1ba, 2ba]"]
    monkeypatch.setattr("sys.argv", command)
    record = RunRecord("", OBJECTIVES, Mock(), {}).record
    assert shlex.split(record["command"]) == command


def test_the_losses_are_those_of_the_last_batch_s_objective() -> None:
    callback = RunRecord("", OBJECTIVES, Mock(), {})
    for number, phase in enumerate(("clm", "mlm")):
        before, after = (Timestamp(batch=number + add, token=number + add) for add in (0, 1))
        losses = {"loss/train/total": 2.0 - number, f"loss/train/{phase}": 2.0 - number}
        batch = {"step": [Mock(phase=number)]}
        state = Mock(batch=batch, previous_timestamp=before, timestamp=after, total_loss_dict=losses)
        callback.record["losses"]["metrics/mlm/loss"] = 3.0
        callback.batch_end(state, Mock())
    assert callback.record["losses"] == {"loss/train/total": 1.0, "loss/train/mlm": 1.0, "metrics/mlm/loss": 3.0}
