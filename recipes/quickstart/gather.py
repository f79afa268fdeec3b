"""English text that is on every machine: the docstrings of Python's standard library and of the installed packages.

Writes into a folder, by default `runs/quickstart/text/`:

    documents.parquet     the docstrings, in FineWeb-Edu's columns
    pairs/train.parquet   id, query, positive, negatives (none): a docstring's summary line and the rest of it
    pairs/test.parquet    the same, from the documents of the conversion's validation split
    pairs/task.json       the record that fine-tuning reads (see docs/tasks.md)
    gathered.json         counts; written last

It reads source files, and imports none of the packages. The text is prose about software: enough to see losses fall, but
not to compare models.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import re
import sysconfig
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from biphasic.config.convert import ConvertConfig, FilesSource
from biphasic.config.load import load_job
from biphasic.conversion.packing import document_number, in_validation
from biphasic.downstream.writer import TASK_RECORD
from biphasic.storage import json_bytes, open_store, write_parquet

YAML = Path(__file__).parents[2] / "yamls" / "data" / "quickstart.yaml"
"""The conversion of this text."""
_ROWS_PER_GROUP = 5000
PACKAGES = (
    "composer",
    "datasets",
    "fsspec",
    "huggingface_hub",
    "joblib",
    "matplotlib",
    "mteb",
    "networkx",
    "numpy",
    "omegaconf",
    "pandas",
    "pyarrow",
    "pydantic",
    "scipy",
    "sentence_transformers",
    "sklearn",
    "streaming",
    "sympy",
    "torch",
    "torchmetrics",
    "torchvision",
    "transformers",
)
"""Packages of the lock file whose documentation is written by people, not generated."""
SKIPPED = {"test", "tests", "testing", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
"""Folders with much code and little prose."""
SHORTEST = 200
"""In characters: shorter docstrings are mostly labels."""
_PAIR_WORDS, _PAIR_CHARACTERS = 4, 100
_PROCESSES = 2


@dataclass(frozen=True)
class Docstring:
    """A docstring: `place` is `package/module.py::Class.method`, `package` its name and version."""

    place: str
    package: str
    text: str

    @property
    def id(self) -> str:
        """A hash of the text."""
        return hashlib.blake2b(self.text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def gather(folder: Path, validation_fraction: float) -> dict[str, Any]:
    """Write the files.

    Args:
        folder: created if it does not exist.
        validation_fraction: of the conversion, so that test pairs come from documents that are not trained on.

    Returns:
        The content of `gathered.json`.
    """
    start = time.monotonic()
    documents = unique(read_all(source_files()))
    train, test = pairs(documents, validation_fraction)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gathered.json").unlink(missing_ok=True)
    write_parquet(folder / "documents.parquet", _document_columns(documents), _ROWS_PER_GROUP)
    for name, columns in (("train", train), ("test", test)):
        columns = {**columns, "negatives": _none(len(columns["id"]))}
        write_parquet(folder / "pairs" / f"{name}.parquet", columns, _ROWS_PER_GROUP)
    rows = {"train": len(train["id"]), "test": len(test["id"])}
    record = {"task": "docstrings", "kind": "retrieval", "license": "of the packages", "rows": rows}
    open_store(str(folder / "pairs")).write(TASK_RECORD, json_bytes(record))
    counts = {
        "documents": len(documents),
        "characters": sum(len(document.text) for document in documents),
        "train_pairs": len(train["id"]),
        "test_pairs": len(test["id"]),
        "validation_fraction": validation_fraction,
        "packages": sorted({document.package for document in documents}),
        "seconds": round(time.monotonic() - start, 1),
    }
    (folder / "gathered.json").write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
    return counts


def source_files() -> list[tuple[Path, str, str]]:
    """All source files: path, name relative to the package's parent, and the package with its version."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    roots = [(stdlib, stdlib, f"python {sysconfig.get_python_version()}")]
    distributions = importlib.metadata.packages_distributions()
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            root = Path(next(iter(spec.submodule_search_locations)))
            version = importlib.metadata.version(distributions[name][0]) if name in distributions else "?"
            roots.append((root, root.parent, f"{name} {version}"))
    files = []
    for root, parent, package in roots:
        files += [(path, path.relative_to(parent).as_posix(), package) for path in python_files(root)]
    return sorted(files, key=lambda file: (file[2], file[1]))


def python_files(root: Path) -> Iterator[Path]:
    """Yield the Python files below a folder, without those of the folders in `SKIPPED`."""
    for directory, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        yield from (Path(directory, name) for name in names if name.endswith(".py"))


def read_all(files: list[tuple[Path, str, str]]) -> Iterator[Docstring]:
    """The docstrings of all files, in the files' order, read by two processes."""
    from tqdm import tqdm

    context = multiprocessing.get_context("spawn")  # a fork copies whatever threads the caller holds
    with ProcessPoolExecutor(_PROCESSES, mp_context=context) as pool:
        results = pool.map(docstrings, files, chunksize=32)
        for result in tqdm(results, total=len(files), desc="docstrings", unit="file"):
            yield from result


