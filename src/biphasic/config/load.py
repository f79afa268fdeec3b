"""Read a YAML file and `key=value` overrides into a checked configuration, or report every error at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from biphasic.config.base import secret_problems
from biphasic.config.convert import ConvertConfig
from biphasic.config.evaluate import EvaluateConfig
from biphasic.config.finetune import FinetuneConfig
from biphasic.config.messages import translate
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.sweep import SweepConfig
from biphasic.config.tasks import TasksConfig
from biphasic.errors import ConfigError, Problem

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
_MAX_DEPTH = 50
"""Levels of nesting that are read. Schemas have about six; the libraries read nested values recursively."""
# Errors of YAML's constructors (`!!int x`, a number of 5,000 digits), of OmegaConf and of values that contain themselves.
_READ_ERRORS = (
    yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, LookupError, AttributeError, RecursionError
)  # fmt: skip


class _Tree:
    """The merged keys of all files and overrides, and where each was written."""

    def __init__(self, file: Path):
        self.file = file
        self.merged = DictConfig({})
        self.where: dict[str, str] = {}

    def source(self, key: str) -> str:
        """Return where `key`, or the nearest key above it, was written."""
        while key and key not in self.where:
            key = key.rpartition(".")[0]
        return self.where.get(key, str(self.file))


def load(file: str | Path, overrides: list[str] | None = None, ranks: int = 1) -> Config:
    """Read a YAML with its `defaults:` and overrides, and check it.

    Args:
        file: path of the YAML. Its `defaults: other.yaml` (or a list) is read first, relative to the file.
        overrides: `key=value`, the value as YAML; `objective.phases.0.until=100ba` changes an element of a list.
        ranks: processes of the run, for the values that must be divisible by their number.

    Raises:
        ConfigError: with every unknown key, wrong type and impossible combination, each with its file and line.
    """
    tree = _Tree(Path(file))
    _read(Path(file), tree, ())
    for override in overrides or []:
        _override(override, tree)
    with _errors_reported(tree.source):
        content = OmegaConf.to_container(tree.merged, resolve=True)
    assert isinstance(content, dict)
    problems, config = _validate(content, tree)
    broken = {problem.key for problem in problems}
    if problems:
        # The other keys are checked without the broken ones, so that one call reports everything.
        for key in sorted(broken, key=len, reverse=True):
            _remove(content, key.split("."))
        more, config = _validate(content, tree)
        if more:
            raise ConfigError(sorted(problems))
    assert config is not None
    for keys, message in [*secret_problems(config), *config.problems(ranks)]:
        if not any(_overlap(key, other) for key in keys for other in broken):
            problems.append(Problem(tree.source(keys[0]), keys[0], message))
    if problems:
        raise ConfigError(sorted(problems))
    return config


def dump(config: BaseModel) -> str:
    """Return the complete configuration as YAML, defaults included. Loading it gives the same configuration."""
    return OmegaConf.to_yaml(OmegaConf.create(_escape_interpolations(config.model_dump(mode="json"))))


def _escape_interpolations(value: Any) -> Any:
    """Escape `${` in texts, which OmegaConf would resolve when it reads them."""
    if isinstance(value, dict):
        return {key: _escape_interpolations(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_escape_interpolations(child) for child in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _read(file: Path, tree: _Tree, including: tuple[Path, ...]) -> None:
    name = str(file)
    try:
        if file.resolve() in including:
            raise _config_error(name, "defaults", "this file is among its own defaults")
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _config_error(name, "", f"is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except (OSError, ValueError) as error:
        user = f" (named in `defaults:` of {tree.file})" if including else ""
        raise _config_error(name, "", f"can't be read: {getattr(error, 'strerror', None) or error}{user}") from None
    nodes, content = _parse(text, name)
    with _errors_reported(lambda _: name, "defaults"):
        value = content.pop("defaults", None)
        names = [] if value is None else [value] if isinstance(value, str) else list(value)
    if isinstance(value, DictConfig) or not all(isinstance(base, str) for base in names):
        raise _config_error(name, "defaults", f"expected the path of a YAML or a list of paths; got {value!r}")
    for base in names:
        _read(file.parent / base, tree, (*including, file.resolve()))
    with _errors_reported(lambda _: name):
        merged = OmegaConf.merge(tree.merged, content)
    assert isinstance(merged, DictConfig)
    tree.merged = merged
    if nodes is not None:
        _record(nodes, "", name, tree)


def _parse(text: str, name: str) -> tuple[yaml.Node | None, DictConfig]:
    try:
        _require_shallow(text, name)
        nodes = yaml.compose(text)
        if nodes is not None and not isinstance(nodes, yaml.MappingNode):
            raise _config_error(name, "", "expected `key: value` lines at the top")
        content = OmegaConf.create(text) if nodes is not None else DictConfig({})
    except _READ_ERRORS as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise _config_error(name + line, "", f"is not valid YAML: {_summary(error)}") from None
    assert isinstance(content, DictConfig)
    return nodes, content


def _require_shallow(text: str, name: str) -> None:
    depth = 0
    for event in yaml.parse(text):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise _config_error(
                f"{name}:{event.start_mark.line + 1}", "", f"is nested in more than {_MAX_DEPTH} levels"
            )


def _record(node: yaml.Node, key: str, name: str, tree: _Tree) -> None:
    """Record the line of every key below `node`."""
    if isinstance(node, yaml.MappingNode):
        children = [(str(child.value), child, value) for child, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        # A list replaces the list of the file below it.
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
        raise _config_error(_COMMAND_LINE, text, "expected key=value, such as optimizer.lr=1e-4")
    with _errors_reported(lambda _: _COMMAND_LINE, key):
        _require_shallow(value, _COMMAND_LINE)
        OmegaConf.update(tree.merged, key, OmegaConf.from_dotlist([f"value={value}"])["value"], force_add=True)
    tree.where = {k: v for k, v in tree.where.items() if not k.startswith(f"{key}.")}
    tree.where[key] = _COMMAND_LINE


def _config_error(where: str, key: str, message: str) -> ConfigError:
    return ConfigError([Problem(where, key, message)])


@contextmanager
def _errors_reported(source: Callable[[str], str], key: str = "") -> Iterator[None]:
    """Report an error of the YAML libraries as one of `key`, or of the key that the error names."""
    try:
        yield
    except _READ_ERRORS as error:
        key = key or str(getattr(error, "full_key", None) or "")
        raise _config_error(source(key), key, _summary(error)) from None


def _summary(error: BaseException) -> str:
    """Return the first line of an error of the YAML libraries."""
    text = (
        "a value contains itself"
        if isinstance(error, RecursionError)
        else getattr(error, "problem", None) or str(error)
    )
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__


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


def _overlap(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")
