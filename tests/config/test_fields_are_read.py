"""Every key of the schemas is read in `src/`, in a package that imports its section or one that contains it: a key that
nothing reads would silently be ignored."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from biphasic.config.base import JOBS, schema_of

SOURCE = Path(__file__).parents[2] / "src"


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The pydantic classes in a type, such as `list[A | B] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is not None or isinstance(annotation, UnionType):
        for argument in get_args(annotation):
            yield from models_in(argument)


def sections() -> dict[type[BaseModel], set[str]]:
    """Every section of every job, with the modules of the section and of those that contain it."""
    modules: dict[type[BaseModel], set[str]] = {}
    waiting: list[tuple[type[BaseModel], frozenset[str]]] = [(schema_of(job), frozenset()) for job in JOBS]
    while waiting:
        section, above = waiting.pop()
        reached = above | {base.__module__ for base in section.__mro__ if base.__module__.startswith("biphasic.")}
        if not reached <= modules.get(section, set()):
            modules.setdefault(section, set()).update(reached)
            children = [model for field in section.model_fields.values() for model in models_in(field.annotation)]
            waiting += [(child, reached) for child in children]
    return modules


def names_read() -> dict[str, set[str]]:
    """For each module of the schemas: the attributes that it and the packages that import it read."""
    read: dict[str, set[str]] = {}
    readers: dict[str, set[str]] = {}
    for file in SOURCE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        name = ".".join(file.relative_to(SOURCE).with_suffix("").parts)
        package = name if name.startswith("biphasic.config.") else ".".join(name.split(".")[:2])
        attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
        read.setdefault(package, set()).update(attributes)
        # getattr, and keys of a dumped section
        strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        read[package] |= strings if not package.startswith("biphasic.config") else set()
        for module in [name, *(node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module)]:
            readers.setdefault(module, set()).add(package)
    # These sections' values travel in the dataclasses of that module.
    readers["biphasic.config.data"] |= readers["biphasic.data.streams"]
    return {module: set.union(*(read[package] for package in packages)) for module, packages in readers.items()}


def test_every_key_is_read() -> None:
    reached = sections()
    assert len(reached) > 30, "the sections are not reached"
    names = names_read()
    unread = {
        f"{section.__name__}.{name}"
        for section, modules in reached.items()
        for name, field in section.model_fields.items()
        if not any(name in names[module] for module in modules)
        # A form of a section may be recognised by its class alone.
        and len(get_args(field.annotation)) != 1
    }
    assert not unread
