"""Read YAML files with their `defaults:` and overrides, and record where each key was written."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from biphasic.errors import ConfigError, Problem

_COMMAND_LINE = "command line"
_MAX_DEPTH = 50
"""Levels of nesting that are read. Schemas have about six; the libraries read nested values recursively."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's parser if PyYAML has it, as in OmegaConf
# Errors of YAML's constructors (`!!int x`, a number of 5,000 digits), of OmegaConf and of values that contain themselves.
_READ_ERRORS = (
    yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, LookupError, AttributeError, RecursionError
)  # fmt: skip


class KeyTree:
    """The merged keys of all files and overrides, and where each was written (`where`, by dotted key)."""

    def __init__(self, file: Path):
        self.file = file
        self.merged = DictConfig({})
        self.where: dict[str, str] = {}

    def source(self, key: str) -> str:
        """Return where `key`, or the nearest key above it, was written."""
        while key and key not in self.where:
            key = key.rpartition(".")[0]
        return self.where.get(key, str(self.file))

    def content(self) -> dict[Any, Any]:
        """Return all keys and values, with interpolations resolved.

        Raises:
            ConfigError: an interpolation can't be resolved.
        """
        with _errors_reported(self.source):
            content = OmegaConf.to_container(self.merged, resolve=True)
        assert isinstance(content, dict)
        return content

    def merge(self, content: DictConfig) -> None:
        """Merge a file's keys. Sections merge, except those whose kind differs; a list replaces a list."""
        self._drop_replaced("", OmegaConf.to_container(content, resolve=False))
        merged = OmegaConf.merge(self.merged, content)
        assert isinstance(merged, DictConfig)
        self.merged = merged

    def update(self, key: str, value: Any, where: Mapping[str, str]) -> None:
        """Merge `value` into a dotted key. `where` is the place of the key and of keys below it."""
        with _errors_reported(lambda _: where.get(key, str(self.file)), key):
            plain = OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value
            section, _, name = key.rpartition(".")
            if section and name == _kind_key(section):
                # The section is replaced, except its other keys on the command line: their order does not matter.
                self._drop_replaced(section, {name: plain}, keep=_COMMAND_LINE)
            self._drop_replaced(key, plain)
            OmegaConf.update(self.merged, key, value, force_add=True)
        if not isinstance(value, Mapping):
            self.forget_below(key)
        self.where.update(where)

    def copy(self) -> KeyTree:
        """Return a copy that can be changed."""
        tree = KeyTree(self.file)
        tree.merged, tree.where = self.merged.copy(), dict(self.where)
        return tree

    def _drop_replaced(self, key: str, value: Any, keep: str = "") -> None:
        """Remove the keys of each section whose kind differs in `value`, which will be merged into `key`.

        Keys that were written at `keep` stay.
        """
        if not isinstance(value, dict):
            return
        section = OmegaConf.select(self.merged, key, throw_on_resolution_failure=False) if key else self.merged
        if not isinstance(section, DictConfig):
            return
        kind_key = _kind_key(key)
        if isinstance(value.get(kind_key), str):
            old = OmegaConf.to_container(section, resolve=False)
            assert isinstance(old, dict)
            if isinstance(old.get(kind_key), str) and old[kind_key] != value[kind_key]:
                for name in [name for name in old if not keep or self.source(f"{key}.{name}") != keep]:
                    section.pop(name)
                    self.where.pop(f"{key}.{name}", None)
                    self.forget_below(f"{key}.{name}")
                return
        for name, child in value.items():
            self._drop_replaced(f"{key}.{name}" if key else str(name), child)

    def forget_below(self, key: str) -> None:
        """Forget where the keys below `key` were written."""
        self.where = {k: v for k, v in self.where.items() if not k.startswith(f"{key}.")}


