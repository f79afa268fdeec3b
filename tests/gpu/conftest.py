"""Tests whose packages aren't installed are not collected. The others need PyTorch and transformers alone."""

from importlib.util import find_spec

_RUN = ("composer", "streaming", "omegaconf", "pydantic")
_NEEDED = {
    "test_compute.py": _RUN,
    "test_sharded.py": _RUN,
    # mteb may have been installed without what it imports.
    "test_evaluation.py": (*_RUN, "datasets", "mteb", "polars", "pytrec_eval", "sklearn"),
    "test_finetuning.py": (*_RUN, "datasets", "seqeval"),
}
collect_ignore = [name for name, packages in _NEEDED.items() if not all(map(find_spec, packages))]
