"""Make the examples of the mini study's four tasks from the docstrings that make_text.py collects.

    python recipes/mini/make_tasks.py FOLDER [TASK ...]

writes `sources/<task>/<split>.parquet` into FOLDER, the tables that tasks.yaml prepares for fine-tuning. Training,
validation and test examples come from different packages. Without names of tasks it makes all four.

    types         classification: of which kind is a parameter (bool, int, str, ...), from its name and its description?
    parameters    token classification: which words are a parameter's name, which its type? The markup is removed
    questions     question answering: which parameter is of a certain kind? The context is the names and descriptions of a
                  docstring's parameters, the answer the name of the only one of this kind
    retrieval     a docstring's summary line finds the rest of it, in which the words of the summary are masked

In `types` and `questions`, the types are removed, and the words of descriptions that name one. In `retrieval`, the two parts
of an example have no word in common but frequent ones. baselines.py has the scores of bags of words.
"""

import argparse
import hashlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from biphasic.storage import open_store, parquet_bytes

SPLITS = ("train", "validation", "test")
EVALUATED = {"validation": 400, "test": 800}
"""Largest number of examples of a split that is scored, to limit a trial's time. Retrieval: of queries."""
TAGS = ("O", "B-NAME", "B-TYPE", "I-TYPE")
MASK = "x"
_FREQUENT = 100
"""So many of the most frequent words are not masked in `retrieval`: their absence would tell what the query is."""
_STEM = 5
"""Letters by which two words count as the same: `array` and `arrays`."""
_DOCUMENT_WORDS = range(12, 80)
_QUERY_WORDS = 4
KINDS: dict[str, tuple[str, ...]] = {
    "bool": ("bool", "boolean"),
    "int": ("int", "integer"),
    "float": ("float",),
    "str": ("str", "string"),
    "collection": ("list", "tuple", "dict", "dictionary", "mapping", "sequence", "set", "iterable"),
    "array": ("array", "array-like", "array_like", "ndarray", "np.ndarray", "numpy.ndarray", "tensor", "torch.tensor"),
    "callable": ("callable", "function"),
}
"""Kinds of parameters, and the first words of a type that say so."""
QUESTION = "Which is the {kind}?"
_KIND_OF_WORD = {word: kind for kind, words in KINDS.items() for word in words}
_TYPE_WORDS = {form for word in _KIND_OF_WORD for form in (word, f"{word}s")} | {"dictionaries"}
_WORDS_OF_PARAMETERS = 50
_WORDS_OF_DESCRIPTION = 15
_WORDS_WITHOUT_TYPE = 8
_FEWEST_WORDS = 3

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


Row = dict[str, Any]


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


@dataclass(frozen=True)
class Document:
    """A docstring: `id` is a hash of its text, `name` its function's or class's."""

    id: str
    split: str
    name: str
    text: str

    def draw(self, purpose: str, choices: int) -> int:
        """Return a number below `choices` that depends on nothing but the docstring and the purpose."""
        return int.from_bytes(hashlib.blake2b(f"{self.id} {purpose}".encode(), digest_size=8).digest()) % choices


def read_documents(file: Path) -> list[Document]:
    """Return the docstrings, ordered by id."""
    rows = pq.read_table(file, columns=["id", "split", "name", "text"]).to_pylist()
    return sorted((Document(**row) for row in rows), key=lambda document: document.id)


def kind_of(parameter: Parameter) -> str | None:
    """Return a parameter's kind by the first word of its type; None if that is none of `KINDS`."""
    first = next((word for word in map(str.casefold, parameter.type) if word != "optional"), "")
    return _KIND_OF_WORD.get(first)


def without_type(parameter: Parameter) -> list[str]:
    """Return the first words of a parameter's description but those that name a type."""
    described = [word for word in parameter.description if word.casefold() not in _TYPE_WORDS]
    return described[:_WORDS_WITHOUT_TYPE]


