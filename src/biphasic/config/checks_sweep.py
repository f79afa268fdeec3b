"""Checks of sweeps."""

from __future__ import annotations

import re
from posixpath import normpath

from biphasic.config.base import Found
from biphasic.config.sweep import SweepConfig
from biphasic.storage import is_remote

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OURS = ("job", "run_name", "seed", "model", "optimizer.lr", "save_model")
"""Keys of a fine-tuning that the grid decides."""


def sweep_problems(config: SweepConfig) -> Found:
    """What can't be in a sweep; its tasks' own YAMLs are read when its grid is made (`biphasic.sweep.grid`)."""
    for section, names in (("models", config.models), ("tasks", config.tasks)):
        for name in names:
            if not _NAME.fullmatch(name):
                yield [f"{section}.{name}"], "expected a name of letters, digits, `.`, `_` and `-`"
    known: dict[tuple[str, str | None], str] = {}
    for name, model in config.models.items():
        first = known.setdefault((_place(model.path), model.revision), name)
        if first != name:
            yield [f"models.{name}.path", f"models.{first}.path"], f"expected another model than that of models.{first}"
    files: dict[str, str] = {}
    for name, file in config.tasks.items():
        first = files.setdefault(normpath(file), name)
        if first != name:
            yield [f"tasks.{name}", f"tasks.{first}"], f"expected another file than tasks.{first}"
    for key, values in (("learning_rates", config.learning_rates), ("seeds", config.seeds)):
        for number, value in enumerate(values):
            if value in values[:number]:
                yield [f"{key}.{number}", key], f"{value:g} is there already; each trial is run once"
    for number, override in enumerate(config.overrides):
        key, equals, _ = override.partition("=")
        ours = [name for name in _OURS if f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.")]
        if not equals or not key:
            yield [f"overrides.{number}"], f"expected key=value, such as batch_size=64; got {override!r}"
        elif ours:
            yield [f"overrides.{number}"], f"expected a key that the sweep doesn't give itself; it gives {ours[0]}"
    if config.halving is not None:
        for key, values in (("learning_rates", config.learning_rates), ("seeds", config.seeds)):
            if len(values) < 2:
                yield ["halving", key], f"has no effect with one value in {key}"
                break
    if config.cluster.shared_folder and config.cluster.address is None:
        yield ["cluster.shared_folder", "cluster.address"], "has no effect on one machine: cluster.address is null"
    if config.cost is not None and config.cost.dollars_per_hour is None and config.cost.flops_per_second is None:
        yield ["cost"], "says nothing; expected dollars_per_hour, flops_per_second, or both"


def _place(path: str) -> str:
    return path if is_remote(path) else normpath(path)
