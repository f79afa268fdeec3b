"""The reference of all keys: types, limits, defaults and descriptions, from the JSON schemas that pydantic makes."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic.json_schema import GenerateJsonSchema

from biphasic.config.durations import Duration
from biphasic.config.jobs import JOBS, schema_of
from biphasic.errors import UserError

_PLAIN = {"string": "text", "boolean": "`true` or `false`", "integer": "integer", "number": "number", "null": "`null`"}
_LIMITS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
_KIND = "Which kind this is."
"""Description of the keys that distinguish jobs, and forms of a section."""
_LARGEST = 2**63
"""Limits from here on are those of 64-bit integers, which every number has."""


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


class _JsonSchema(GenerateJsonSchema):
    """Writes a duration's default as in a YAML."""

    def encode_default(self, dft: Any) -> Any:
        """See pydantic."""
        return str(dft) if isinstance(dft, Duration) else super().encode_default(dft)


def sections_of(job: str) -> list[KeySection]:
    """Return the sections of a job's YAML, each before those inside it."""
    schema = schema_of(job).model_json_schema(schema_generator=_JsonSchema)
    sections: dict[str, Any] = schema.get("$defs", {})

    def walk(key: str, kind: str, section: dict[str, Any], defaults: dict[str, Any]) -> Iterator[KeySection]:
        fields = {name: dict(field) for name, field in section["properties"].items()}
        for name in fields.keys() & defaults.keys():
            fields[name]["default"] = defaults[name]
        keys = (
            Key(name, _type(field), _default(field, sections), _one_line(field.get("description", _KIND)))
            for name, field in fields.items()
        )
        yield KeySection(job, key, kind, _one_line(section["description"]), tuple(keys))
        for name, field in fields.items():
            children = list(_sections_in(field))
            for suffix, child in children:
                is_alone = [other for other, _ in children].count(suffix) == 1
                values = field.get("default") if is_alone and not suffix else {}
                place, form = f"{key}.{name}{suffix}".lstrip("."), "" if is_alone else _kind(sections[child])
                yield from walk(place, form, sections[child], values if isinstance(values, dict) else {})

    # Several forms of a section may contain the same section.
    return list(dict.fromkeys(walk("", "", schema, {})))


