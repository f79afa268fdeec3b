"""Check keys and values against the schema of a job, and report every error with its key and what was expected."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from biphasic.config.base import JobConfig, secret_problems
from biphasic.config.jobs import schema_of
from biphasic.errors import ConfigError, Problem

_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "`key: value` lines below it",
    "finite_number": "a finite number",
    "float_type": "a valid number",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_parsing_size": "an integer of at most 64 bits",
    "int_type": "a valid integer",
    "invalid_key": "a text as key",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "model_type": "`key: value` lines below it",
    "string_type": "a valid string",
    "string_unicode": "valid Unicode text",
    "too_long": "at most {max_length} item(s)",
    "too_short": "at least {min_length} item(s)",
}
"""What is expected instead of a value, by pydantic's error type. Braces contain names from pydantic's context."""


def check(content: dict[Any, Any], jobs: tuple[str, ...], source: Callable[[str], str], ranks: int) -> JobConfig:
    """Return the checked configuration.

    Args:
        content: keys and values. A key with a problem is removed from it.
        jobs: the allowed values of `job`.
        source: function that returns where a key was written.
        ranks: processes of the run.

    Raises:
        ConfigError: with every unknown key, wrong type and impossible combination.
    """
    problems, config = _validate(content, jobs, source)
    broken = {problem.key for problem in problems}
    if problems:
        # The other keys are checked without the broken ones, so that one call reports everything.
        for key in sorted(broken, key=len, reverse=True):
            _remove(content, key.split("."))
        more, config = _validate(content, jobs, source)
        if more:
            raise ConfigError(sorted(problems))
    assert config is not None
    for keys, message in [*secret_problems(config), *config.problems(ranks)]:
        if not any(_overlap(key, other) for key in keys for other in broken):
            problems.append(Problem(source(keys[0]), keys[0], message))
    if problems:
        raise ConfigError(sorted(problems))
    return config


def _validate(
    content: dict[Any, Any], jobs: tuple[str, ...], source: Callable[[str], str]
) -> tuple[list[Problem], JobConfig | None]:
    job = content.get("job")
    if "job" not in content:
        return [Problem(source("job"), "job", f"is missing; expected one of {', '.join(jobs)}")], None
    if job not in jobs:
        message = f"got {job!r}, expected one of {', '.join(jobs)}{_nearest(job, jobs)}"
        return [Problem(source("job"), "job", message)], None
    schema = schema_of(job)
    try:
        return [], schema.model_validate(content)
    except ValidationError as error:
        messages = [_message(detail, schema, content) for detail in error.errors()]
    # pydantic reports one error for each type that a value may have. If the value fits one of the types, only the error for
    # that type is useful.
    fitting = [message.key for message in messages if not message.is_type]
    by_key: dict[str, list[_Message]] = {}
    for message in messages:
        if not message.is_type or not any(f"{key}.".startswith(f"{message.key}.") for key in fitting):
            by_key.setdefault(message.key, []).append(message)
    return [Problem(source(key), key, _join(alternatives)) for key, alternatives in by_key.items()], None


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
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


@dataclass(frozen=True)
class _Message:
    """The message about a key. `expected` and `value` are set if the error says what was expected instead of a value."""

    key: str
    text: str
    expected: str = ""
    value: str = ""
    is_type: bool = False


def _join(messages: list[_Message]) -> str:
    if all(message.expected and message.value == messages[0].value for message in messages):
        expected = " or ".join(dict.fromkeys(message.expected for message in messages))
        return f"expected {expected}; got {messages[0].value}"
    return "; or ".join(dict.fromkeys(message.text for message in messages))


def _message(detail: ErrorDetails, schema: type[BaseModel], content: dict[Any, Any]) -> _Message:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    keys = _keys(detail["loc"], content, kind == "missing")
    key = ".".join(keys)
    if kind == "extra_forbidden":
        return _Message(key, _unknown_key(keys, schema, content))
    if kind == "missing":
        return _Message(key, "is missing, and has no default")
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        tag = str(context["discriminator"]).strip("'")
        allowed = [
            name for section in _sections_at(schema, keys, content, known=False) for name in _kinds(section, tag)
        ]
        key = f"{key}.{tag}".lstrip(".")
        if kind == "union_tag_not_found":
            return _Message(key, f"is missing; expected one of {', '.join(allowed)}")
        got = value.get(tag) if isinstance(value, dict) else value
        return _Message(key, f"got {got!r}, expected one of {', '.join(allowed)}{_nearest(got, allowed)}")
    if kind == "value_error":
        return _Message(key, detail["msg"].removeprefix("Value error, "))
    if kind == "literal_error":
        expected = context["expected"]
        expected += _nearest(value, [word.strip(" '") for word in expected.replace(" or ", ", ").split(",")])
    else:
        limits = {name: f"{limit:g}" if isinstance(limit, float) else limit for name, limit in context.items()}
        expected = _EXPECTED.get(kind, detail["msg"].removeprefix("Input should be ")).format(**limits)
    got = repr(value) if len(repr(value)) <= 200 else f"{repr(value)[:200]}…"
    return _Message(key, f"expected {expected}; got {got}", expected, got, kind.endswith(("_type", "literal_error")))


def _unknown_key(keys: list[str], schema: type[BaseModel], content: dict[Any, Any]) -> str:
    *above, name = keys
    names = list(dict.fromkeys(key for section in _sections_at(schema, above, content) for key in section.model_fields))
    near = [".".join([*above, other]) for other in difflib.get_close_matches(name, names, 1, 0.5)]
    if not near and not above:  # the first key with this name in a top-level section: for `lr`, `optimizer.lr`
        tops = [top for top in names for section in _sections_at(schema, [top], {}) if name in section.model_fields]
        near = [f"{top}.{name}" for top in tops[:1]]
    hint = f"did you mean `{near[0]}`? " if near else ""
    return f"unknown key; {hint}expected one of: {', '.join(names)}"


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


def _sections_at(schema: type[BaseModel], keys: list[str], content: Any, known: bool = True) -> list[type[BaseModel]]:
    """Return the sections that the schema allows at a key, given the kinds of its parent sections in `content`.

    Args:
        schema: class of the job.
        keys: parts of the dotted key.
        content: the YAML.
        known: whether to leave out sections of another kind than the key's value.
    """
    sections, value = [schema], content
    for key in keys:
        fields = [
            section.model_fields[key] for section in sections if key in section.model_fields and _fits(section, value)
        ]
        # An index and a chosen name are no fields; the same sections are below them.
        sections = [inner for field in fields for inner in _sections_in(field.annotation)] or sections
        value = value[int(key)] if isinstance(value, list) else value.get(key) if isinstance(value, dict) else None
    return [section for section in sections if not known or _fits(section, value)]


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in _sections_in(argument)]


def _fits(section: type[BaseModel], value: Any) -> bool:
    """Return whether the section is of the kind that a value gives with `job`, `kind` or `name`, if it does."""
    tags = [(name, _kinds(section, name)) for name, field in section.model_fields.items() if field.is_required()]
    return not isinstance(value, dict) or all(value.get(tag, kinds[0]) in kinds for tag, kinds in tags if kinds)


def _kinds(section: type[BaseModel], key: str) -> tuple[str, ...]:
    """Return the values of a key that has fixed ones."""
    annotation = section.model_fields[key].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _nearest(value: object, allowed: Iterable[str]) -> str:
    """Return a question that names the allowed value nearest to a wrong one, or nothing."""
    near = difflib.get_close_matches(str(value), list(allowed), 1, 0.4)
    return f" (did you mean `{near[0]}`?)" if near else ""
