"""Make the examples of the mini study's four tasks from the docstrings that make_text.py collects.

    python recipes/mini/make_tasks.py FOLDER

writes `sources/<task>/<split>.parquet` into FOLDER, the tables that tasks.yaml prepares for fine-tuning. Training,
validation and test examples come from different packages.

    order         classification: are two neighbouring words of a sentence exchanged?
    parameters    token classification: which words are a parameter's name, which its type? The markup is removed
    questions     question answering: the question is a docstring's summary line with one word missing, the context the
                  rest of it, the answer the missing word there (a cloze, as in ReCoRD)
    retrieval     a docstring's summary line finds the rest of it, in which the words of the summary are masked

In `order`, both classes have the same bags of words. In `retrieval`, the two parts of an example have no word in common but
frequent ones. So counting words isn't enough (baselines.py).
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

SPLITS = ("train", "validation", "test")
EVALUATED = {"validation": 400, "test": 800}
"""Largest number of examples of a split that is scored, to limit a trial's time. Retrieval: of queries."""
TAGS = ("O", "B-NAME", "B-TYPE", "I-TYPE")
MASK = "x"
_FREQUENT = 100
"""So many of the most frequent words are not masked in `retrieval`: their absence would tell what the query is."""
_STEM = 5
"""Letters by which two words count as the same: `array` and `arrays`."""
_SENTENCE_WORDS = range(8, 26)
_DOCUMENT_WORDS = range(12, 80)
_QUERY_WORDS = 4
_BLANK = "_"
ANSWER_LETTERS = 5
_WORDS_OF_TOKENS = 50
_WORDS_OF_ANSWER = 15

Row = dict[str, Any]


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


def order_examples(documents: Sequence[Document]) -> Iterator[Row]:
    """Yield one sentence of each docstring, in half of which two neighbouring words are exchanged (label 1)."""
    seen = set[str]()
    for document in documents:
        sentences = [words for words in _sentences(document.text) if _places(words)]
        if not sentences:
            continue
        words = sentences[document.draw("sentence", len(sentences))]
        key = " ".join(words).casefold()
        if key in seen:
            continue
        seen.add(key)
        label = document.draw("label", 2)
        if label:
            places = _places(words)
            at = places[document.draw("place", len(places))]
            words[at], words[at + 1] = words[at + 1], words[at]
        yield {"split": document.split, "id": document.id, "text": " ".join(words), "label": label}


def _sentences(text: str) -> Iterator[list[str]]:
    """Yield the words of the sentences that consist of words alone."""
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in re.split(r"(?<=[a-z]\.)\s+(?=[A-Z])", " ".join(paragraph.split())):
            words = sentence.split()
            if len(words) in _SENTENCE_WORDS and re.fullmatch(r"[A-Z][A-Za-z]*(?:,? [A-Za-z'-]+)*[a-z]\.", sentence):
                yield words


def _places(words: Sequence[str]) -> list[int]:
    """Return the positions of words that can be exchanged with the next one without a sign of it in letters or commas."""
    plain = [re.fullmatch("[a-z]+", word) is not None for word in words]
    return [at for at in range(1, len(words) - 2) if plain[at] and plain[at + 1] and words[at] != words[at + 1]]


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
    """Yield a summary line with one word missing and the rest of the docstring, in which this word occurs once."""
    seen = set[str]()
    for document in documents:
        summary, body = _summary_and_body(document)
        context = " ".join(body)
        occurrences = Counter(_letters(context))
        answers = [
            word
            for word in re.findall(rf"\b[a-z]{{{ANSWER_LETTERS},}}\b", summary)
            if occurrences[word] == 1 and re.search(rf"\b{word}\b", context) and _letters(summary).count(word) == 1
        ]
        if not answers or context.casefold() in seen:
            continue
        seen.add(context.casefold())
        answer = answers[document.draw("question", len(answers))]
        found = re.search(rf"\b{answer}\b", context)
        assert found is not None
        yield {
            "split": document.split,
            "id": document.id,
            "question": re.sub(rf"\b{answer}\b", _BLANK, summary),
            "context": context,
            "answers": {"text": [answer], "answer_start": [found.start()]},
        }


def _summary_and_body(document: Document) -> tuple[str, list[str]]:
    """Return a docstring's summary line and the words of the rest; an empty summary if it has none, or too short a rest."""
    first, _, rest = document.text.partition("\n")
    summary, body = first.strip().rstrip("."), rest.split()[: _DOCUMENT_WORDS.stop - 1]
    complete = rest.startswith("\n") and len(summary.split()) >= _QUERY_WORDS and len(body) in _DOCUMENT_WORDS
    return (summary if complete else ""), body


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
            lambda word, masked=masked: (
                MASK if _stem(word[0]) in masked and word[0].casefold() not in kept else word[0]
            ),
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


def make_tasks(folder: Path) -> dict[str, Mapping[str, int]]:
    """Write all files and return the number of examples by task and split."""
    documents = read_documents(folder / "docstrings.parquet")
    counts: dict[str, Mapping[str, int]] = {"docstrings": Counter(document.split for document in documents)}
    counts["retrieval"] = write_retrieval(documents, folder / "sources" / "retrieval")
    for task, examples in (
        ("order", order_examples),
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
    parser = argparse.ArgumentParser(description="Make the mini study's tasks from docstrings.")
    parser.add_argument("folder", type=Path, help="the folder that make_text.py has written")
    for task, counts in make_tasks(parser.parse_args(arguments).folder).items():
        print(f"{task}: " + ", ".join(f"{counts[split]:,} {split}" for split in SPLITS))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