def docstrings(file: tuple[Path, str, str]) -> list[Docstring]:
    """The docstrings of one file that are long enough; empty if it can't be parsed by this version of Python."""
    path, name, package = file
    source, result = read_source(path), list[Docstring]()
    tree = parse(source) if '"""' in source or "'''" in source else None
    if tree is not None:
        _collect(tree, name, "", package, result)
    return result


def read_source(path: Path) -> str:
    """Return a file's text; empty if it can't be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def parse(source: str) -> ast.Module | None:
    """Return the syntax tree; None if this version of Python can't parse the source."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _collect(node: ast.AST, name: str, qualified: str, package: str, result: list[Docstring]) -> None:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = (ast.get_docstring(node) or "").strip()  # get_docstring cleans as inspect.cleandoc does
        if len(text) > SHORTEST:
            result.append(Docstring(f"{name}::{qualified}" if qualified else name, package, text))
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            _collect(child, name, f"{qualified}.{child.name}".strip("."), package, result)
        elif isinstance(child, ast.If | ast.Try | ast.With):
            _collect(child, name, qualified, package, result)


def normalised(text: str) -> str:
    """The text in lower case, with one space in place of white space and punctuation."""
    return re.sub(r"\W+", " ", text.casefold()).strip()


def unique(documents: Iterator[Docstring]) -> list[Docstring]:
    """The documents whose normalised text no earlier document has."""
    seen: dict[bytes, Docstring] = {}
    for document in documents:
        key = hashlib.blake2b(normalised(document.text).encode("utf-8", "replace"), digest_size=16).digest()
        seen.setdefault(key, document)
    return list(seen.values())


def pair_of(document: Docstring) -> tuple[str, str] | None:
    """The summary line and the text below it; None for docstrings of another form.

    The summary is the first line, if it is a paragraph of its own (PEP 257), or ends its sentence; without the full stop.
    """
    first, _, rest = document.text.partition("\n")
    alone = rest.startswith("\n") or first.rstrip().endswith(".")
    query, positive = first.strip().rstrip(".").strip(), rest.strip()
    one_sentence = re.search(r"[.!?]\s+[A-Z]", query) is None and not query.endswith(":")
    words = [word for word in query.split() if re.search("[A-Za-z]{2}", word)]
    if alone and one_sentence and len(words) >= _PAIR_WORDS and len(positive) >= _PAIR_CHARACTERS:
        return query, positive
    return None


def pairs(documents: list[Docstring], validation_fraction: float) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Retrieval pairs from the training and from the held-out documents, as columns.

    A query or a body whose normalised text occurs more than once is left out everywhere: of two bodies for one query,
    neither would be the only right answer.
    """
    candidates = [(document, pair) for document in documents if (pair := pair_of(document)) is not None]
    queries = Counter(normalised(query) for _, (query, _) in candidates)
    positives = Counter(normalised(positive) for _, (_, positive) in candidates)
    train: dict[str, list[str]] = {"id": [], "query": [], "positive": []}
    test: dict[str, list[str]] = {"id": [], "query": [], "positive": []}
    for document, (query, positive) in candidates:
        if queries[normalised(query)] == 1 and positives[normalised(positive)] == 1:
            columns = test if in_validation(document_number(document.id), validation_fraction) else train
            for name, value in (("id", document.id), ("query", query), ("positive", positive)):
                columns[name].append(value)
    return train, test


def _document_columns(documents: list[Docstring]) -> dict[str, Any]:
    """FineWeb-Edu's columns. Those that only a crawl or a classifier could fill are null."""
    import pyarrow as pa

    nothing = [None] * len(documents)
    return {
        "text": [document.text for document in documents],
        "id": [document.id for document in documents],
        "dump": [document.package for document in documents],
        "url": pa.array(nothing, pa.string()),
        "file_path": [document.place for document in documents],
        "language": ["en"] * len(documents),
        "language_score": pa.array(nothing, pa.float64()),
        "token_count": [round(len(document.text) / 4) for document in documents],  # about four characters to a token
        "score": pa.array(nothing, pa.float64()),
        "int_score": pa.array(nothing, pa.int64()),
    }


def _none(count: int) -> Any:
    import pyarrow as pa

    return pa.array([[]] * count, pa.list_(pa.string()))


def main(arguments: list[str] | None = None) -> int:
    """Gather the text, and print the counts."""
    parser = argparse.ArgumentParser(description="Gather the docstrings of the installed packages as a text corpus.")
    parser.add_argument("folder", nargs="?", type=Path, help="default: where yamls/data/quickstart.yaml reads")
    options = parser.parse_args(arguments)
    config = load_job(ConvertConfig, YAML)
    assert isinstance(config.source, FilesSource)
    folder = options.folder or Path(config.source.paths[0]).parent
    counts = gather(folder, config.validation_fraction)
    print(
        f"{folder}: {counts['documents']:,} docstrings, {counts['characters'] / 1e6:.1f} million characters, "
        f"{counts['train_pairs']:,} training and {counts['test_pairs']:,} test pairs, {counts['seconds']} s"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
