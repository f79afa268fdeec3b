"""English text that is on every machine: the docstrings of Python's standard library and of the installed packages.

Writes into a folder, by default `runs/quickstart/text/`:

    documents.parquet     the docstrings of the training packages, in FineWeb-Edu's columns: the text to pretrain on
    docstrings.parquet    those of all packages, with their split: recipes/mini/make_tasks.py makes examples of them
    pairs/                a retrieval set (docs/tasks.md): a docstring's summary line and the rest of it; queries and
                          documents are of the validation and test packages
    gathered.json         counts; written last

Training, validation and test text comes from different packages; what a training package has in common with one of the
others is held out. It reads source files, and imports none of the packages. The text is prose about software.
"""

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
from biphasic.downstream.writer import TASK_RECORD
from biphasic.processes import available_cores
from biphasic.storage import json_bytes, open_store, parquet_bytes

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
HELD_OUT = {
    **dict.fromkeys(("composer", "huggingface_hub", "networkx", "streaming"), "validation"),
    **dict.fromkeys(("datasets", "pandas", "torchmetrics", "torchvision"), "test"),
}
"""The packages whose text is not trained on, by split: of both styles of docstrings, NumPy's and Google's."""
SPLITS = ("train", "validation", "test")
SKIPPED = {"test", "tests", "testing", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
"""Folders with much code and little prose."""
SHORTEST = 200
"""In characters: shorter docstrings are mostly labels."""
_PAIR_WORDS, _PAIR_CHARACTERS = 4, 100
MOST_PROCESSES = 8
"""More gain little: each takes a second to start, and one process compares what they read."""


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

    @property
    def split(self) -> str:
        """The split of its package."""
        return HELD_OUT.get(self.package.partition(" ")[0], "train")


def gather(folder: Path) -> dict[str, Any]:
    """Write the files into a folder, which is created if it does not exist. Returns the content of `gathered.json`."""
    start = time.monotonic()
    documents = unique(read_all(source_files()))
    training = [document for document in documents if document.split == "train"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gathered.json").unlink(missing_ok=True)
    docstrings = {
        "id": [document.id for document in documents],
        "split": [document.split for document in documents],
        "name": [re.split(r"[.:]", document.place)[-1] for document in documents],
        "text": [document.text for document in documents],
    }
    tables = {"documents": _document_columns(training), "docstrings": docstrings}
    tables |= {f"pairs/{name}": columns for name, columns in retrieval_tables(pairs(documents)).items()}
    rows = {}
    for name, columns in tables.items():
        open_store(str(folder)).write(f"{name}.parquet", parquet_bytes(columns, _ROWS_PER_GROUP))
        rows[name] = len(next(iter(columns.values())))
    pair_rows = {name.removeprefix("pairs/"): count for name, count in rows.items() if name.startswith("pairs/")}
    record = {"task": "docstrings", "kind": "retrieval", "license": "of the packages", "rows": pair_rows}
    open_store(str(folder / "pairs")).write(TASK_RECORD, json_bytes(record))
    counts = {
        "rows": rows,
        "characters": sum(len(document.text) for document in training),
        "packages": {split: sorted({item.package for item in documents if item.split == split}) for split in SPLITS},
        "seconds": round(time.monotonic() - start, 1),
    }
    (folder / "gathered.json").write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
    return counts


def source_files() -> list[tuple[Path, str, str]]:
    """All source files, of held-out packages first: path, name relative to the package's parent, package with version."""
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
    return sorted(files, key=lambda file: (file[2].partition(" ")[0] not in HELD_OUT, file[2], file[1]))


def python_files(root: Path) -> Iterator[Path]:
    """Yield the Python files below a folder, without those of the folders in `SKIPPED`."""
    for directory, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED]
        yield from (Path(directory, name) for name in names if name.endswith(".py"))


def read_all(files: list[tuple[Path, str, str]]) -> Iterator[Docstring]:
    """The docstrings of all files, in the files' order, read by a process for each core, at most `MOST_PROCESSES`."""
    from tqdm import tqdm

    context = multiprocessing.get_context("spawn")  # a fork copies whatever threads the caller holds
    with ProcessPoolExecutor(min(available_cores(), MOST_PROCESSES), mp_context=context) as pool:
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


def pairs(documents: list[Docstring]) -> dict[str, list[tuple[str, str, str]]]:
    """Return id, summary line and rest of the documents that have both, by split.

    A query or a body whose normalised text occurs more than once is left out everywhere: of two bodies for one query,
    neither would be the only right answer.
    """
    candidates = [(document, pair) for document in documents if (pair := pair_of(document)) is not None]
    queries = Counter(normalised(query) for _, (query, _) in candidates)
    positives = Counter(normalised(positive) for _, (_, positive) in candidates)
    by_split: dict[str, list[tuple[str, str, str]]] = {split: [] for split in SPLITS}
    for document, (query, positive) in candidates:
        if queries[normalised(query)] == 1 and positives[normalised(positive)] == 1:
            by_split[document.split].append((document.id, query, positive))
    return by_split


def retrieval_tables(by_split: dict[str, list[tuple[str, str, str]]]) -> dict[str, dict[str, Any]]:
    """Return the tables of a retrieval set by name; the queries search the documents of both held-out splits."""
    held_out = [pair for split in SPLITS[1:] for pair in by_split[split]]
    ids, queries, positives = (list(column) for column in zip(*by_split["train"], strict=True))
    tables: dict[str, dict[str, Any]] = {
        "train": {"id": ids, "query": queries, "positive": positives, "negatives": _none(len(ids))},
        "corpus": {
            "_id": [pair[0] for pair in held_out],
            "title": [""] * len(held_out),
            "text": [pair[2] for pair in held_out],
        },
        "queries": {"_id": [pair[0] for pair in held_out], "text": [pair[1] for pair in held_out]},
    }
    for split in SPLITS[1:]:
        of_split = [pair[0] for pair in by_split[split]]
        tables[f"qrels/{split}"] = {"query-id": of_split, "corpus-id": of_split, "score": [1] * len(of_split)}
    return tables


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
    counts = gather(folder)
    rows = counts["rows"]
    print(
        f"{folder}: {rows['documents']:,} docstrings to pretrain on, {counts['characters'] / 1e6:.1f} million characters; "
        f"{rows['pairs/train']:,} training and {rows['pairs/qrels/test']:,} test pairs, {counts['seconds']} s"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
