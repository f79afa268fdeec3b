"""Collect the English text of this machine's Python packages, divided into training, validation and test packages.

    python recipes/mini/make_text.py FOLDER

writes into FOLDER

    pretraining.parquet   a row for each source file of the training packages: its docstrings and comments, in order
    docstrings.parquet    the docstrings of all packages: the tasks' examples come from them (make_tasks.py)
    gathered.json         counts and versions; written last

A docstring or block of comments is taken once, however often it occurs, and never if it is also in a validation or test
package: no text that a model is scored on is in `pretraining.parquet`. Source files are read, not imported.
"""

import argparse
import ast
import hashlib
import importlib.metadata
import json
import multiprocessing
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from biphasic.processes import available_cores
from biphasic.storage import open_store, parquet_bytes

sys.path.insert(0, str(Path(__file__).parents[1] / "quickstart"))
from gather import HELD_OUT, MOST_PROCESSES, SHORTEST, normalised, parse, python_files, read_source

_SHORTEST_PIECE = 60
"""In characters: shorter docstrings and comments are mostly labels."""
_MOST_CHARACTERS = 10_000_000
"""Of one package. Only generated clients of web services have more, which say the same of each service."""


class Source(NamedTuple):
    """A source file. `name` starts with the package's."""

    path: Path
    name: str
    package: str


@dataclass(frozen=True)
class Piece:
    """A docstring or a block of consecutive comments. `place` is the definition's name; None: comments."""

    line: int
    text: str
    place: str | None


def source_files() -> list[Source]:
    """Return the source files of all installed packages and of the standard library, ordered by a hash of their names."""
    paths = sysconfig.get_paths()
    files = list[Source]()
    for root, package in ((Path(paths["purelib"]), None), (Path(paths["stdlib"]), "python")):
        for path in python_files(root):
            name = path.relative_to(root).as_posix()
            files.append(Source(path, name, package or name.partition("/")[0].removesuffix(".py")))
    return sorted(files, key=lambda file: _hash(file.name))


def pieces(file: Source) -> list[Piece]:
    """Return the docstrings and comments of a file in order; empty if this version of Python can't parse it."""
    source = read_source(file.path)
    tree = parse(source)
    if tree is None:
        return []
    found, strings = list[Piece](), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.end_lineno is not None:
            strings.update(range(node.lineno, node.end_lineno + 1))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = (ast.get_docstring(node) or "").strip()
            place = "" if isinstance(node, ast.Module) else node.name
            found.append(Piece(node.body[0].lineno if node.body else 0, text, place))
    found += _comments(source, strings)
    return sorted(
        (piece for piece in found if len(piece.text) >= _SHORTEST_PIECE and re.search("[a-z]{3} [a-z]", piece.text)),
        key=lambda piece: piece.line,
    )


def _comments(source: str, strings: set[int]) -> Iterator[Piece]:
    """Yield the blocks of consecutive lines that are only a comment and not in a string (`strings`: its lines)."""
    block = list[str]()
    lines = source.split("\n")
    for number, line in enumerate([*lines, ""], start=1):
        if line.lstrip().startswith("#") and number not in strings:
            block.append(line.lstrip(" \t#").rstrip())
        elif block:
            yield Piece(number - len(block), "\n".join(block).strip(), None)
            block = []


def make_text(folder: Path) -> dict[str, object]:
    """Write the files, and return the content of `gathered.json`."""
    files = source_files()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(available_cores(), MOST_PROCESSES), mp_context=context) as pool:
        read = list(tqdm(pool.map(pieces, files, chunksize=32), total=len(files), desc="sources", unit="file"))
    # Held-out packages first, so that what they share with others is held out.
    order = sorted(range(len(files)), key=lambda at: files[at].package not in HELD_OUT)
    seen, rows, docstrings = set[bytes](), list[dict[str, str]](), list[dict[str, str]]()
    characters = Counter[str]()
    for at in order:
        file, split = files[at], HELD_OUT.get(files[at].package, "train")
        unique = list[str]()
        for piece in read[at]:
            key = hashlib.blake2b(normalised(piece.text).encode("utf-8", "replace"), digest_size=16).digest()
            if key in seen or characters[file.package] + len(piece.text) > _MOST_CHARACTERS:
                continue
            seen.add(key)
            characters[file.package] += len(piece.text)
            unique.append(piece.text)
            if piece.place and len(piece.text) > SHORTEST:
                docstrings.append(
                    {"id": key.hex(), "package": file.package, "split": split, "name": piece.place, "text": piece.text}
                )
        if unique and split == "train":
            rows.append({"id": file.name, "text": "\n\n".join(unique)})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gathered.json").unlink(missing_ok=True)
    for name, table in (("pretraining", rows), ("docstrings", sorted(docstrings, key=lambda row: row["id"]))):
        columns = {column: [_encodable(row[column]) for row in table] for column in table[0]}
        open_store(str(folder)).write(f"{name}.parquet", parquet_bytes(columns, rows_per_group=5000))
    counts = {
        "files": len(rows),
        "characters": sum(len(row["text"]) for row in rows),
        "docstrings": dict(Counter(row["split"] for row in docstrings)),
        "held_out": {name: {"split": split, "version": _version(name)} for name, split in HELD_OUT.items()},
        "characters_by_package": dict(characters.most_common()),
    }
    (folder / "gathered.json").write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
    return counts


def _encodable(text: str) -> str:
    """Return the text without lone surrogates, which some docstrings show and UTF-8 can't."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()


def _version(package: str) -> str | None:
    distributions = importlib.metadata.packages_distributions().get(package)
    return importlib.metadata.version(distributions[0]) if distributions else None


def main(arguments: list[str] | None = None) -> int:
    """Collect the text, and print the counts."""
    parser = argparse.ArgumentParser(description="Collect the docstrings and comments of the installed packages.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    counts = make_text(folder)
    print(f"{folder}: {counts['characters']:,} characters of {counts['files']:,} files; docstrings: {counts['docstrings']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
