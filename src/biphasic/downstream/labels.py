"""Read labels by one rule for all file formats, and convert tagging schemes to BIO.

A label is one of the dataset's label names, compared as text: 1, 1.0 and `1` are one label, as are true and `True`. Where
no name is a number, or the dataset itself declares its names (`ClassLabel`), a whole number is a label's index from 0.
"""

import math
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

from biphasic.downstream.tables import InvalidRow
from biphasic.errors import UserError

_MOST_NAMES = 1000
"""Number of different values above which a column doesn't hold labels."""
_SHOWN = 6
_WHOLE = re.compile(r"(-?(?:0|[1-9]\d*))(\.0+)?", re.ASCII)
"""A number as programs write it. `007` and `+1` are codes, other labels than 7 and 1."""
_FRACTION = re.compile(r"[+-]?\d*\.\d+(e[+-]?\d+)?", re.ASCII)
_PREFIXED, _SUFFIXED = re.compile(r"([BIESULMW])[-_](.+)"), re.compile(r"(.+)[-_]([BIESULMW])")
_BEGINS = "BSUW"
"""Tags of an entity's first or only word in BIO, BIOES (S), BILOU (U) and BMEWO (W). I, E, L and M are inside tags."""
_LARGEST = 3.4028234663852886e38
"""The largest fp32 number."""


def label_text(value: Any, key: str = "the label") -> str:
    """Return a label's text, by which labels are compared; an `InvalidRow` if the value is missing or a list.

    Numbers and booleans have one text in all formats: `1` for 1, 1.0 and `1.0`, and `true` for True and `TRUE`.
    """
    if value is None or value == "" or value != value:  # NaN
        raise InvalidRow(f"{key} is empty")
    if not isinstance(value, str | int | float | Decimal):
        raise InvalidRow(f"{key} is {value!r:.40}, neither a text nor a number")
    text = str(value)
    if isinstance(value, float) and value.is_integer():
        text = str(int(value))
    if whole := _WHOLE.fullmatch(text):
        return str(int(whole[1]))
    return text.lower() if text.lower() in ("true", "false") else text


def id_text(value: Any) -> str:
    """Return an id as text, `1` also for the number 1.0 (of a column with gaps); an empty text if it is missing."""
    if value is None or value != value:  # NaN
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def number(value: Any, what: str) -> float:
    """Return a number that fp32 can hold, given as a number or, as in a CSV file, as text.

    Raises an InvalidRow if it is none, or a boolean, NaN or Inf. `what` describes the value.
    """
    try:
        # float() would read a boolean, and digits with underscores.
        result = math.nan if isinstance(value, bool) or "_" in str(value) else float(value)
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not abs(result) <= _LARGEST:
        raise InvalidRow(f"{what}: {value!r:.40} is not a finite number of 32 bits")
    return result


def whole_number(value: Any, what: str) -> int:
    """Return a whole number that int32 can hold, as `number` does; an `InvalidRow` if it is none."""
    result = number(value, what)
    if not result.is_integer() or not -(2**31) <= result < 2**31:
        raise InvalidRow(f"{what}: {value!r:.40} is not a whole number of 32 bits")
    return int(result)


class Labels:
    """The label names of a dataset in the order of their numbers, and the rule by which a value is one of them.

    `declared` says that the dataset itself names them, so that its values are their indices. `key` names the values'
    column. Raises a UserError if two names are the same label.
    """

    def __init__(self, names: Sequence[str], declared: bool, source: str, key: str):
        self.names, self.declared, self.key = list(names), declared, key
        texts = [label_text(name) for name in names]
        if repeated := [name for name, text in zip(names, texts, strict=True) if texts.count(text) > 1]:
            raise UserError(f"{source}: label_names: {' and '.join(repeated)} are the same label")
        self._numbers = {text: number for number, text in enumerate(texts)}
        self._indexed = declared or not any(re.fullmatch(r"[+-]?[0-9]+", text) for text in texts)

    def number(self, value: Any) -> int:
        """Return a label's number; an `InvalidRow` if it is not one of the names, or their index where that is allowed."""
        text = label_text(value, self.key)
        if (found := None if self.declared else self._numbers.get(text)) is not None:
            return found
        is_whole = not isinstance(value, bool) and _WHOLE.fullmatch(text)
        if self._indexed and is_whole and 0 <= int(text) < len(self.names):
            return int(text)
        shown = ", ".join(self.names[:_SHOWN]) + f", … ({len(self.names)} names)" * (len(self.names) > _SHOWN)
        numbers = f", nor an index from 0 to {len(self.names) - 1}" if self._indexed else ""
        raise InvalidRow(f"the label {value!r:.40} is not one of {shown}{numbers}")


