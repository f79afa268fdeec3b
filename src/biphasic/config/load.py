"""From a YAML file and `key=value` overrides to a checked configuration, or to every error in it at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from biphasic.config.checks import problems_of
from biphasic.config.conversion import ConvertConfig
from biphasic.config.errors import ConfigError, Problem
from biphasic.config.evaluate import EvaluateConfig
from biphasic.config.finetune import FinetuneConfig
from biphasic.config.messages import translate
from biphasic.config.schema import PretrainConfig
from biphasic.config.sweep import SweepConfig
from biphasic.config.tasks import TasksConfig

Config = PretrainConfig | FinetuneConfig | EvaluateConfig | ConvertConfig | TasksConfig | SweepConfig
_ADAPTER: TypeAdapter[Config] = TypeAdapter(Annotated[Config, Field(discriminator="job")])
_JOBS: dict[str, type[BaseModel]] = {
    "pretrain": PretrainConfig,
    "finetune": FinetuneConfig,
    "evaluate": EvaluateConfig,
    "convert": ConvertConfig,
    "tasks": TasksConfig,
    "sweep": SweepConfig,
}
_COMMAND_LINE = "command line"


class _Tree:
    """The merged keys of all files and overrides, and where each was written."""

    def __init__(self, file: Path):
        self.file = file
        self.merged = DictConfig({})
        self.where: dict[str, str] = {}

    def source(self, key: str) -> str:
        """Where `key`, or the nearest key above it, was written."""
        while key and key not in self.where:
            key = key.rpartition(".")[0]
        return self.where.get(key, str(self.file))


def load(file: str | Path, overrides: list[str] | None = None, ranks: int = 1) -> Config:
    """Read a YAML with its `defaults:` and overrides, and check all of it.

    Args:
        file: path of the YAML. Its `defaults: other.yaml` (or a list) is read first, relative to the file.
        overrides: `key=value`, the value as YAML; `objective.phases.0.until=100ba` reaches into a list.
        ranks: processes that the run will have, for what must divide by them.

    Raises:
        ConfigError: with every unknown key, wrong type and impossible combination, each with its file and line.
    """
    tree = _Tree(Path(file))
    _read(Path(file), tree, ())
    for override in overrides or []:
        _override(override, tree)
    try:
        content = OmegaConf.to_container(tree.merged, resolve=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key or "")
        raise ConfigError([Problem(tree.source(key), key, str(error).splitlines()[0])]) from None
    assert isinstance(content, dict)
    problems, config = _validate(content, tree)
    broken = {problem.key for problem in problems}
    if problems:
        # What is left without the broken keys is checked too, so that one run names everything.
        for key in sorted(broken, key=len, reverse=True):
            _remove(content, key.split("."))
        more, config = _validate(content, tree)
        if more:
            raise ConfigError(sorted(problems))
    assert config is not None
    for keys, message in problems_of(config, ranks):
        if not any(_touches(key, other) for key in keys for other in broken):
            problems.append(Problem(tree.source(keys[0]), keys[0], message))
    if problems:
        raise ConfigError(sorted(problems))
    return config


def dump(config: BaseModel) -> str:
    """The whole configuration as YAML, defaults included; reading it again gives the same configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read(file: Path, tree: _Tree, above: tuple[Path, ...]) -> None:
    name = str(file)
    if file.resolve() in above:
        raise ConfigError([Problem(name, "defaults", "this file is among its own defaults")])
    try:
        text = file.read_text(encoding="utf-8")
        nodes = yaml.compose(text)
        content = OmegaConf.create(text) if nodes is not None else DictConfig({})
    except OSError as error:
        asked = f" (asked for by `defaults:` of {tree.file})" if above else ""
        raise ConfigError([Problem(name, "", f"can't be read: {error.strerror}{asked}")]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(name, "", f"is not UTF-8 text: {error.reason} at byte {error.start}")]) from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError([Problem(name + line, "", f"is not valid YAML: {what}")]) from None
    if not isinstance(content, DictConfig):
        raise ConfigError([Problem(name, "", "expected `key: value` lines at the top")])
    bases = content.pop("defaults", None)
    for base in [] if bases is None else [bases] if isinstance(bases, str) else list(bases):
        _read(file.parent / str(base), tree, (*above, file.resolve()))
    try:
        merged = OmegaConf.merge(tree.merged, content)
    except OmegaConfBaseException as error:
        raise ConfigError([Problem(name, str(error.full_key or ""), str(error).splitlines()[0])]) from None
    assert isinstance(merged, DictConfig)
    tree.merged = merged
    if nodes is not None:
        _record(nodes, "", name, tree)


def _record(node: yaml.Node, key: str, name: str, tree: _Tree) -> None:
    """Remember the line of every key below `node`."""
    if isinstance(node, yaml.MappingNode):
        children = [(str(child.value), child, value) for child, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        # A list replaces the list of the file below it, so nothing of that one is left.
        tree.where = {k: v for k, v in tree.where.items() if not k.startswith(f"{key}.")}
        children = [(str(index), value, value) for index, value in enumerate(node.value)]
    else:
        return
    for part, marked, value in children:
        full = f"{key}.{part}" if key else part
        tree.where[full] = f"{name}:{marked.start_mark.line + 1}"
        _record(value, full, name, tree)


def _override(text: str, tree: _Tree) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError([Problem(_COMMAND_LINE, text, "expected key=value, such as optimizer.lr=1e-4")])
    try:
        OmegaConf.update(tree.merged, key, OmegaConf.from_dotlist([f"value={value}"])["value"], force_add=True)
    except (OmegaConfBaseException, yaml.YAMLError, ValueError, TypeError, IndexError) as error:
        raise ConfigError([Problem(_COMMAND_LINE, key, str(error).splitlines()[0])]) from None
    tree.where = {k: v for k, v in tree.where.items() if not k.startswith(f"{key}.")}
    tree.where[key] = _COMMAND_LINE


def _validate(content: dict[Any, Any], tree: _Tree) -> tuple[list[Problem], Config | None]:
    if "job" not in content:
        return [Problem(str(tree.file), "job", f"is missing; expected one of {', '.join(_JOBS)}")], None
    try:
        return [], _ADAPTER.validate_python(content)
    except ValidationError as error:
        return translate(error, _JOBS.get(str(content["job"])), content, tree.source), None


def _remove(content: Any, keys: list[str]) -> None:
    for key in keys[:-1]:
        content = content[int(key)] if isinstance(content, list) else content.get(key)
        if not isinstance(content, dict | list):
            return
    if isinstance(content, dict):
        content.pop(keys[-1], None)
    elif keys[-1].isdigit() and int(keys[-1]) < len(content):
        content.pop(int(keys[-1]))


def _touches(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")
