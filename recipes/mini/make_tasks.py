"""Make the mini study's text and its four tasks from the quickstart's docstrings.

Reads the folder that recipes/quickstart/gather.py writes, and adds:

    pretraining.parquet                 the docstrings of the training files
    sources/<task>/<split>.parquet      tables that tasks.yaml prepares for fine-tuning

The source files are divided into training, validation and test files by a hash of their names, so that no validation or test
text was read in pretraining or fine-tuning. The tasks are

    retrieval     a docstring's summary line finds the rest of it
    package       which package a docstring comes from; the names of the packages are masked
    parameters    which words are a parameter's name, which its type; the markup that says it is removed
    questions     the question is a parameter's name, and the answer its description, in the text of all parameters
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from sections import Parameter, parameters

from biphasic.storage import write_parquet

SPLITS = {"train": 0.8, "validation": 0.08, "test": 0.12}
"""Shares of the source files."""
EVALUATED = {"validation": 400, "test": 800}
"""Largest number of examples of a split that is scored, to limit a trial's time. Retrieval: of queries."""
PACKAGES = ("matplotlib", "networkx", "python", "scipy", "sklearn", "sympy", "torch", "transformers")
"""The labels of the task `package`: the packages with most docstrings."""
ALIASES = (
    *(
        "composer",
        "datasets",
        "fsspec",
        "huggingface",
        "joblib",
        "mpl",
        "mteb",
        "np",
        "numpy",
        "nx",
        "omegaconf",
        "pandas",
    ),
    *("pd", "plt", "pyarrow", "pydantic", "pylab", "scikit", "sentence_transformers", "sp", "streaming", "sympify"),
    *("torchmetrics", "torchvision", "huggingface_hub", "pyplot"),
)
"""Other names that tell the package, masked as well."""
MASK = "x"
_WORDS_OF_PACKAGE = 60
_WORDS_OF_TOKENS = 50
_WORDS_OF_ANSWER = 15
_NAMES = re.compile(
    rf"\b\w*(?:{'|'.join(name for name in (*PACKAGES, *ALIASES) if len(name) > 3)})\w*|\b(?:mpl|np|nx|pd|plt|sp)\b",
    re.IGNORECASE,
)
TAGS = ("O", "B-NAME", "B-TYPE", "I-TYPE")

Row = dict[str, Any]


@dataclass(frozen=True)
class Document:
    """A docstring."""

    id: str
    package: str
    split: str
    text: str


def split_of(file: str) -> str:
    """Return the split of a source file, by a hash of its name."""
    position = int.from_bytes(hashlib.blake2b(file.encode(), digest_size=8).digest()) / 2**64
    for split, share in SPLITS.items():
        if position < share:
            return split
        position -= share
    return "test"


def read_documents(file: Path) -> list[Document]:
    """Return the gathered docstrings, ordered by id, which is a hash."""
    rows = pq.read_table(file, columns=["id", "dump", "file_path", "text"]).to_pylist()
    documents = [
        Document(row["id"], row["dump"].split()[0], split_of(row["file_path"].split("::")[0]), row["text"])
        for row in rows
    ]
    return sorted(documents, key=lambda document: document.id)


def package_examples(documents: Sequence[Document]) -> Iterator[Row]:
    """Yield docstrings with masked names and the number of their package, equally many of each package in a split."""
    chosen: dict[tuple[str, str], list[Document]] = {}
    for document in documents:
        if document.package in PACKAGES:
            chosen.setdefault((document.split, document.package), []).append(document)
    for split in SPLITS:
        count = min(len(chosen.get((split, package), [])) for package in PACKAGES)
        rows = [document for package in PACKAGES for document in chosen.get((split, package), [])[:count]]
        for document in sorted(rows, key=lambda document: document.id):
            text = " ".join(_NAMES.sub(MASK, document.text).split()[:_WORDS_OF_PACKAGE])
            yield {"split": split, "id": document.id, "text": text, "label": PACKAGES.index(document.package)}


def parameter_examples(documents: Sequence[Document]) -> Iterator[Row]:
    """Yield the words of docstrings' parameters with the tags of names and types."""
    for document, chosen in _with_parameters(documents):
        tokens, labels = list[str](), list[int]()
        for parameter in chosen:
            tokens += [parameter.name, *parameter.type, *parameter.description]
            tags = ["B-NAME", "B-TYPE", *["I-TYPE"] * (len(parameter.type) - 1), *["O"] * len(parameter.description)]
            labels += [TAGS.index(tag) for tag in tags]
        yield {"split": document.split, "id": document.id, "tokens": tokens, "labels": labels}


