"""Decide by the values of a document's columns whether it is converted (`filters`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from biphasic.config.convert import FilterConfig
from biphasic.errors import UserError

_ARROW_NAMES = {"bool": "true and false", "string": "text", "large_string": "text", "string_view": "text"}


def passes(values: Mapping[str, Any], filters: Sequence[FilterConfig]) -> bool:
    """Return whether a document with these values is kept. Of a list, `any_of` and `none_of` compare each element.

    Raises a UserError if a value can't be compared with a filter's.
    """
    return all(_passes(values.get(condition.column), condition) for condition in filters)


def _passes(value: Any, condition: FilterConfig) -> bool:
    if value is None:
        return False
    low, high, any_of, none_of = condition.min, condition.max, condition.any_of, condition.none_of or []
    try:
        in_range = (low is None or value >= low) and (high is None or value <= high)
    except TypeError:
        raise UserError(f"filters: column {condition.column!r} holds {value!r}; min and max need numbers") from None
    values = [each for each in (value if isinstance(value, list) else [value]) if each is not None]
    for each in values if any_of or none_of else ():
        require_comparable(condition, type_name(each), f", such as {each!r}")
    return in_range and (any_of is None or any(v in any_of for v in values)) and not any(v in none_of for v in values)


def require_comparable(condition: FilterConfig, column_type: str, example: str = "") -> None:
    """Raise a UserError if a filter compares a column of a type (`type_name`) with values of another type."""
    for name in ("any_of", "none_of"):
        for value in getattr(condition, name) or []:
            if (written := type_name(value)) != column_type:
                raise UserError(
                    f"filters: column {condition.column!r} holds {column_type}{example}, and {name} has {written} "
                    f"({json.dumps(value)}): YAML reads words such as no, on, 2013 and 12:30 as text only in quotes"
                )


def type_name(value: Any) -> str:
    """Return what kind of value this is, as the filters' messages say it."""
    if isinstance(value, bool):
        return "true and false"
    if isinstance(value, int | float | Decimal):
        return "numbers"
    return "text" if isinstance(value, str | bytes) else f"values of type {type(value).__name__}"


def arrow_type_name(kind: Any) -> str:
    """Return the `type_name` of the values of an Arrow type, or of those in its lists."""
    import pyarrow as pa

    while pa.types.is_dictionary(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "numbers"
    return _ARROW_NAMES.get(str(kind), f"values of type {kind}")
