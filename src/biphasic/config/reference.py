"""The reference of all keys: types, limits, defaults and descriptions, read from the classes of the schemas."""

from __future__ import annotations

import ast
import difflib
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typing_extensions import Doc

from biphasic.config.base import Section
from biphasic.config.durations import Duration
from biphasic.config.jobs import JOBS, schema_of
from biphasic.errors import UserError

_LARGEST = 2**63
"""Limits from here on are those of 64-bit integers, which every number has."""
_PLAIN = {
    str: "text",
    bool: "`true` or `false`",
    int: "integer",
    float: "number",
    type(None): "`null`",
    Any: "any value",
}


@dataclass(frozen=True)
class Key:
    """A key of a section: its name, and its type with limits, default and description as Markdown."""

    name: str
    type: str
    default: str
    description: str


@dataclass(frozen=True)
class KeySection:
    """A section of a job's YAML, and its keys.

    Attributes:
        job: the value of `job:`.
        key: dotted key of the section; `N` stands for an index of a list, `NAME` for a chosen name; empty at the top.
        kind: which of several forms of the section, e.g. `kind: files`; empty if there is only one.
        description: what the section is.
        keys: the keys.
    """

    job: str
    key: str
    kind: str
    description: str
    keys: tuple[Key, ...]

    @property
    def title(self) -> str:
        """The section's key and form, as Markdown."""
        kind = f" with `{self.kind}`" if self.kind else ""
        return f"`{self.key}`{kind}" if self.key else f"`job: {self.job}`"


def sections_of(job: str) -> list[KeySection]:
    """Return the sections of a job's YAML, each before those inside it."""
    # Several forms of a section may contain the same section.
    return list(dict.fromkeys(_walk(job, "", "", schema_of(job), None)))


def _walk(job: str, key: str, kind: str, section: type[Section], default: Section | None) -> Iterator[KeySection]:
    """Yield a section and those inside it. `default` is the section's own default, whose values are those of its keys."""
    fields, texts = section.model_fields, _attribute_docstrings(section)
    keys = tuple(
        Key(name, _type(field.annotation, field.metadata), _default(field, name, default), texts.get(name, ""))
        for name, field in fields.items()
    )
    yield KeySection(job, key, kind, _paragraph(section.__doc__ or ""), keys)
    for name, field in fields.items():
        value = getattr(default, name) if default is not None else field.default
        children = list(_sections_in(field.annotation))
        for suffix, child in children:
            child_default = value if type(value) is child else None
            same_key = [other for at, other in children if at == suffix]
            child_kind = _kind(child) if len(same_key) > 1 else ""
            yield from _walk(job, f"{key}.{name}{suffix}".lstrip("."), child_kind, child, child_default)


def _sections_in(annotation: Any, suffix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield the sections that a value may be or contain, each with what follows the value's key in their keys."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if inspect.isclass(annotation) and issubclass(annotation, Section):
        yield suffix, annotation
    elif origin is Annotated:
        yield from _sections_in(arguments[0], suffix)
    elif origin is list:
        yield from _sections_in(arguments[0], f"{suffix}.N")
    elif origin is dict:
        yield from _sections_in(arguments[1], f"{suffix}.NAME")
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            yield from _sections_in(argument, suffix)


def _kind(section: type[Section]) -> str:
    """Return the key and value that distinguish a form of a section, e.g. `kind: files`."""
    for name, field in section.model_fields.items():
        if get_origin(field.annotation) is Literal and field.is_required():
            return f"{name}: {get_args(field.annotation)[0]}"
    raise TypeError(f"{section.__name__} is one of several forms of a section, and no key tells which")


def _type(annotation: Any, metadata: list[Any]) -> str:
    """Return a type and its limits as Markdown."""
    metadata = [item for entry in metadata for item in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
    name = next((item.documentation for item in metadata if isinstance(item, Doc)), None)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if name is not None:
        return name
    if origin is Annotated:
        return _type(arguments[0], [*arguments[1:], *metadata])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(argument, metadata) for argument in arguments))
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin is list:
        return f"list{_length(metadata)} of {_type(arguments[0], [])}"
    if origin is dict and arguments[1] is Any:
        return "keys with values"
    if origin is dict:
        return f"{_type(arguments[1], [])} for each name{_length(metadata)}"
    if annotation is Duration:
        return "length, such as `1000ba`"
    if inspect.isclass(annotation) and issubclass(annotation, Section):
        return "section"
    return _PLAIN[annotation] + (_limits(metadata) if annotation in (int, float) else "")


def _limits(metadata: list[Any]) -> str:
    """Return the limits of a number, e.g. ` ≥ 0 and < 1`."""
    texts = []
    for item in metadata:
        for kind, sign, name in ((Gt, ">", "gt"), (Ge, "≥", "ge"), (Lt, "<", "lt"), (Le, "≤", "le")):
            if isinstance(item, kind) and (limit := getattr(item, name)) != _LARGEST:
                texts.append(f"{sign} 2**{limit.bit_length() - 1}" if limit > 10**6 else f"{sign} {limit:g}")
    return f" {' and '.join(texts)}" if texts else ""