def read_tree(file: str | Path, overrides: list[str]) -> KeyTree:
    """Read a YAML with its `defaults:`, and apply `key=value` overrides.

    Raises:
        ConfigError: a file can't be read or is not valid YAML, or an override is not `key=value`.
    """
    tree = KeyTree(Path(file))
    _read(Path(file), tree, ())
    for override in overrides:
        _override(override, tree)
    return tree


def escape_interpolations(value: Any) -> Any:
    """Escape `${` in texts, which OmegaConf would resolve when it reads them."""
    if isinstance(value, dict):
        return {key: escape_interpolations(child) for key, child in value.items()}
    if isinstance(value, list):
        return [escape_interpolations(child) for child in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _read(file: Path, tree: KeyTree, including: tuple[Path, ...]) -> None:
    name = str(file)
    try:
        if file.resolve() in including:
            raise _config_error(name, "defaults", "this file is among its own defaults")
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _config_error(name, "", f"is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except (OSError, ValueError) as error:
        user = f" (named in `defaults:` of {tree.file})" if including else ""
        reason = f"can't be read: {getattr(error, 'strerror', None) or error}{user}{_similar_file(file)}"
        raise _config_error(name, "", reason) from None
    nodes, content = _parse(text, name)
    with _errors_reported(lambda _: name, "defaults"):
        value = content.pop("defaults", None)
        names = [] if value is None else [value] if isinstance(value, str) else list(value)
    if isinstance(value, DictConfig) or not all(isinstance(base, str) for base in names):
        raise _config_error(name, "defaults", f"expected the path of a YAML or a list of paths; got {value!r}")
    for base in names:
        _read(file.parent / base, tree, (*including, file.resolve()))
    with _errors_reported(lambda _: name):
        tree.merge(content)
    if nodes is not None:
        _record(nodes, "", name, tree)


def _similar_file(file: Path) -> str:
    """Return a question that names the existing YAML with the nearest name, or nothing."""
    with suppress(OSError, ValueError):
        names = [other.name for other in file.parent.iterdir() if other.suffix in (".yaml", ".yml")]
        same = [name for name in names if Path(name).stem == file.stem]
        near = same or difflib.get_close_matches(file.name, names, 1, 0.7)
        if not file.exists() and near:
            return f"; did you mean {file.parent / near[0]}?"
    return ""


def _parse(text: str, name: str) -> tuple[yaml.Node | None, DictConfig]:
    try:
        _require_shallow(text, name)
        nodes = yaml.compose(text, Loader=_LOADER)
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
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise _config_error(
                f"{name}:{event.start_mark.line + 1}", "", f"is nested in more than {_MAX_DEPTH} levels"
            )


def _record(node: yaml.Node, key: str, name: str, tree: KeyTree) -> None:
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


def _override(text: str, tree: KeyTree) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise _config_error(_COMMAND_LINE, text, "expected key=value, such as optimizer.lr=1e-4")
    if not value.strip():
        raise _config_error(_COMMAND_LINE, key, f"expected a value; got nothing ({key}=null sets null)")
    with _errors_reported(lambda _: _COMMAND_LINE, key):
        _require_shallow(value, _COMMAND_LINE)
        parsed = OmegaConf.from_dotlist([f"value={value}"])["value"]
    tree.update(key, parsed, {name: _COMMAND_LINE for name in _keys_below(key, parsed)})


def _keys_below(key: str, value: Any) -> Iterator[str]:
    """Yield a dotted key and the dotted keys of the sections and lists in its value."""
    yield key
    if OmegaConf.is_config(value):
        plain = OmegaConf.to_container(value, resolve=False)
        names = plain if isinstance(plain, dict) else range(len(plain)) if isinstance(plain, list) else ()
        for name in names:
            yield from _keys_below(f"{key}.{name}", value._get_node(name))


def _kind_key(section: str) -> str:
    """Return the key that says of which kind a section is: a phase's `name`, and the `kind` of the others."""
    return "name" if re.fullmatch(r"objective\.phases\.\d+", section) else "kind"


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
