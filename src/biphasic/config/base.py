"""Base classes and shared field types of the YAML schema."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from biphasic.storage.paths import PASSWORD

KeyProblems = Iterator[tuple[list[str], str]]
"""Problems found by a check: for each, the affected keys (the most relevant first) and a message."""


class Section(BaseModel):
    """Base class of YAML sections. Unknown keys are errors, values are not converted, and sections are immutable.

    Each key has a docstring with what it is, its unit, and the source of its default. With the class's docstring, the types
    and the defaults it becomes the reference (`biphasic.config.reference`).
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        validate_default=False,
        allow_inf_nan=False,
        defer_build=True,
        use_attribute_docstrings=True,
    )

    def is_default(self, name: str) -> bool:
        """Return whether a key has its default value. (A resolved configuration also lists the defaults.)"""
        return getattr(self, name) == type(self).model_fields[name].default

    def require_defaults(self, names: Iterable[str], key: str, others: list[str], message: str) -> KeyProblems:
        """Report keys of this section, at `key`, that are set to something else than their default."""
        for name in names:
            if not self.is_default(name):
                yield [f"{key}.{name}", *others], message


def named(name: str) -> WithJsonSchema:
    """Return an annotation with the name of a type in the reference."""
    return WithJsonSchema({"format": name})


# Integers must fit 64 bits, as arrays, records and other programs expect. Composer and numpy need 32-bit seeds.
Positive = Annotated[int, Field(gt=0, lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Share = Annotated[float, Field(gt=0, lt=1)]

_SIZE = re.compile(r"(\d[\d_]*(?:\.\d+)?)\s*(b|kb|mb|gb|tb|pb)", re.IGNORECASE)
_SIZE_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15}


def parse_size(value: object) -> int:
    """Return the bytes of a size such as `200gb`, or of an integer; raise a ValueError for anything else."""
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None:
        return int(float(match[1].replace("_", "")) * _SIZE_UNITS[match[2].lower()])
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"expected a size such as 200gb; got {value!r}")


Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0, lt=2**63), named("size in bytes, such as `200gb`")]
"""A number of bytes, as an integer or with a decimal unit: `200gb` is 200 * 10**9."""


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text):
        raise ValueError(f"expected a name of letters, digits, `.`, `_` and `-`; got {text!r}")
    return text


Name = Annotated[str, AfterValidator(_name), named("name")]
"""The name of a run, model or dataset. It must be valid as a file or folder name."""


def _address(text: str, *schemes: str) -> str:
    is_url = re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", text) and not PASSWORD.match(text)
    if not text or (is_url and not any(re.match(rf"{scheme}://[^/]", text) for scheme in schemes)):
        urls = "".join(f", {scheme}://…" for scheme in schemes)
        raise ValueError(f"expected a local path{urls}; got {text!r}")
    return text


Address = Annotated[
    str, AfterValidator(lambda text: _address(text, "s3", "gs", "az", "oci", "hf")), named("path or URL")
]
"""A local path, or a URL that `biphasic.storage` reads and writes."""
LocalPath = Annotated[str, AfterValidator(_address), named("local path")]
"""A local folder or file."""


class JobConfig(Section):
    """Base class of the schemas of a complete YAML, one for each job."""

    def problems(self, ranks: int) -> KeyProblems:
        """Check combinations of values for a run of `ranks` processes."""
        yield from ()


class RunConfig(JobConfig):
    """Base class of the schemas of jobs that write to a run folder."""

    job: str
    run_name: Name
    """Name of the run, and of its folder."""
    output: LocalPath = "runs"
    """The run writes to `<output>/<run_name>`."""

    @property
    def run_folder(self) -> Path:
        """The folder to which the run writes."""
        return Path(self.output) / self.run_name


class ClusterConfig(Section):
    """Where a job's worker processes run: on this machine, or on a Ray cluster."""

    address: str | None = None
    """Null: run on this machine. `auto`: use the Ray cluster that this machine belongs to. Otherwise: an address."""
    shared_folder: bool = False
    """Whether all nodes of the cluster see the same local sources and outputs."""

    def problems(self) -> KeyProblems:
        """Check combinations of values."""
        if self.shared_folder and self.address is None:
            yield ["cluster.shared_folder", "cluster.address"], "has no effect on one machine: cluster.address is null"


def flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested sections, mappings and lists by their dotted keys."""
    if isinstance(value, Section):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, dict | list):
        for name, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flatten(child, f"{key}.{name}".lstrip("."))
    else:
        yield key, value


def secret_problems(config: JobConfig) -> KeyProblems:
    """Report passwords in URLs, because the configuration is copied to the run folder, checkpoints and model card."""
    for key, value in flatten(config):
        if isinstance(value, str) and PASSWORD.match(value):
            yield [key], "expected an address without user and password: credentials come from the environment"