def _length(metadata: list[Any]) -> str:
    """Return the limits of the number of elements, e.g. ` (at least 1)`."""
    least = next((item.min_length for item in metadata if isinstance(item, MinLen)), 0)
    most = next((item.max_length for item in metadata if isinstance(item, MaxLen)), None)
    if most is not None:
        return f" ({least} to {most})" if least != most else f" ({most})"
    return f" (at least {least})" if least else ""


def _default(field: FieldInfo, name: str, section: Section | None) -> str:
    if section is None and field.is_required():
        return "required"
    value = field.default if section is None else getattr(section, name)
    assert value is not PydanticUndefined
    if isinstance(value, Section):
        given = value.model_dump(mode="json", exclude_defaults=True)
        return _yaml(given) if given and len(given) == len(value.model_fields_set) else "its keys' defaults"
    if isinstance(value, Duration):
        return f"`{value}`"
    return _yaml(value)


def _yaml(value: Any) -> str:
    if isinstance(value, float):
        return f"`{value:g}`"
    text = (
        yaml.safe_dump(value, default_flow_style=True, width=1000, sort_keys=False)
        .removesuffix("\n")
        .removesuffix("\n...")
    )
    return f"`{text}`"


@cache
def _module_docstrings(file: str) -> dict[str, dict[str, str]]:
    """Return the docstrings below the attributes of each class in a source file."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {node.name: dict(_docstrings_in(node.body)) for node in classes}


def _docstrings_in(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for node, following in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(following, ast.Expr):
            value = following.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield node.target.id, _paragraph(value.value)


def _attribute_docstrings(section: type[Section]) -> dict[str, str]:
    """Return the docstrings of a section's keys. pydantic can read them too, but only when it builds the class, slowly."""
    texts: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if issubclass(base, Section):
            texts |= _module_docstrings(inspect.getfile(base)).get(base.__name__, {})
    return texts


def _paragraph(text: str) -> str:
    """Return a docstring's paragraphs as one line."""
    return " ".join(inspect.cleandoc(text).split())


def description_of_job(text: str) -> str:
    """Return the description of a job without the job's name, which the title has."""
    text = text.removeprefix(f"`job: {text.split('`')[1].removeprefix('job: ')}`: ")
    return text[0].upper() + text[1:]


def describe_keys(name: str = "") -> str:
    """Return keys as text for a terminal.

    Args:
        name: a job, a section or a key: `pretrain`, `optimizer`, `optimizer.lr`, `finetune.task`, `lr`. A part in the
            middle is enough: `phases`. Without it, the sections of all jobs are listed.

    Raises:
        UserError: there is no such section or key. The message names similar ones.
    """
    if not name:
        return _list_of_sections()
    all_sections = {job: sections_of(job) for job in JOBS}
    job, _, rest = name.partition(".")
    chosen = {job: all_sections[job]} if job in JOBS else {}
    texts: dict[str, list[str]] = {}
    for wanted, jobs in ((rest, chosen), (name, all_sections)):
        for sections in jobs.values():
            for section in sections:
                if keys := [key for key in section.keys if _matches(section, key, wanted)]:
                    # Jobs may share a section: it is shown once, for all of them.
                    texts.setdefault(_terminal(section, keys), []).append(section.job)
        if texts:
            break
    if not texts:
        known = {f"{section.key}.{key.name}".lstrip(".")
                 for sections in all_sections.values() for section in sections for key in section.keys}  # fmt: skip
        near = difflib.get_close_matches(name, sorted({*known, *JOBS}), 3, 0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ";"
        raise UserError(f"no key or section {name!r}{hint} `biphasic keys` lists the sections")
    return "\n\n".join(text.replace("JOBS", ", ".join(jobs), 1) for text, jobs in texts.items())


def _matches(section: KeySection, key: Key, name: str) -> bool:
    """Return whether `name` is the key, or a section that it is in; placeholders for names and indices may be left out."""
    full = f"{section.key}.{key.name}"
    without = ".".join(part for part in full.split(".") if part not in ("N", "NAME"))
    return not name or any(f".{name}." in f".{form}." for form in (full, without))


def _list_of_sections() -> str:
    lines = ["biphasic keys SECTION, such as `biphasic keys pretrain.optimizer` or `biphasic keys optimizer.lr`"]
    for job in JOBS:
        top, *inner = sections_of(job)
        lines += ["", f"{job}: {description_of_job(top.description)}"]
        lines += [f"    {', '.join(dict.fromkeys(section.key for section in inner))}"] if inner else []
    return "\n".join(lines)


def _terminal(section: KeySection, keys: list[Key]) -> str:
    import textwrap

    place = section.key or "at the top"
    lines = [f"{place}{f', {section.kind}' if section.kind else ''}  (job: JOBS)"]
    lines += textwrap.wrap(_without_marks(section.description), 100)
    for key in keys:
        default = key.default if key.default == "required" else f"default: {_without_marks(key.default)}"
        lines += ["", f"  {key.name}  ({_without_marks(key.type)}; {default})"]
        lines += textwrap.wrap(
            _without_marks(key.description), 100, initial_indent="      ", subsequent_indent="      "
        )
    return "\n".join(lines)


def _without_marks(text: str) -> str:
    return text.replace("`", "")
