"""The reference of all keys: types, limits, defaults and descriptions, from pydantic's JSON schemas."""

import difflib
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import yaml

from biphasic.config.base import JOBS, schema_of
from biphasic.errors import UserError

_PLAIN = {"string": "text", "boolean": "`true` or `false`", "integer": "integer", "number": "number", "null": "`null`"}
_LIMITS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
_LARGEST = 2**63
"""Limits from here on are those of every 64-bit integer, and aren't shown."""


class Key(NamedTuple):
    """A key of a section: its name, and as Markdown its type with limits, default and description."""

    name: str
    type: str
    default: str
    description: str


class KeySection(NamedTuple):
    """A section of a job's YAML. `key` is empty at the top; in it, `N` stands for a list index, `NAME` for a user's name.

    `kind` says which of several variants of the section it is, e.g. `kind: files`; it is empty if there is only one.
    """

    key: str
    kind: str
    description: str
    keys: tuple[Key, ...]

    def path(self, key: Key) -> str:
        return f"{self.key}.{key.name}".lstrip(".")

    def describe(self, note: str = "") -> str:
        title = f"`{self.key}`" if self.key else "At the top"
        title += f" with `{self.kind}`" if self.kind else ""
        keys = [f"- `{key.name}` ({key.type}; {key.default}): {key.description}" for key in self.keys]
        return "\n".join([f"## {title}{note}", "", self.description, "", *keys, ""])


@cache
def sections_of(job: str) -> list[KeySection]:
    """Return the sections of a job's YAML, each before its subsections."""
    schema = schema_of(job).model_json_schema(mode="serialization")  # with durations as in a YAML

    def walk(key: str, kind: str, section: dict[str, Any], defaults: dict[str, Any]) -> Iterator[KeySection]:
        fields = {
            name: {**field, "default": defaults[name]} if name in defaults else field
            for name, field in section["properties"].items()
        }
        keys = list[Key]()
        for name, field in fields.items():
            text = field.get("description", "See below." if "$ref" in field else "Which kind this is.")
            keys.append(Key(name, _type(field), _default(field), _one_line(text)))
        yield KeySection(key, kind, _one_line(section["description"]), tuple(keys))
        for name, field in fields.items():
            children = [(suffix, schema["$defs"][child]) for suffix, child in _sections_in(field)]
            for suffix, child in children:
                tags = [f"{tag}: {value['const']}" for tag, value in child["properties"].items() if "const" in value]
                is_alone = [other for other, _ in children].count(suffix) == 1
                values = field.get("default") if is_alone and not suffix else {}
                place, form = f"{key}.{name}{suffix}".lstrip("."), "" if is_alone else tags[0]
                yield from walk(place, form, child, values if isinstance(values, dict) else {})

    # Several variants of a section may contain the same section.
    return list(dict.fromkeys(walk("", "", schema, {})))


