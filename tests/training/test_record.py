"""What a run records of its data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from biphasic.data.tokenizer import load_tokenizer
from biphasic.training.pretrain import conversion_record
from conftest import Write
from tiny import LENGTH, config_of


@pytest.mark.parametrize(("commit", "said"), [("abc123", "abc123"), (None, "main")])
def test_the_commit_that_was_read(write_yaml: Write, commit: str | None, said: str) -> None:
    """Not the branch that the YAML named, which has moved since."""
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
    found = conversion_record(config, tokenizer)
    assert found["source"] == {**source, "revision": said}
    assert found["tokens"] == 5
