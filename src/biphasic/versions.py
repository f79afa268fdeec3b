"""Check attributes of other libraries before Biphasic replaces them (docs/versions.md)."""

import inspect
from importlib.metadata import version
from typing import Any

from biphasic.errors import UserError


def require_form(package: str, owner: Any, name: str, replacement: Any) -> Any:
    """Return the original `owner.name`, after checking that `replacement` can replace it.

    Raises a UserError if the attribute does not exist, or has other parameter names or another type. `package` is the
    library's name on the package index, e.g. `mosaicml-streaming`.
    """
    missing = object()
    original = getattr(owner, name, missing)
    if original is missing:
        form, expected = "does not exist", _form(replacement)
    elif (form := _form(original)) == (expected := _form(replacement)):
        return original
    kind = owner if inspect.isclass(owner) else type(owner)
    path = f"{owner.__name__ if inspect.ismodule(owner) else f'{kind.__module__}.{kind.__qualname__}'}.{name}"
    raise UserError(
        f"{package} {version(package)}: {path} {form}, but Biphasic replaces one that {expected}: install the version in "
        "requirements.lock (docs/versions.md)"
    )


def _form(attribute: Any) -> str:
    if inspect.isroutine(attribute):
        return f"has the parameters ({', '.join(inspect.signature(attribute).parameters)})"
    return f"is of type {type(attribute).__name__}"