def _sections_in(field: dict[str, Any], suffix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names of the sections that a value may be or contain, each with what follows the value's key."""
    if "$ref" in field:
        yield suffix, field["$ref"].rpartition("/")[2]
    for choice in field.get("anyOf", field.get("oneOf", ())):
        yield from _sections_in(choice, suffix)
    for name, part in (("items", ".N"), ("additionalProperties", ".NAME")):
        if isinstance(field.get(name), dict):
            yield from _sections_in(field[name], suffix + part)


def _kind(section: dict[str, Any]) -> str:
    """Return the key and value that distinguish a form of a section, e.g. `kind: files`."""
    return next(f"{name}: {field['const']}" for name, field in section["properties"].items() if "const" in field)


def _type(field: dict[str, Any]) -> str:
    """Return a type and its limits as Markdown."""
    if choices := field.get("anyOf", field.get("oneOf")):
        return " or ".join(dict.fromkeys(map(_type, choices)))
    if "$ref" in field:
        return "section"
    if values := field.get("enum", [field["const"]] if "const" in field else None):
        return " or ".join(f"`{value}`" for value in values)
    if "format" in field:
        return field["format"]
    if field.get("type") == "array":
        return f"list{_length(field.get('minItems', 0), field.get('maxItems'))} of {_type(field['items'])}"
    if field.get("type") == "object":
        values = field["additionalProperties"]
        least = _length(field.get("minProperties", 0), None)
        return "keys with values" if values is True else f"{_type(values)} for each name{least}"
    limits = [
        f"{sign} 2**{limit.bit_length() - 1}" if limit > 10**6 else f"{sign} {limit:g}"
        for name, sign in _LIMITS.items()
        if (limit := field.get(name, _LARGEST)) != _LARGEST
    ]
    return " ".join([_PLAIN[field["type"]] if "type" in field else "any value", " and ".join(limits)]).rstrip()


def _length(least: int, most: int | None) -> str:
    """Return the limits of the number of elements, e.g. ` (at least 1)`."""
    if most is not None:
        return f" ({least} to {most})" if least != most else f" ({most})"
    return f" (at least {least})" if least else ""


def _default(field: dict[str, Any], sections: dict[str, Any]) -> str:
    if "default" not in field:
        return "required"
    value = field["default"]
    if isinstance(value, dict) and (children := list(_sections_in(field))) and children[0][0] == "":
        own = next(
            sections[name]["properties"] for _, name in children if value.keys() <= sections[name]["properties"].keys()
        )
        value = {name: given for name, given in value.items() if own[name].get("default", own) != given}
        return _yaml(value) if value else "its keys' defaults"
    return _yaml(value)


def _yaml(value: Any) -> str:
    if isinstance(value, float):
        return f"`{value:g}`"
    text = yaml.safe_dump(value, default_flow_style=True, width=1000, sort_keys=False).removesuffix("...\n")
    return f"`{text.strip()}`"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _description_of_job(job: str) -> str:
    """Return the description of a job without the job's name, which the title has."""
    text = sections_of(job)[0].description.partition("`: ")[2]
    return text[0].upper() + text[1:]


def describe_keys(name: str = "") -> str:
    """Return keys as text for a terminal.

    Args:
        name: a job, a section or a key: `pretrain`, `optimizer`, `optimizer.lr`, `finetune.task`, `lr`. A part in the
            middle is enough: `phases`. Without it, the sections of all jobs are listed.

    Raises:
        UserError: there is no such section or key. The message names similar ones.
    """
    sections = [section for job in JOBS for section in sections_of(job)]
    if not name:
        lines = ["biphasic keys SECTION, such as `biphasic keys pretrain.optimizer` or `biphasic keys optimizer.lr`"]
        for job in JOBS:
            keys = dict.fromkeys(section.key for section in sections if section.job == job and section.key)
            lines += ["", f"{job}: {_description_of_job(job)}", *([f"    {', '.join(keys)}"] if keys else [])]
        return "\n".join(lines)
    job, _, rest = name.partition(".")
    own = [(section, rest) for section in sections if section.job == job]
    texts: dict[str, list[str]] = {}
    for wanted in (own, [(section, name) for section in sections]):
        for section, part in wanted:
            if keys := [key for key in section.keys if _matches(f"{section.key}.{key.name}", part)]:
                # Jobs may share a section: it is shown once, for all of them.
                texts.setdefault(_terminal(section, keys), []).append(section.job)
        if texts:
            return "\n\n".join(text.replace("JOBS", ", ".join(jobs), 1) for text, jobs in texts.items())
    known = {f"{section.key}.{key.name}".lstrip(".") for section in sections for key in section.keys}
    near = difflib.get_close_matches(name, sorted({*known, *JOBS}), 3, 0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ";"
    raise UserError(f"no key or section {name!r}{hint} `biphasic keys` lists the sections")


def _matches(key: str, name: str) -> bool:
    """Return whether `name` is the key, or a section that it is in; placeholders for names and indices may be left out."""
    short = ".".join(part for part in key.split(".") if part not in ("N", "NAME"))
    return not name or any(f".{name}." in f".{form}." for form in (key, short))


def _terminal(section: KeySection, keys: list[Key]) -> str:
    kind = f", {section.kind}" if section.kind else ""
    lines = [f"{section.key or 'at the top'}{kind}  (job: JOBS)", *textwrap.wrap(section.description, 100)]
    for key in keys:
        default = key.default if key.default == "required" else f"default: {key.default}"
        lines += ["", f"  {key.name}  ({key.type}; {default})"]
        lines += textwrap.wrap(key.description, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines).replace("`", "")


def pages() -> dict[str, str]:
    """Return the pages of docs/reference by file name."""
    jobs = [f"| [`{job}`]({job}.md) | {_description_of_job(job)} |" for job in JOBS]
    index = [
        "# Reference: every key of every job",
        "",
        "How YAMLs are read, merged and overridden: [configuration](../configuration.md). In the terminal:",
        "`biphasic keys optimizer`.",
        "",
        "| `job:` | |",
        "|-|-|",
        *jobs,
    ]
    return {"README.md": "\n".join(index) + "\n", **{f"{job}.md": _page(job) for job in JOBS}}


def _page(job: str) -> str:
    lines = list[str]()
    for section in sections_of(job):
        title = f"## {section.title}" if section.key else f"# Keys of `job: {job}`"
        lines += [title, "", section.description if section.key else _description_of_job(job), ""]
        lines += ["| key | type | default | what it is |", "|-|-|-|-|"]
        for key in section.keys:
            cells = (cell.replace("|", "\\|") for cell in (key.type, key.default, key.description))
            lines.append(f"| `{key.name}` | {' | '.join(cells)} |")
        lines.append("")
    lines.append("Written by `biphasic keys --write docs/reference` from the classes in `src/biphasic/config/`.")
    return "\n".join(lines) + "\n"
