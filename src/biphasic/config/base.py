"""What the schema's sections share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from biphasic.amounts import bytes_of


class Section(BaseModel):
    """A part of a YAML: unknown keys are errors, values keep the type they were written in, nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=False)


Share = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]


def _size(text: str) -> str:
    bytes_of(text)
    return text


Size = Annotated[str, AfterValidator(_size)]
"""Bytes, such as `200gb`."""

Found = Iterator[tuple[list[str], str]]
"""What is wrong: the keys concerned, the first one first, and what was expected."""


def changed(section: Section, name: str) -> bool:
    """Whether a key says something: a default that is written out, as in a resolved configuration, says nothing."""
    return getattr(section, name) != type(section).model_fields[name].default
