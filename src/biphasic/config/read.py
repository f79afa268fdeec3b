"""Read YAML files with their `defaults:` and overrides, and record where each key was written."""

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from biphasic.config.base import flatten, within
from biphasic.errors import ConfigError, Problem

_FIELD = re.compile(r"\s*\{\w+\}")
_KIND = re.compile(r"[^=]*\.(kind|phases\.\d+\.name)=")
_REFERENCE = re.compile(r"\$\{(?!oc\.env:)([^}]*)")  # an interpolation, except of the environment
_COMMAND_LINE = "command line"
_EMPTY = ("null", "Null", "NULL", "~", "''", '""')
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's parser if PyYAML has it, as in OmegaConf
# Errors of YAML's constructors (`!!int x`, a number of 5,000 digits), of OmegaConf and of values that contain themselves.
_READ_ERRORS = (
    yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, LookupError, AttributeError, RecursionError
)  # fmt: skip


class KeyTree:
    """The merged keys of all files and overrides, and where each was written (`where`, by dotted key)."""

    def __init__(self, file: Path):
        self.file = file
        self.merged: dict[Any, Any] = {}
        self.where: dict[str, str] = {}

    def source(self, key: str) -> str:
        """Return where `key`, or the nearest key above it, was written."""
        while key and key not in self.where:
            key = key.rpartition(".")[0]
        return self.where.get(key, str(self.file))

    def content(self) -> dict[Any, Any]:
        """Return all keys and values with resolved interpolations. Raises a ConfigError if one can't be resolved."""
        if not os.environ.get("BUCKET"):
            # OmegaConf doesn't replace an empty variable by the default in `${oc.env:BUCKET,data}/my-text`.
            os.environ.pop("BUCKET", None)
        # OmegaConf takes 6 ms for a pretraining's YAML, and a study has hundreds: it gets only the sections that need it.
        refers = {key: text for key, value in self.merged.items() if "${" in (text := str(value))}
        plain = {key for key, value in self.merged.items() if not isinstance(value, dict | list)}
        is_simple = plain.issuperset(name for text in refers.values() for name in _REFERENCE.findall(text))
        needed = plain | refers.keys() if is_simple else self.merged.keys()
        with _errors_reported(self.source):
            part = OmegaConf.create({key: value for key, value in self.merged.items() if key in needed})
            content: Any = OmegaConf.to_container(part, resolve=True)
            return {key: content[key] if key in needed else deepcopy(value) for key, value in self.merged.items()}

    def update(self, key: str, value: Any, where: Mapping[str, str]) -> None:
        """Merge a value into a dotted key (empty: the top level). `where` has the places of this key and those below.

        Sections merge unless their kind differs; a list replaces a list.
        """
        for part in reversed(key.split(".") if key else []):
            value = {part: value}
        with _errors_reported(lambda _: where.get(key, str(self.file)), key):
            self.merged = self._merge(self.merged, value, "")
        self.where.update(where)

    def _merge(self, old: Any, new: Any, key: str) -> Any:
        """Return the value of `key` after merging `new` into `old`, in place where possible."""
        if isinstance(old, list) and isinstance(new, dict) and new and all(str(name).isdigit() for name in new):
            for index, child in new.items():
                if int(index) >= len(old):
                    raise IndexError(f"there is no item {index} in {key}: expected 0 to {len(old) - 1}")
                old[int(index)] = self._merge(old[int(index)], child, f"{key}.{index}")
            return old
        kind = "name" if re.fullmatch(r"objective\.phases\.\d+", key) else "kind"  # where a section's kind is written
        if not isinstance(old, dict) or not isinstance(new, dict) or _differ(old.get(kind), new.get(kind)):
            self.where = {
                k: place for k, place in self.where.items() if (k == key and isinstance(old, dict)) or not within(k, key)
            }
            return deepcopy(new)
        for name, child in new.items():
            old[name] = self._merge(old.get(name), child, f"{key}.{name}".lstrip("."))
        return old


def _differ(old: Any, new: Any) -> bool:
    return isinstance(old, str) and isinstance(new, str) and old != new


def read_tree(file: str | Path, overrides: list[str]) -> KeyTree:
    """Read a YAML with its `defaults:`, and apply `key=value` overrides.

    Raises a ConfigError if a file can't be read or is not valid YAML, or if an override is not `key=value`.
    """
    tree = KeyTree(Path(file))
    _read(Path(file), tree, ())
    # A section's kind first, since it replaces the section.
    for override in sorted(overrides, key=lambda text: not _KIND.match(text)):
        _override(override, tree)
    return tree