def _sections_in(field: dict[str, Any], suffix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names of the sections that a value may be or contain, with the suffix for the value's key."""
    if "$ref" in field:
        yield suffix, field["$ref"].rpartition("/")[2]
    for choice in field.get("anyOf", field.get("oneOf", ())):
        yield from _sections_in(choice, suffix)
    for name, part in (("items", ".N"), ("additionalProperties", ".NAME")):
        if isinstance(field.get(name), dict):
            yield from _sections_in(field[name], suffix + part)


def _type(field: dict[str, Any]) -> str:
    if choices := field.get("anyOf", field.get("oneOf")):
        return " or ".join(dict.fromkeys(map(_type, choices)))
    if "$ref" in field:
        return "section"
    if values := field.get("enum", [field["const"]] if "const" in field else None):
        return " or ".join(f"`{value}`" for value in values)
    if "format" in field:
        return field["format"]
    least, most = field.get("minItems", field.get("minProperties", 0)), field.get("maxItems")
    length = f" ({most})" if most else f" (at least {least})" if least else ""
    if field.get("type") == "array":
        return f"list{length} of {_type(field['items'])}"
    if field.get("type") == "object":
        values = field["additionalProperties"]
        return "keys with values" if values is True else f"{_type(values)} for each name{length}"
    limits = [
        f"{sign} 2**{limit.bit_length() - 1}" if limit > 10**6 else f"{sign} {limit:g}"
        for name, sign in _LIMITS.items()
        if (limit := field.get(name, _LARGEST)) != _LARGEST
    ]
    return " ".join([_PLAIN[field["type"]] if "type" in field else "any value", " and ".join(limits)]).rstrip()


def _default(field: dict[str, Any]) -> str:
    if "default" not in field:
        return "required"
    value = field["default"]
    if "$ref" in field:
        return "default: its keys' defaults"
    if isinstance(value, float):
        return f"default: `{value:g}`"
    text = yaml.safe_dump(value, default_flow_style=True, width=1000, sort_keys=False).removesuffix("...\n")
    return f"default: `{text.strip()}`"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _description_of_job(job: str) -> str:
    text = sections_of(job)[0].description.partition("`: ")[2]
    return text[0].upper() + text[1:]


def describe_keys(name: str = "") -> str:
    """Return keys as Markdown.

    `name` is a job, a section or a key: `pretrain`, `optimizer`, `optimizer.lr`, `finetune.task`, `lr`, or a middle
    part: `phases`. An empty name lists the sections of all jobs. Raises a UserError with a similar name if none matches.
    """
    if not name:
        sections = {job: dict.fromkeys(section.key for section in sections_of(job) if section.key) for job in JOBS}
        return "\n\n".join(f"{job}: {_description_of_job(job)}\n    {', '.join(sections[job])}" for job in JOBS)
    first, _, rest = name.partition(".")
    jobs, part = ([first], rest) if first in JOBS else (JOBS, name)
    # A section that several jobs share is shown once.
    jobs_of: dict[KeySection, list[str]] = {}
    for job in jobs:
        for section in sections_of(job):
            if keys := tuple(key for key in section.keys if _matches(section.path(key), part)):
                jobs_of.setdefault(section._replace(keys=keys), []).append(job)
    if jobs_of:
        return "\n".join(section.describe(f" (job: {', '.join(jobs)})") for section, jobs in jobs_of.items())
    prefix = f"{first}." if rest and first in JOBS else ""
    sections = [section for job in jobs for section in sections_of(job)]
    known = {f"{prefix}{section.path(key)}" for section in sections for key in section.keys}
    known |= {f"{prefix}{section.key}" for section in sections if section.key}
    near = difflib.get_close_matches(name, sorted({*known, *JOBS}), 1, 0.5)
    hint = f"; did you mean {near[0]}?" if near else ";"
    raise UserError(f"no key or section {name!r}{hint} `biphasic keys` lists the sections")


def _matches(key: str, name: str) -> bool:
    """Return whether `name` is the key or a section that contains it, with or without placeholders (`N`, `NAME`)."""
    short = ".".join(part for part in key.split(".") if part not in ("N", "NAME"))
    return not name or any(f".{name}." in f".{form}." for form in (key, short))


def pages() -> dict[str, str]:
    """Return the pages of docs/reference by file name."""
    index = """# Reference: every key of every job

How YAMLs are read, merged and overridden: [configuration](../configuration.md). In the terminal: `biphasic keys optimizer`.

"""
    written = "Written by `biphasic keys --write docs/reference` from the classes in `src/biphasic/config/`.\n"
    texts = {"README.md": index + "".join(f"- [`{job}`]({job}.md): {_description_of_job(job)}\n" for job in JOBS)}
    for job in JOBS:
        sections = (section.describe() for section in sections_of(job))
        texts[f"{job}.md"] = "\n".join([f"# Keys of `job: {job}`", "", *sections, written])
    return texts
