"""What the schema's sections share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A part of a YAML: unknown keys are errors, values keep the type they were written in, nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=False)


Share = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
