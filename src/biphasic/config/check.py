"""Check keys and values against a job's schema, and report every error with its key and the expected value."""

import difflib
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from biphasic.config.base import JobConfig, flatten, schema_of, text_problems, within
from biphasic.config.phases import phase_section
from biphasic.config.reference import KeySection, sections_of
from biphasic.durations import Duration
from biphasic.errors import ConfigError, Problem

_EXPECTED = {
    "bool_type": "true or false",
    "byte_size": "a size such as 200gb",
    "byte_size_unit": "a size such as 200gb",
    "dict_type": "`key: value` lines below it",
    "int_parsing_size": "an integer of at most 64 bits",
    "invalid_key": "a text as key",
    "model_type": "`key: value` lines below it",
}
"""Expected values by pydantic's error type, where pydantic's own message does not suit a YAML."""


def check(content: dict[Any, Any], jobs: tuple[str, ...], source: Callable[[str], str], ranks: int) -> JobConfig:
    """Return the checked configuration. Invalid keys are removed from `content`.

    `jobs` are the allowed values of `job`; `source` returns where a key was written. Raises a ConfigError that lists
    every unknown key, wrong type and impossible combination.
    """
    if (job := content.get("job")) not in jobs:
        got = f"got {job!r}, " if "job" in content else "is missing; "
        message = f"{got}expected one of {', '.join(jobs)}{_nearest(job, jobs)}"
        raise ConfigError([Problem(source("job"), "job", message)])
    problems, config = _validate(content, source)
    broken = {problem.key for problem in problems}
    if problems:
        # Check the other keys without the invalid ones, so that one call reports everything.
        for key in sorted(broken, key=len, reverse=True):
            _remove(content, key.split("."))
        _, config = _validate(content, source)
    if config is None:
        raise ConfigError(sorted(problems))
    values = dict(flatten(config))
    for keys, message in [*text_problems(config), *config.problems(ranks)]:
        if not any(within(key, other) or within(other, key) for key in keys for other in broken):
            if message.startswith("expected") and "; got " not in message and keys[0] in values:
                message += _got(values[keys[0]])
            problems.append(Problem(source(keys[0]), keys[0], message))
    if problems:
        raise ConfigError(sorted(problems))
    return config


def _validate(content: dict[Any, Any], source: Callable[[str], str]) -> tuple[list[Problem], JobConfig | None]:
    try:
        return [], schema_of(content["job"]).model_validate(content)
    except ValidationError as error:
        errors = error.errors()
    details: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for detail in errors:
        details.setdefault(_keys(detail, content), []).append(detail)
    # pydantic reports an error for each type that a value may have. If the value has one of the types, only that type's
    # error is useful.
    fitting = [keys for keys, alternatives in details.items() if not all(map(_is_type, alternatives))]
    problems = []
    for keys, alternatives in details.items():
        if any(other[: len(keys)] == keys for other in fitting):
            alternatives = [detail for detail in alternatives if not _is_type(detail)]
        if alternatives:
            key = ".".join(keys)
            problems.append(Problem(source(key), key, _message(keys, alternatives, content)))
    return problems, None


def _remove(content: Any, keys: list[str]) -> None:
    with suppress(LookupError, TypeError):  # a key that is missing
        above = _value_at(keys[:-1], content)
        del above[int(keys[-1]) if isinstance(above, list) else keys[-1]]


def _is_type(detail: ErrorDetails) -> bool:
    return detail["type"].endswith(("_type", "literal_error"))


def _keys(detail: ErrorDetails, content: Any) -> tuple[str, ...]:
    """Return the YAML keys of an error: its location without the members of unions."""
    keys: list[str] = []
    value: Any = content
    for index, part in enumerate(detail["loc"]):
        if isinstance(value, dict) and part in value:
            part, value = next(item for item in value.items() if item[0] == part)  # `no` is False, which is 0 for pydantic
        elif isinstance(value, list) and isinstance(part, int):
            value = value[part]
        elif detail["type"] not in ("missing", "invalid_key") or index < len(detail["loc"]) - 1:
            continue
        keys.append(str(part))
    if detail["type"].startswith("union_tag"):
        keys.append(detail["ctx"]["discriminator"].strip("'"))  # pyright: ignore[reportTypedDictNotRequiredAccess]
    return tuple(keys)


