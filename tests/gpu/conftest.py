"""Tests whose packages aren't installed are not collected. The others need PyTorch and transformers alone."""

from __future__ import annotations

from importlib.util import find_spec

_NEEDED = {
    "test_compute.py": ("composer",),
    "test_sharded.py": ("composer",),
    "test_evaluation.py": ("composer", "datasets", "mteb"),
    "test_finetuning.py": ("composer", "datasets", "seqeval"),
}
collect_ignore = [name for name, packages in _NEEDED.items() if not all(map(find_spec, packages))]