def type_examples(documents: Sequence[Document]) -> Iterator[Row]:
    """Yield the parameters that have a kind, with names; each description once, so that none is in two splits."""
    seen = set[str]()
    for document in documents:
        for parameter in parameters(document.text):
            kind, described = kind_of(parameter), " ".join(without_type(parameter))
            if kind is None or len(described.split()) < _FEWEST_WORDS or described.casefold() in seen:
                continue
            seen.add(described.casefold())
            yield {
                "split": document.split,
                "id": f"{document.id}-{parameter.name}",
                "text": f"{parameter.name} {described}",
                "label": list(KINDS).index(kind),
            }


def parameter_examples(documents: Sequence[Document]) -> Iterator[Row]:
    """Yield the words of docstrings' parameters with the tags of names and types."""
    for document, chosen in _with_parameters(documents, fewest=2):
        tokens, labels = list[str](), list[int]()
        for parameter in chosen:
            tokens += [parameter.name, *parameter.type, *parameter.description]
            tags = ["B-NAME", "B-TYPE", *["I-TYPE"] * (len(parameter.type) - 1), *["O"] * len(parameter.description)]
            labels += [TAGS.index(tag) for tag in tags]
        yield {"split": document.split, "id": document.id, "tokens": tokens, "labels": labels}


def question_examples(documents: Sequence[Document]) -> Iterator[Row]:
    """Yield a docstring's parameters without types, and for each kind that only one of them has, the question for it.

    Validation and test ask one question about a docstring, so that their examples are independent.
    """
    seen = set[str]()
    for document, chosen in _with_parameters(documents, fewest=3):
        parts = [" ".join((parameter.name, *without_type(parameter))) for parameter in chosen]
        context = " ".join(parts)
        kinds = [{_KIND_OF_WORD.get(word.casefold()) for word in parameter.type} for parameter in chosen]
        asked = [
            at
            for at, parameter in enumerate(chosen)
            if kind_of(parameter) is not None and sum(kind_of(parameter) in kind for kind in kinds) == 1
        ]
        if not asked or context.casefold() in seen:
            continue
        seen.add(context.casefold())
        for at in asked if document.split == "train" else [asked[document.draw("question", len(asked))]]:
            yield {
                "split": document.split,
                "id": f"{document.id}-{chosen[at].name}",
                "question": QUESTION.format(kind=kind_of(chosen[at])),
                "context": context,
                "answers": {"text": [chosen[at].name], "answer_start": [sum(len(part) + 1 for part in parts[:at])]},
            }


def _summary_and_body(document: Document) -> tuple[str, list[str]]:
    """Return a docstring's summary line and the words of the rest; an empty summary if it has none, or too short a rest."""
    first, _, rest = document.text.partition("\n")
    summary, body = first.strip().rstrip("."), rest.split()[: _DOCUMENT_WORDS.stop - 1]
    complete = rest.startswith("\n") and len(summary.split()) >= _QUERY_WORDS and len(body) in _DOCUMENT_WORDS
    return (summary if complete else ""), body


def _with_parameters(documents: Sequence[Document], fewest: int) -> Iterator[tuple[Document, list[Parameter]]]:
    """Yield documents with `fewest` different parameters or more, and the first of these, up to a number of words."""
    seen: set[tuple[Parameter, ...]] = set()
    for document in documents:
        chosen, length = list[Parameter](), 0
        for parameter in parameters(document.text):
            description = parameter.description[:_WORDS_OF_DESCRIPTION]
            length += 1 + len(parameter.type) + len(description)
            if length > _WORDS_OF_PARAMETERS:
                break
            chosen.append(Parameter(parameter.name, parameter.type, description))
        if len({parameter.name for parameter in chosen}) == len(chosen) >= fewest and tuple(chosen) not in seen:
            seen.add(tuple(chosen))
            yield document, chosen


