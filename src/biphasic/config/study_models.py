"""Expand a study into a checked pretraining configuration for each model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from biphasic.config.base import Section, flatten, within
from biphasic.config.check import check
from biphasic.config.durations import Duration
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.read import KeyTree, escape_interpolations, read_tree
from biphasic.config.study import CONTINUES, StudyConfig
from biphasic.errors import ConfigError, Problem


def expand(study: StudyConfig, written: KeyTree | None = None, ranks: int = 1) -> dict[str, PretrainConfig]:
    """Return the configuration of each model's run, without the run that it starts from.

    `study` must be checked. `written` says where its keys were written. Raises a ConfigError with the problems of all
    models; their keys begin with `models.NAME`, unless `base` causes the problem in every model.
    """
    written = written or KeyTree(Path("study"))
    base = _base(study, written)
    configs: dict[str, PretrainConfig] = {}
    problems: dict[str, list[Problem]] = {}
    for name in study.models:
        try:
            configs[name] = _expand(study, name, base, written, ranks)
        except ConfigError as error:
            problems[name] = error.problems
    if problems:
        raise ConfigError(list(_named(problems, study, written)))
    return configs


def overrides_of(study: StudyConfig, config: PretrainConfig) -> list[str]:
    """Return the `key=value` pairs, without spaces, that turn the study's base file into a model's configuration."""
    assert study.base_file is not None
    # The base file may interpolate these two keys.
    own = [f"{key}={json.dumps(value)}" for key, value in (("run_name", config.run_name), ("output", config.output))]
    differences = _differences(config, read_tree(study.base_file, own).content(), "")
    return [*own, *(f"{key}={json.dumps(value, separators=(',', ':'))}" for key, value in differences)]


def _differences(section: Section, base: Any, above: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys whose value in `section` differs from that in the YAML section `base`, or from the default."""
    values = section.model_dump(mode="json")
    for name in type(section).model_fields:
        key, value = f"{above}{name}", getattr(section, name)
        given = isinstance(base, dict) and name in base
        if isinstance(value, Section):
            yield from _differences(value, base[name] if given else None, f"{key}.")
        elif values[name] != base[name] if given else not section.is_default(name):
            yield key, values[name]


def _base(study: StudyConfig, written: KeyTree) -> KeyTree:
    if study.base_file is None:
        tree = KeyTree(written.file)
        tree.update("job", "pretrain", {})
    else:
        tree = read_tree(study.base_file, [])
    _apply(study.base_keys, "base", tree, written)
    return tree


def _expand(study: StudyConfig, name: str, base: KeyTree, written: KeyTree, ranks: int) -> PretrainConfig:
    tree, place = deepcopy(base), written.source(f"models.{name}")
    continued = study.continues.get(name)
    if continued is not None:
        tree.merged.pop("model", None)
        tree.update("model.init_from", study.checkpoints_of(continued), {"model": place})
    keys = {key: value for key, value in study.models[name].items() if key != CONTINUES}
    _apply(keys, f"models.{name}", tree, written)
    own = {"run_name": name, "output": study.local_folder, "checkpoint.folder": study.checkpoints_of(name)}
    for key, value in own.items():
        tree.update(key, escape_interpolations(value), {key: place})
    config = check(tree.content(), ("pretrain",), tree.source, ranks)
    assert isinstance(config, PretrainConfig)
    expected = "expected batches, rows or tokens, so that runs can be compared"
    problems = [
        Problem(tree.source(key), key, f"{expected}; got {time}")
        for key, time in flatten(config)
        if isinstance(time, Duration) and time.unit == "ep" and not within(key, "evaluation")
    ]
    if problems:
        raise ConfigError(problems)
    return config


def _apply(keys: Mapping[str, Any], prefix: str, tree: KeyTree, written: KeyTree) -> None:
    """Merge dotted or nested keys into `tree`. `prefix` is their key in the study."""
    for key, value in keys.items():
        above = f"{prefix}.{key}"
        below = {k.removeprefix(f"{prefix}."): at for k, at in written.where.items() if within(k, above)}
        tree.update(key, escape_interpolations(value), {key: written.source(above), **below})


def _named(problems: dict[str, list[Problem]], study: StudyConfig, written: KeyTree) -> dict[Problem, None]:
    """Prefix all problems' keys with their model's name, except problems of the base, which are reported once."""
    everywhere = set.intersection(*(set(problems.get(name, [])) for name in study.models))
    in_base = set(_places("base", written))
    named: dict[Problem, None] = {}
    for name, model_problems in problems.items():
        in_model = set(_places(f"models.{name}", written))
        for problem in model_problems:
            prefix = f"models.{name}."
            if problem in everywhere and problem.where not in in_model:
                prefix = "base." if problem.where in in_base else ""
            named[replace(problem, key=f"{prefix}{problem.key}")] = None
    return named


def _places(section: str, written: KeyTree) -> list[str]:
    return [at for key, at in written.where.items() if within(key, section)]
