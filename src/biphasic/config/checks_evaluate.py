"""Checks of evaluations."""

from __future__ import annotations

from pathlib import PurePath

from biphasic.config.base import Found
from biphasic.config.evaluate import EvaluateConfig


def evaluate_problems(config: EvaluateConfig) -> Found:
    """What can't be in an evaluation."""
    if not (config.tasks or config.benchmarks or config.sets):
        yield ["tasks"], "is empty, and so are benchmarks and sets: nothing would be scored"
    for key in ("tasks", "benchmarks", "sets", "documents", "baselines"):
        values: list[str] = getattr(config, key)
        if twice := sorted({value for value in values if values.count(value) > 1}):
            yield [key], f"names {twice[0]} twice"
    names = [set_name(path) for path in config.sets]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield ["sets"], f"has two folders with the same name, {twice[0]}: results are kept by it"
    for key in ("subsets", "splits"):
        for name in getattr(config, key):
            if not config.benchmarks and name not in (*config.tasks, *names):
                yield [f"{key}.{name}"], "expected a name from tasks, benchmarks or sets"


def set_name(path: str) -> str:
    """The name of a person's own set: its folder's."""
    return PurePath(path.rstrip("/")).name