def question_examples(documents: Sequence[Document]) -> Iterator[Row]:
    """Yield a question for one parameter of each docstring, chosen by the docstring's id."""
    for document, chosen in _with_parameters(documents):
        context, spans = "", list[tuple[str, str, int]]()
        for parameter in chosen:
            context += " ".join([parameter.name, *parameter.type]) + " "
            description = " ".join(parameter.description)
            spans.append((parameter.name, description, len(context)))
            context += description + " "
        name, description, start = spans[int(document.id[:8], 16) % len(spans)]
        answers = {"text": [description], "answer_start": [start]}
        yield {
            "split": document.split,
            "id": document.id,
            "question": name,
            "context": context.strip(),
            "answers": answers,
        }


def _with_parameters(documents: Sequence[Document]) -> Iterator[tuple[Document, list[Parameter]]]:
    """Yield documents with at least two different parameters, and the first of these, up to a number of words."""
    seen: set[tuple[Parameter, ...]] = set()
    for document in documents:
        chosen, length = list[Parameter](), 0
        for parameter in parameters(document.text):
            description = parameter.description[:_WORDS_OF_ANSWER]
            length += 1 + len(parameter.type) + len(description)
            if length > _WORDS_OF_TOKENS:
                break
            chosen.append(Parameter(parameter.name, parameter.type, description))
        if len({parameter.name for parameter in chosen}) == len(chosen) > 1 and tuple(chosen) not in seen:
            seen.add(tuple(chosen))
            yield document, chosen


def write_retrieval(documents: Sequence[Document], gathered: Path, folder: Path) -> dict[str, int]:
    """Write the tables of the retrieval task, and return the number of pairs or queries of each split.

    The tables of queries and documents have those of all validation and test files; tasks.yaml keeps the judged ones.
    """
    splits = {document.id: document.split for document in documents}
    pairs = [
        row for name in ("train", "test") for row in pq.read_table(gathered / "pairs" / f"{name}.parquet").to_pylist()
    ]
    by_split = {split: [pair for pair in pairs if splits[pair["id"]] == split] for split in SPLITS}
    held_out = [*by_split["validation"], *by_split["test"]]
    tables: dict[str, list[Row]] = {
        "train": [{"query": pair["query"], "positive": pair["positive"]} for pair in by_split["train"]],
        "queries": [{"_id": pair["id"], "text": pair["query"]} for pair in held_out],
        "corpus": [{"_id": pair["id"], "text": pair["positive"]} for pair in held_out],
    }
    for split, count in EVALUATED.items():
        judged = by_split[split][:count]
        tables[split] = [{"query-id": pair["id"], "corpus-id": pair["id"], "score": 1} for pair in judged]
    for name, rows in tables.items():
        _write(folder / f"{name}.parquet", rows)
    return {split: len(tables[split]) for split in SPLITS}


def make_tasks(folder: Path) -> dict[str, Mapping[str, int]]:
    """Write all files and return the number of examples by task and split."""
    documents = read_documents(folder / "documents.parquet")
    training = [document for document in documents if document.split == "train"]
    _write(folder / "pretraining.parquet", [{"id": document.id, "text": document.text} for document in training])
    counts: dict[str, Mapping[str, int]] = {"text": Counter(document.split for document in documents)}
    counts["retrieval"] = write_retrieval(documents, folder, folder / "sources" / "retrieval")
    for task, examples in (
        ("package", package_examples),
        ("parameters", parameter_examples),
        ("questions", question_examples),
    ):
        by_split: dict[str, list[Row]] = {split: [] for split in SPLITS}
        for example in examples(documents):
            by_split[example.pop("split")].append(example)
        for split, rows in by_split.items():
            _write(folder / "sources" / task / f"{split}.parquet", rows[: EVALUATED.get(split)])
        counts[task] = {split: len(rows[: EVALUATED.get(split)]) for split, rows in by_split.items()}
    return counts


def _write(file: Path, rows: list[Row]) -> None:
    write_parquet(file, {name: [row[name] for row in rows] for name in rows[0]}, rows_per_group=5000)


def main(arguments: list[str] | None = None) -> int:
    """Make the tasks, and print their sizes."""
    parser = argparse.ArgumentParser(
        description="Make the mini study's text and tasks from the quickstart's docstrings."
    )
    parser.add_argument("folder", type=Path, help="the folder that recipes/quickstart/gather.py has written")
    for task, counts in make_tasks(parser.parse_args(arguments).folder).items():
        print(f"{task}: " + ", ".join(f"{counts[split]:,} {split}" for split in SPLITS))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