def retrieval_pairs(documents: Sequence[Document]) -> Iterator[Row]:
    """Yield queries and the documents that they must find, both of them different from all others."""
    frequent = Counter(word for document in documents for word in set(_letters(document.text)))
    kept = {word for word, _ in frequent.most_common(_FREQUENT)}
    pairs = list[Row]()
    for document in documents:
        query, body = _summary_and_body(document)
        if not query:
            continue
        masked = {_stem(word) for text in (query, document.name) for word in _letters(text) if word not in kept}
        text = re.sub(
            r"[A-Za-z]+",
            lambda word, masked=masked: MASK if _stem(word[0]) in masked and word[0].casefold() not in kept else word[0],
            " ".join(body),
        )
        pairs.append({"split": document.split, "id": document.id, "query": query, "positive": text})
    queries = Counter(pair["query"].casefold() for pair in pairs)
    positives = Counter(pair["positive"].casefold() for pair in pairs)
    yield from (
        pair for pair in pairs if queries[pair["query"].casefold()] == 1 and positives[pair["positive"].casefold()] == 1
    )


def _letters(text: str) -> list[str]:
    return re.findall("[a-z]+", text.casefold())


def _stem(word: str) -> str:
    return word.casefold()[:_STEM]


def write_retrieval(documents: Sequence[Document], folder: Path) -> dict[str, int]:
    """Write the tables of the retrieval task, and return the number of pairs or queries of each split.

    The tables of queries and documents have those of the validation and test packages; tasks.yaml keeps the judged ones.
    """
    pairs = list(retrieval_pairs(documents))
    by_split = {split: [pair for pair in pairs if pair["split"] == split] for split in SPLITS}
    held_out = [pair for split in EVALUATED for pair in by_split[split][: EVALUATED[split]]]
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


TASKS: dict[str, Callable[[Sequence[Document]], Iterator[Row]]] = {
    "types": type_examples,
    "parameters": parameter_examples,
    "questions": question_examples,
}
"""The tasks whose examples are one table for each split."""


def make_tasks(folder: Path, tasks: Sequence[str] = ("retrieval", *TASKS)) -> dict[str, Mapping[str, int]]:
    """Write the files of the named tasks and return the number of examples by task and split."""
    documents = read_documents(folder / "docstrings.parquet")
    counts: dict[str, Mapping[str, int]] = {"docstrings": Counter(document.split for document in documents)}
    for task in tasks:
        if task == "retrieval":
            counts[task] = write_retrieval(documents, folder / "sources" / task)
            continue
        by_split: dict[str, list[Row]] = {split: [] for split in SPLITS}
        for example in TASKS[task](documents):
            by_split[example.pop("split")].append(example)
        for split, rows in by_split.items():
            _write(folder / "sources" / task / f"{split}.parquet", rows[: EVALUATED.get(split)])
        counts[task] = {split: len(rows[: EVALUATED.get(split)]) for split, rows in by_split.items()}
    return counts


def _write(file: Path, rows: list[Row]) -> None:
    content = parquet_bytes({name: [row[name] for row in rows] for name in rows[0]}, rows_per_group=5000)
    open_store(str(file.parent)).write(file.name, content)


def main(arguments: list[str] | None = None) -> int:
    """Make the tasks, and print their sizes. Exit status 2 when there are no docstrings."""
    names = ("retrieval", *TASKS)
    parser = argparse.ArgumentParser(description="Make the mini study's tasks from docstrings.")
    parser.add_argument("folder", type=Path, help="with docstrings.parquet, of make_text.py or the quickstart's gather.py")
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"{', '.join(names)}; default: all")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.tasks if name not in names]:
        parser.error(f"{unknown[0]} is no task; expected {', '.join(names)}")
    if not (file := options.folder / "docstrings.parquet").is_file():
        print(f"{file}: doesn't exist; recipes/mini/make_text.py writes it", file=sys.stderr)
        return 2
    for task, counts in make_tasks(options.folder, options.tasks or names).items():
        print(f"{task}: " + ", ".join(f"{counts[split]:,} {split}" for split in SPLITS))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