def format_override(key: str, value: Any) -> str:
    """Return the `key=value` pair, without spaces, that gives a key this value of JSON's types."""
    return f"{key}={json.dumps(value, ensure_ascii=False, separators=(',', ':'))}".replace(" ", "\\u0020")


def escape_interpolations(value: Any) -> Any:
    """Escape `${` in strings, which OmegaConf would resolve."""
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
        reason = f"can't be read: {getattr(error, 'strerror', None) or error}{user}"
        raise _config_error(name, "", reason) from None
    nodes, content = _parse(text, name)
    value = content.pop("defaults", None)
    names = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(base, str) for base in names):
        raise _config_error(name, "defaults", f"expected the path of a YAML or a list of paths; got {value!r}")
    for base in names:
        _read(file.parent / base, tree, (*including, file.resolve()))
    tree.update("", content, {})
    if nodes is not None:
        tree.where.update(_places(nodes, "", name))


def _parse(text: str, name: str) -> tuple[yaml.Node | None, dict[Any, Any]]:
    try:
        nodes = yaml.compose(text, Loader=_LOADER)
        if nodes is not None and not isinstance(nodes, yaml.MappingNode):
            raise _config_error(name, "", "expected `key: value` lines at the top")
        # Unlike PyYAML, OmegaConf reads 1e-4 as a number.
        content = OmegaConf.to_container(OmegaConf.create(text), resolve=False) if nodes is not None else {}
    except _READ_ERRORS as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise _config_error(name + line, "", f"is not valid YAML: {_summary(error)}") from None
    assert isinstance(content, dict)
    return nodes, content


def _places(node: yaml.Node, key: str, name: str) -> Iterator[tuple[str, str]]:
    children: list[tuple[Any, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(child.value, child, value) for child, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(index, value, value) for index, value in enumerate(node.value)]
    for part, marked, value in children:
        full = f"{key}.{part}".lstrip(".")
        yield full, f"{name}:{marked.start_mark.line + 1}"
        yield from _places(value, full, name)


def _override(text: str, tree: KeyTree) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key or not key.isprintable():
        raise _config_error(_COMMAND_LINE, text, "expected key=value, such as optimizer.lr=1e-4")
    if not value.strip():
        raise _config_error(_COMMAND_LINE, key, f"expected a value; got nothing ({key}=null sets null)")
    if _FIELD.match(value):  # a template, such as {text} {text_pair}, which YAML takes for a mapping
        tree.update(key, value, {key: _COMMAND_LINE})
        return
    with _errors_reported(lambda _: _COMMAND_LINE, key):
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=False)
        node = yaml.compose(value, Loader=_LOADER)
    # Comments and signs such as `---` are outside of the value, and a sign such as `&a` is a value without text.
    ignored = "" if node is None else value[: node.start_mark.index] + value[node.end_mark.index :]
    if ignored.strip() or (parsed["value"] in (None, "") and value.strip() not in _EMPTY):
        read = json.dumps(parsed["value"], ensure_ascii=False, default=str)
        quoted = f"{key}={shlex.quote(json.dumps(value, ensure_ascii=False))}"
        problem = f"YAML reads {value!r} as {read}: leave out what it ignores, or put quotes around a text, {quoted}"
        raise _config_error(_COMMAND_LINE, key, problem)
    tree.update(key, parsed["value"], dict.fromkeys([key, *dict(flatten(parsed["value"], key))], _COMMAND_LINE))
    for section in accumulate(key.split("."), "{}.{}".format):  # those that no file has
        tree.where.setdefault(section, _COMMAND_LINE)


def _config_error(where: str, key: str, message: str) -> ConfigError:
    return ConfigError([Problem(where, key, message)])


@contextmanager
def _errors_reported(source: Callable[[str], str], key: str = "") -> Iterator[None]:
    """Report errors of the YAML libraries as errors of `key`, or of the key that the error names."""
    try:
        yield
    except _READ_ERRORS as error:
        key = key or str(getattr(error, "full_key", None) or "")
        raise _config_error(source(key), key, _summary(error)) from None


def _summary(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "a value contains itself, or is nested too deeply"
    if isinstance(error, InterpolationKeyError) and (name := re.search("'(.*)'", str(error))):
        if name[1] in os.environ:
            return (
                f"refers to a key {name[1]}: the environment's variable is ${{oc.env:{name[1]}}}, or ${name[1]} in a shell"
            )
        return f"refers to {name[1]}, which has no value: set {name[1]}, or correct the name"
    text = getattr(error, "problem", None) or str(error)
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__
