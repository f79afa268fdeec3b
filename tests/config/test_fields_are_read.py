"""Every key of the schemas is read somewhere in `src/`: a key that nothing reads would silently be ignored."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from biphasic.config.jobs import JOBS, schema_of

SOURCE = Path(__file__).parents[2] / "src"


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The pydantic classes in a type, such as `list[A | B] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is not None or isinstance(annotation, UnionType):
        for argument in get_args(annotation):
            yield from models_in(argument)


def sections() -> set[type[BaseModel]]:
    """Every section of every job."""
    reached: set[type[BaseModel]] = set()
    waiting: list[type[BaseModel]] = [schema_of(job) for job in JOBS]
    while waiting:
        section = waiting.pop()
        if section not in reached:
            reached.add(section)
            waiting += [model for field in section.model_fields.values() for model in models_in(field.annotation)]
    return reached


def names_read() -> set[str]:
    """Names of the attributes that are read."""
    names: set[str] = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
    return names


def test_every_key_is_read() -> None:
    reached = sections()
    assert len(reached) > 30, "the sections are not reached"
    read = names_read()
    unread = {f"{section.__name__}.{name}" for section in reached for name in section.model_fields if name not in read}
    assert not unread