def _message(keys: tuple[str, ...], alternatives: list[ErrorDetails], content: dict[Any, Any]) -> str:
    """Return the message about a key, given an error for each type that its value may have."""
    kind, value = alternatives[0]["type"], alternatives[0]["input"]
    *above, name = keys
    if kind == "extra_forbidden":
        return _unknown_key(above, name, content)
    if kind == "missing":
        return "is missing, and has no default"
    if kind.startswith("union_tag"):
        allowed = [section.kind.partition(": ")[2] for section in _sections_at(above, content, by_kind=False)]
        if kind == "union_tag_not_found":
            return f"is missing; expected one of {', '.join(allowed)}"
        got = value.get(name) if isinstance(value, dict) else value
        return f"got {got!r}, expected one of {', '.join(allowed)}{_nearest(got, allowed)}"
    texts = [detail["msg"].removeprefix("Value error, ") for detail in alternatives if detail["type"] == "value_error"]
    if texts:
        return "; or ".join(dict.fromkeys(texts))
    expected = " or ".join(dict.fromkeys(map(_expected, alternatives)))
    is_quoted = isinstance(value, int | float) and any(detail["type"] == "string_type" for detail in alternatives)
    quotes = "; text that YAML reads as something else needs quotes" * is_quoted
    return f"expected {expected}{_got(value)}{quotes}"


def _got(value: object) -> str:
    text = str(value) if isinstance(value, Duration) else repr(value)
    return f"; got {text[:200]}{'…' * (len(text) > 200)}"


def _expected(detail: ErrorDetails) -> str:
    kind = detail["type"]
    if kind == "literal_error":
        expected = detail["ctx"]["expected"]  # pyright: ignore[reportTypedDictNotRequiredAccess]
        return expected + _nearest(detail["input"], re.findall("'(.*?)'", expected))
    text = _EXPECTED.get(kind) or re.sub(r"^\w+ should (be|have) | after validation.*", "", detail["msg"])
    return text.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")


def _unknown_key(above: list[str], name: str, content: dict[Any, Any]) -> str:
    names = list(dict.fromkeys(key.name for section in _sections_at(above, content) for key in section.keys))
    if not names:  # a phase with an objective of the user's own
        names = list(phase_section(_value_at(above, content)["name"]).model_fields)
    near = [".".join([*above, other]) for other in difflib.get_close_matches(name, names, 1, 0.5)]
    if not near and not above:  # the first key with this name in a top-level section: for `lr`, `optimizer.lr`
        paths = (section.path(key) for section in sections_of(content["job"]) for key in section.keys)
        near = [path for path in paths if path.partition(".")[2] == name]
    hint = f"did you mean `{near[0]}`? " if near else ""
    return f"unknown key; {hint}expected one of: {', '.join(names)}"


def _value_at(keys: list[str], value: Any) -> Any:
    for key in keys:
        value = value[int(key)] if isinstance(value, list) else value.get(key) if isinstance(value, dict) else None
    return value


def _sections_at(keys: list[str], content: dict[Any, Any], by_kind: bool = True) -> list[KeySection]:
    """Return the possible sections at a key. With `by_kind`, only those of the kind in the content."""
    value = _value_at(keys, content)

    def fits(section: KeySection) -> bool:
        parts = section.key.split(".") if section.key else []
        tag, _, kind = section.kind.partition(": ")
        is_of_kind = not kind or not isinstance(value, dict) or value.get(tag, kind) == kind
        is_there = all(part in ("N", "NAME", key) for part, key in zip(parts, keys, strict=False))
        return len(parts) == len(keys) and is_there and (is_of_kind or not by_kind)

    return [section for section in sections_of(content["job"]) if fits(section)]


def _nearest(value: object, allowed: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(value), list(allowed), 1, 0.4)
    return f" (did you mean `{near[0]}`?)" if near else ""
