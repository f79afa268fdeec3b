"""The record of a checkpoint, which model cards are made of."""

import json
from typing import Any

import pytest

from biphasic.config.load import dump
from biphasic.objectives.objective import CLM, MLM
from conftest import Write
from helpers.tiny import config_of

CLM_WORDS, MLM_WORDS = ({"name": kind.name, "words": kind.words, "causal": kind.causal} for kind in (CLM, MLM))


@pytest.fixture
def record(write_yaml: Write) -> dict[str, Any]:
    source = {
        "kind": "hub",
        "path": "HuggingFaceFW/fineweb-edu",
        "name": "sample-100BT",
        "revision": "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9",
    }
    return {
        "config": dump(config_of(write_yaml())),
        "backbone": json.dumps({"model_type": "qwen3"}),
        "command": "main.py run.yaml",
        "versions": {"torch": "2.7.0"},
        "hardware": "NVIDIA H100",
        "ranks": 8,
        "batches": 12,
        "rows": 96,
        "tokens": 3072,
        "epochs": 0,
        "seconds": 5400.0,
        "phases": [{**CLM_WORDS, "batches": 6, "tokens": 1536}, {**MLM_WORDS, "batches": 6, "tokens": 1536}],
        "losses": {"loss/train/mlm": 2.5},
        "data": {"source": source, "tokens": 100, "rows": 4, "tokenizer_sha256": "ab"},
    }
