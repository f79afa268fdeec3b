"""A run's record of its command and its data."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from unittest.mock import Mock

import pytest

from biphasic.data.tokenizer import load_tokenizer
from biphasic.training.record import RunRecord, conversion_record
from conftest import Write
from helpers.tiny import LENGTH, config_of


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
    data = conversion_record(config, tokenizer)
    assert data["source"] == {**source, "revision": revision}
    assert data["tokens"] == 5


def test_the_command_can_be_run_again(write_yaml: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["src/main.py", "run.yaml", "checkpoint.keep_at=[1ba, 2ba]"]
    monkeypatch.setattr("sys.argv", command)
    record = RunRecord(config_of(write_yaml()), Mock(), {}).record
    assert shlex.split(record["command"]) == command
