"""Translate pydantic's errors into messages that name the YAML key, what was expected, and the nearest valid name."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from biphasic.errors import Problem

_TYPES = {
    "bool_type": "true or false",
    "dict_type": "`key: value` lines below it",
    "float_type": "a valid number",
    "int_type": "a valid integer",
    "list_type": "a list",
    "model_type": "`key: value` lines below it",
    "string_type": "a valid string",
}
"""What is expected instead of a value of the wrong type, by pydantic's error type."""
_LIMITS = {
    "finite_number": "a finite number",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_parsing_size": "an integer of at most 64 bits",
    "invalid_key": "a text as key",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "string_unicode": "valid Unicode text",
    "too_long": "at most {max_length} item(s)",
    "too_short": "at least {min_length} item(s)",
}
"""What is expected instead of an invalid value, by pydantic's error type. Braces contain names from pydantic's context."""


@dataclass(frozen=True)
class _Message:
    """The message about a key. `expected` and `value` are set if the error says what was expected instead of a value."""

    key: str
    text: str
    expected: str = ""
    value: str = ""
    is_type: bool = False


def translate(
    error: ValidationError, model: type[BaseModel], content: dict[Any, Any], source: Callable[[str], str]
) -> list[Problem]:
    """Return one problem for each key in a validation error.

    Args:
        error: pydantic's errors about `content`.
        model: schema class of the job.
        content: the validated keys and values.
        source: function that returns where a key was written.
    """
    messages = [_message(detail, model, content) for detail in error.errors()]
    # pydantic reports one error for each type that a value may have. If the value fits one of the types, only the error for
    # that type is useful.
    fitting = [message.key for message in messages if not message.is_type]
    by_key: dict[str, list[_Message]] = {}
    for message in messages:
        if not message.is_type or not any(f"{key}.".startswith(f"{message.key}.") for key in fitting):
            by_key.setdefault(message.key, []).append(message)
    return [Problem(source(key), key, _join(alternatives)) for key, alternatives in by_key.items()]


def _join(messages: list[_Message]) -> str:
    if all(message.expected and message.value == messages[0].value for message in messages):
        expected = " or ".join(dict.fromkeys(message.expected for message in messages))
        return f"expected {expected}; got {messages[0].value}"
    return "; or ".join(dict.fromkeys(message.text for message in messages))


def _message(detail: ErrorDetails, model: type[BaseModel], content: dict[Any, Any]) -> _Message:
    keys = _keys(detail["loc"], content, detail["type"] == "missing")
    key, kind, value, context = ".".join(keys), detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        sections = _sections_at(model, keys[:-1], content)
        names = list(dict.fromkeys(name for section in sections for name in section.model_fields))
        above = "".join(f"{part}." for part in keys[:-1])
        near = [above + name for name in difflib.get_close_matches(keys[-1], names, 1, 0.5)]
        hints = near or (_same_name_elsewhere(keys[-1], model) if not above else [])
        hint = "".join(f"did you mean `{name}`? " for name in hints)
        return _Message(key, f"unknown key; {hint}expected one of: {', '.join(names)}")
    if kind == "missing":
        return _Message(key, "is missing, and has no default")
    if kind == "union_tag_not_found":
        tag = str(context["discriminator"]).strip("'")
        sections = [section for section in _sections_at(model, keys, content) if tag in section.model_fields]
        allowed = [name for section in sections for name in get_args(section.model_fields[tag].annotation)]
        return _Message(f"{key}.{tag}", f"is missing; expected one of {', '.join(allowed)}")
    if kind == "union_tag_invalid":
        tag = str(context["discriminator"]).strip("'")
        tag_value = value.get(tag) if isinstance(value, dict) else value
        allowed = [word.strip(" '") for word in str(context["expected_tags"]).split(",")]
        key = f"{key}.{tag}" if key else tag
        return _Message(key, f"got {tag_value!r}, expected one of {', '.join(allowed)}{nearest(tag_value, allowed)}")
    if kind == "value_error":
        return _Message(key, detail["msg"].removeprefix("Value error, "))
    if kind == "literal_error":
        expected = context["expected"]
        expected += nearest(value, [word.strip(" '") for word in expected.replace(" or ", ", ").split(",")])
    elif kind in _TYPES:
        expected = _TYPES[kind]
    else:
        limits = {name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in context.items()}
        expected = _LIMITS.get(kind, detail["msg"].removeprefix("Input should be ")).format(**limits)
    got = _shorten(value)
    return _Message(key, f"expected {expected}; got {got}", expected, got, kind in (*_TYPES, "literal_error"))


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _keys(location: tuple[int | str, ...], content: Any, missing: bool) -> list[str]:
    """Return the YAML keys of pydantic's error location, without the union members that it also contains."""
    keys: list[str] = []
    value: Any = content
    for index, part in enumerate(location):
        if (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int)):
            value = value[part]  # pyright: ignore[reportCallIssue, reportArgumentType]
        elif not (missing and index == len(location) - 1):
            continue
        keys.append(str(part))
    return keys


def _sections_at(model: type[BaseModel], keys: list[str], content: Any) -> list[type[BaseModel]]:
    """Return the sections that the schema allows at a key, given the kinds of its parent sections in `content`."""
    types_here: list[Any] = [model]
    value = content
    for key in keys:
        sections = [section for section in _sections(types_here) if _has_kind(section, value)]
        annotations = [section.model_fields[key].annotation for section in sections if key in section.model_fields]
        annotations += [get_args(kind)[-1] for kind in types_here if get_origin(kind) in (list, dict)]
        types_here = [member for annotation in annotations for member in _union_members(annotation)]
        value = value[int(key)] if isinstance(value, list) else value.get(key) if isinstance(value, dict) else None
    return [section for section in _sections(types_here) if _has_kind(section, value)]


def _sections(annotations: list[Any]) -> list[type[BaseModel]]:
    return [kind for kind in annotations if isinstance(kind, type) and issubclass(kind, BaseModel)]


def _has_kind(section: type[BaseModel], value: Any) -> bool:
    """Return whether the section matches the `job`, `kind` or `name` of a value, if the value has one."""
    fields = {name: field for name, field in section.model_fields.items() if get_origin(field.annotation) is Literal}
    required = [(name, get_args(field.annotation)) for name, field in fields.items() if field.is_required()]
    return not isinstance(value, dict) or all(value.get(name, kinds[0]) in kinds for name, kinds in required)


def _union_members(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _union_members(get_args(annotation)[0])
    if get_origin(annotation) in (typing.Union, types.UnionType):
        return [member for choice in get_args(annotation) for member in _union_members(choice)]
    return [annotation]


def _same_name_elsewhere(name: str, model: type[BaseModel]) -> list[str]:
    """Return the first key with this name in a top-level section: for `lr`, `optimizer.lr`."""
    sections = [(top, section) for top in model.model_fields for section in _sections_at(model, [top], {})]
    return [f"{top}.{name}" for top, section in sections if name in section.model_fields][:1]


def nearest(value: object, allowed: list[str]) -> str:
    """Return a question that names the allowed value nearest to a wrong one, or nothing."""
    near = difflib.get_close_matches(str(value), allowed, 1, 0.4)
    return f" (did you mean `{near[0]}`?)" if near else ""
