"""What Biphasic replaces inside other libraries, checked against the installed version (docs/versions.md)."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Any

from biphasic.config.errors import UserError


def require_form(package: str, owner: Any, name: str, replacement: Any) -> Any:
    """Return `owner.name`, which is about to be replaced, if it has the form that the replacement was written for.

    Args:
        package: the library's name on the package index, e.g. `mosaicml-streaming`.
        owner: a module, a class or an object.
        name: of the attribute.
        replacement: a function or method with the same names of parameters, or a value or property of the same type.

    Raises:
        UserError: the attribute does not exist, or has another form.
    """
    missing = object()
    original = getattr(owner, name, missing)
    if original is missing:
        form, expected = "does not exist", _form(replacement)
    elif (form := _form(original)) == (expected := _form(replacement)):
        return original
    path = f"{owner.__name__ if inspect.ismodule(owner) else _path_of(owner)}.{name}"
    raise UserError(
        f"{package} {version(package)}: {path} {form}, but Biphasic replaces one that {expected}: install the version in "
        "requirements.lock (docs/versions.md)"
    )


def _form(attribute: Any) -> str:
    if inspect.isroutine(attribute):
        return f"has the parameters ({', '.join(inspect.signature(attribute).parameters)})"
    return f"is of type {type(attribute).__name__}"


def _path_of(owner: Any) -> str:
    kind = owner if inspect.isclass(owner) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}"
