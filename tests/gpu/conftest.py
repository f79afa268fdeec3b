"""Without Composer, only tests that need PyTorch and transformers alone are collected."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = (
    ["test_compute.py", "test_evaluation.py", "test_finetuning.py", "test_sharded.py"]
    if find_spec("composer") is None
    else []
)