def read_names(values: Iterable[Any], source: str, key: str) -> list[str]:
    """Return the different labels among values, sorted: whole numbers by size, and others as text.

    Missing labels are left out. Raises a UserError if the values are not labels: they are fractions, or there are more
    than 1,000; or two labels differ only by case or spaces. `key` names the key of their column.
    """
    names = set[str]()
    for value in values:
        try:
            text = label_text(value)
        except InvalidRow:
            continue
        names.add(text)
        if _FRACTION.fullmatch(text):
            raise UserError(f"{source}: {key}: {text} is not a label: expected kind: regression, or give label_names")
        if len(names) > _MOST_NAMES:
            problem = f"has more than {_MOST_NAMES:,} different values, such as {text!r:.40}"
            raise UserError(f"{source}: {key}: {problem}: expected labels; label_names allows more")
    similar: dict[str, str] = {}
    for name in sorted(names):
        if (other := similar.setdefault(name.strip().lower(), name)) != name:
            problem = f"the labels {other!r} and {name!r} differ only by case or spaces"
            raise UserError(f"{source}: {key}: {problem}: make them equal, or give label_names")
    return sorted(names, key=int if all(map(_WHOLE.fullmatch, names)) else None)


class TagScheme:
    """How a dataset tags the words of entities, decided from all of its labels, and the conversion to BIO.

    BIO, IOB (`B-` only between neighbors of a type), BIOES, BILOU and BMEWO are recognized with the tag before or after
    the type (`B-PER`, `PER-B`), and plain types (`PER`, `person-other`) as IO, where each run of a type is one entity.
    Raises a UserError if there is no O, or the labels are of several schemes.
    """

    def __init__(self, labels: Iterable[str], source: str):
        types = [label for label in dict.fromkeys(labels) if label != "O"]
        if len(types) == len(set(labels)):
            shown = ", ".join(types[:_SHOWN])
            raise UserError(f"{source}: has no label O, for words outside entities ({shown}): expected BIO labels")
        self.name, parts = "BIO", {label: (label, "entity") for label in types}
        if not types or not set(types) <= set("BIESULMW"):
            self.name, parts = _tags_and_types(types, source)
        self._parts = parts
        self.is_bio = self.name == "BIO" and all(label[:2] in ("B-", "I-") for label in types)

    def to_bio(self, labels: Sequence[str]) -> list[str]:
        """Return a sentence's labels in BIO."""
        converted, before = [], ""
        for label in labels:
            tag, kind = self._parts.get(label, ("", ""))
            converted.append(f"{'B' if tag in _BEGINS or kind != before else 'I'}-{kind}" if tag else "O")
            before = kind
        return converted

    def bio_names(self, labels: Sequence[str]) -> list[str]:
        """Return BIO's names for label names in their order. Names in BIO are kept; `B-` is added where it is missing."""
        names = []
        for label in labels:
            _, kind = self._parts.get(label, ("", ""))
            own = [label] if self.is_bio else [f"{tag}-{kind}" for tag in "BI"] if kind else ["O"]
            names += [f"B-{kind}"] * (self.is_bio and kind != "" and f"B-{kind}" not in labels) + own
        return list(dict.fromkeys(names))


def _tags_and_types(labels: list[str], source: str) -> tuple[str, dict[str, tuple[str, str]]]:
    """Return the scheme's name, and each label's tag and type."""
    prefixed = {label: (match[1], match[2]) for label in labels if (match := _PREFIXED.fullmatch(label))}
    suffixed = {label: (match[2], match[1]) for label in labels if (match := _SUFFIXED.fullmatch(label))}
    schemes = []
    if {tag for tag, _ in prefixed.values()} & set("BISUW"):  # `E-mail` alone is a type
        is_bio = all(label[:2] in ("B-", "I-") for label in labels)
        schemes.append(("BIO" if is_bio else "tags before the types", prefixed))
    begun = {kind for tag, kind in suffixed.values() if tag == "B"}
    if any(kind in begun and tag not in _BEGINS for tag, kind in suffixed.values()):  # `hepatitis-B` alone is a type
        schemes.append(("tags after the types", suffixed))
    for name, parts in schemes:
        if len(parts) < len(labels):
            other = min(label for label in labels if label not in parts)
            problem = f"some labels have BIO's tags, such as {min(parts)}, and others have none, such as {other}"
            raise UserError(f"{source}: {problem}: expected labels of one scheme")
        return name, parts
    return ("IO" if labels else "BIO"), {label: ("I", label) for label in labels}
