"""Base classes and shared field types of the YAML schema."""

import os
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from string import Formatter
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, WithJsonSchema

from biphasic.storage.files import PASSWORD

JOBS = ("pretrain", "finetune", "evaluate", "convert", "tasks", "sweep", "study")
KeyProblems = Iterator[tuple[list[str], str]]
"""Problems found by a check: the affected keys (the most relevant first) and a message for each.

The first key's value is added to messages that begin with `expected` and don't contain what they `got`.
"""


class Section(BaseModel):
    """Base class of YAML sections. Unknown keys are errors, values are not converted, and sections are immutable.

    Each key has a docstring with its meaning, its unit, and the source of its default. The reference is made from
    these, the class's docstring, types and defaults (`biphasic.config.reference`).
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True, use_attribute_docstrings=True
    )

    def is_default(self, name: str) -> bool:
        """Return whether a key has its default value. (Resolved configurations contain the defaults too.)"""
        return getattr(self, name) == type(self).model_fields[name].default

    def require_defaults(self, names: Iterable[str], key: str, others: list[str], message: str) -> KeyProblems:
        """Report the keys among `names` that differ from their defaults. `key` is this section's own key."""
        for name in names:
            if not self.is_default(name):
                yield [f"{key}.{name}", *others], message


def named(name: str) -> WithJsonSchema:
    """Return an annotation with a type's name in the reference."""
    return WithJsonSchema({"format": name})


whole = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
"""An annotation for integers that may be written as `1e9`, which YAML reads as a float. It follows the limits."""
# Integers must fit 64 bits, as arrays, records and other programs expect. Composer and numpy need 32-bit seeds.
Positive = Annotated[int, Field(gt=0, lt=2**63), whole]
Count = Annotated[int, Field(ge=0, lt=2**63), whole]
Seed = Annotated[int, Field(ge=0, lt=2**32), whole]
Share = Annotated[float, Field(gt=0, lt=1)]
Names = Annotated[list[str], Field(min_length=1)]


class Bytes(ByteSize):
    """A number of bytes."""

    # pydantic's accepts any text after the unit, and no `1_000mb`
    byte_string_pattern = r"^\s*((?:\d+_)*\d*\.?\d+)\s*(\w+)?\s*$"
    byte_string_re = re.compile(byte_string_pattern, re.IGNORECASE)


Size = Annotated[Bytes, whole, Field(gt=0, lt=2**63), named("size in bytes, such as `200gb`")]
"""A number of bytes, as an integer or with a unit: `200gb` is 200 * 10**9, `200gib` is 200 * 2**30."""


def matching(pattern: str, expected: str) -> AfterValidator:
    """Annotate strings that match a regular expression; messages describe them as `expected`."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text, re.DOTALL):
            raise ValueError(f"expected {expected}; got {text!r}")
        return text

    return AfterValidator(check)


def template(*names: str, required: str = "") -> AfterValidator:
    """Return an annotation for templates with only these names in braces, without formats, and the `required` one."""

    def check(text: str) -> str:
        try:
            parts = [part[1:] for part in Formatter().parse(text) if part[1] is not None]
            fields = {f"{name}:{form}" if form or conversion else name for name, form, conversion in parts}
        except ValueError as error:
            raise ValueError(f"has unmatched braces ({error}); a literal brace is written twice") from None
        if not {required} - {""} <= fields <= set(names):
            expected = f"expected a text{f' with {{{required}}}' * bool(required)} and no fields, without formats, but "
            raise ValueError(f"{expected}{', '.join(f'{{{name}}}' for name in names)}; got {text!r}")
        return text

    return AfterValidator(check)


def _distinct(values: list[Any]) -> list[Any]:
    for index, value in enumerate(values):
        if value in values[:index]:
            raise ValueError(f"contains {value} twice")
    return values


distinct = AfterValidator(_distinct)
"""An annotation for lists without duplicates."""

Name = Annotated[str, matching(r"[A-Za-z0-9][A-Za-z0-9._-]*", "a name of letters, digits, `.`, `_` and `-`"), named("name")]
"""The name of a run, model or dataset. It must be valid as a file or folder name."""
_home_expanded = AfterValidator(os.path.expanduser)
# URLs with a password match, so that `text_problems` reports them without showing the password.
_PATH = rf"(?![A-Za-z][A-Za-z0-9+.-]*:/).+|{PASSWORD.pattern}.*"
Address = Annotated[
    str,
    _home_expanded,
    matching(rf"{_PATH}|(s3|gs|az|oci|hf)://[^/].*", "a local path, s3://…, gs://…, az://…, oci://…, hf://…"),
    named("path or URL"),
]
"""A local path, `~` being the home folder, or a URL that `biphasic.storage` reads and writes."""
Destination = Annotated[Address, matching(r"(?!hf:).*", "a local path, s3://…, gs://…, az://… or oci://… to write to")]
"""An address to which jobs write. They can't write to the hub."""
LocalPath = Annotated[str, _home_expanded, matching(_PATH, "a local path"), named("local path")]
"""A local folder or file."""


class JobConfig(Section):
    """Base class of the schemas of a complete YAML, one for each job."""

    def problems(self, ranks: int) -> KeyProblems:
        """Yield the combinations of values that can't work with `ranks` processes."""
        yield from ()


def schema_of(job: str) -> type[JobConfig]:
    """Return the class of a job's YAML. Imported here because building a schema's classes takes time."""
    return getattr(import_module(f"biphasic.config.{job}"), f"{job.capitalize()}Config")


class RunConfig(JobConfig):
    """Base class of the schemas of jobs that write to a run folder."""

    job: str
    run_name: Name
    """Name of the run, and of its folder."""
    output: LocalPath = "runs"
    """The run writes to `<output>/<run_name>`."""

    @property
    def run_folder(self) -> Path:
        return Path(self.output) / self.run_name


class ClusterConfig(Section):
    """Where a job's worker processes run: on this machine, or on a Ray cluster."""

    address: str | None = None
    """Null: run on this machine. `auto`: use the Ray cluster that this machine belongs to. Otherwise: an address."""


def within(key: str, section: str) -> bool:
    """Return whether a dotted key is `section` or a key below it."""
    return f"{key}.".startswith(f"{section}.")


def flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested sections, mappings and lists with their dotted keys."""
    if isinstance(value, Section):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, dict | list):
        for name, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flatten(child, f"{key}.{name}".lstrip("."))
    else:
        yield key, value


_MAY_BE_BLANK = {"query_prompt", "document_prompt", "separator", "any_of", "none_of"}


def text_problems(config: JobConfig) -> KeyProblems:
    """Report texts that are empty or only spaces, such as a path or a column's name, and passwords in URLs."""
    for key, value in flatten(config):
        if isinstance(value, str) and PASSWORD.match(value):
            # Configurations are copied to run folders, checkpoints and model cards.
            yield [key], "needs an address without user and password: credentials come from the environment"
        elif isinstance(value, str) and not value.strip() and _MAY_BE_BLANK.isdisjoint(key.split(".")):
            yield [key], "expected a text that is not empty"
