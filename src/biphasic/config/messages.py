"""pydantic's errors, in the words of a YAML's author: the key as written, what was expected, the nearest valid name."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from biphasic.config.errors import Problem


def translate(
    error: ValidationError, model: type[BaseModel] | None, content: dict[Any, Any], source: Callable[[str], str]
) -> list[Problem]:
    """One problem for each key that `error` names.

    Args:
        error: what pydantic found in `content`.
        model: the schema's class for this job, if the job is known.
        content: the keys and values that were checked.
        source: tells where a key was written.
    """
    found: dict[str, list[str]] = {}
    for detail in error.errors():
        key, message = _message(detail, model, content)
        found.setdefault(key, []).append(message)
    # A value that may be of several types fails once for each: one sentence says them all.
    return [Problem(source(key), key, "; or ".join(dict.fromkeys(messages))) for key, messages in found.items()]


def _message(detail: ErrorDetails, model: type[BaseModel] | None, content: dict[Any, Any]) -> tuple[str, str]:
    keys, beside = _walk(detail["loc"], model, content)
    names = list(dict.fromkeys(name for section in beside for name in section.model_fields))
    key, kind, given, context = ".".join(keys), detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        above = "".join(f"{part}." for part in keys[:-1])
        near = [above + name for name in difflib.get_close_matches(keys[-1], names, 1, 0.5)]
        hint = "".join(
            f"did you mean `{name}`? " for name in near or (_elsewhere(keys[-1], model) if not above else [])
        )
        return key, f"unknown key; {hint}expected one of: {', '.join(names)}"
    if kind == "missing":
        return key, "is missing, and has no default"
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        tag = str(context.get("discriminator", "name")).strip("'")
        allowed = [word.strip(" '") for word in str(context.get("expected_tags", "")).split(",")]
        if kind == "union_tag_not_found":
            allowed = [
                name for section in _below(model, keys) for name in get_args(section.model_fields[tag].annotation)
            ]
            value = None
        else:
            value = given.get(tag) if isinstance(given, dict) else given
        key = f"{key}.{tag}" if key else tag
        got = "is missing; " if value is None else f"got {value!r}, "
        return key, f"{got}expected one of {', '.join(allowed)}{_near(value, allowed)}"
    expected = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if kind == "value_error":
        return key, expected
    if kind == "model_type":
        expected = "`key: value` lines below it"
    if kind == "literal_error":
        expected += _near(given, [word.strip(" '") for word in expected.replace(" or ", ", ").split(",")])
    if expected[:1].isupper():  # a sentence of its own, such as "List should have at least 1 item"
        return key, f"{expected}; got {given!r}"
    return key, f"expected {expected}; got {given!r}"


def _walk(
    location: tuple[int | str, ...], model: type[BaseModel] | None, content: Any
) -> tuple[list[str], list[type[BaseModel]]]:
    """The YAML's key for pydantic's location, and the sections whose names are valid beside it.

    A location also names the member of a union that was tried; those parts are no keys, they only narrow the types.
    """
    keys: list[str] = []
    types_here: list[Any] = [model] if model else []
    beside: list[type[BaseModel]] = _sections(types_here)
    here = content
    for part in location:
        sections = _sections(types_here)
        is_key = (isinstance(here, dict) and part in here) or any(part in section.model_fields for section in sections)
        if not is_key and not (isinstance(here, list) and isinstance(part, int)):
            types_here = [section for section in sections if _is_member(section, part)] or types_here
            continue
        keys.append(str(part))
        beside = sections or beside
        types_here = _children(types_here, part)
        if isinstance(here, dict):
            here = here.get(part)
        elif isinstance(here, list) and isinstance(part, int):
            here = here[part]
        else:
            here = None
    return keys, beside


def _sections(types_here: list[Any]) -> list[type[BaseModel]]:
    return [here for here in types_here if isinstance(here, type) and issubclass(here, BaseModel)]


def _is_member(section: type[BaseModel], tag: int | str) -> bool:
    return section.__name__ == tag or any(tag in get_args(field.annotation) for field in section.model_fields.values())


def _children(types_here: list[Any], part: int | str) -> list[Any]:
    below: list[Any] = []
    for section in _sections(types_here):
        if part in section.model_fields:
            below += _members(section.model_fields[str(part)].annotation)
    for here in types_here:
        if get_origin(here) is list and isinstance(part, int):
            below += _members(get_args(here)[0])
        if get_origin(here) is dict:
            below += _members(get_args(here)[1])
    return below


def _members(annotation: Any) -> list[Any]:
    """The types that an annotation allows, unions taken apart."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _members(get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [member for choice in get_args(annotation) for member in _members(choice)]
    return [annotation]


def _below(model: type[BaseModel] | None, keys: list[str]) -> list[type[BaseModel]]:
    types_here: list[Any] = [model] if model else []
    for key in keys:
        types_here = _children(types_here, int(key) if key.isdigit() else key)
    return _sections(types_here)


def _elsewhere(name: str, model: type[BaseModel] | None) -> list[str]:
    """A key of that very name in a section of the top: `lr` alone should be `optimizer.lr`."""
    sections = [(top, section) for top in model.model_fields for section in _below(model, [top])] if model else []
    return [f"{top}.{name}" for top, section in sections if name in section.model_fields][:1]


def _near(given: object, allowed: list[str]) -> str:
    near = difflib.get_close_matches(str(given), allowed, 1, 0.4)
    return f" (did you mean `{near[0]}`?)" if near else ""
