"""Parse the parameters of docstrings in NumPy's and Google's styles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_NUMPY_SECTION = re.compile(r"^Parameters\n-{3,}\n(.*?)(?=^[^\n]+\n-{3,}$|\Z)", re.MULTILINE | re.DOTALL)
_NUMPY_ITEM = re.compile(
    r"^(?P<names>\*{0,2}\w+(?:, ?\*{0,2}\w+)*) ?: (?P<type>.+)\n(?P<text>(?:[ \t]+.*\n?|\n)*)", re.MULTILINE
)
_GOOGLE_SECTION = re.compile(r"^(?:Args|Arguments|Parameters):\n((?:[ \t]+.*(?:\n|\Z)|\n)+)", re.MULTILINE)
_GOOGLE_ITEM = re.compile(
    r"^(?P<indent>[ \t]+)(?P<names>\*{0,2}\w+) ?\((?P<type>[^()\n]+)\): ?(?P<text>.*\n?(?:(?P=indent)[ \t]+.*\n?|\n)*)",
    re.MULTILINE,
)
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.'-]*")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function: the words of its name, type and description, without markup."""

    name: str
    type: tuple[str, ...]
    description: tuple[str, ...]
    """The words of the first sentence."""


def parameters(docstring: str) -> list[Parameter]:
    """Return the parameters that have one name, a type and a description, in order."""
    return [
        Parameter(names[0], tuple(kind), tuple(description))
        for names, kind, description in _items(docstring)
        if len(names) == 1 and kind and description
    ]


def words(text: str) -> list[str]:
    """Return the words of a text, without markup and punctuation."""
    return [word.rstrip(".'-") for word in _WORD.findall(text)]


def _items(docstring: str) -> Iterator[tuple[list[str], list[str], list[str]]]:
    for section, item in ((_NUMPY_SECTION, _NUMPY_ITEM), (_GOOGLE_SECTION, _GOOGLE_ITEM)):
        for found in section.finditer(docstring):
            for match in item.finditer(found[1]):
                sentence = re.split(r"(?<=[a-z)`])\.(?:\s|$)", match["text"].strip(), maxsplit=1)[0]
                yield words(match["names"]), words(match["type"]), words(sentence)
