"""Report what evaluation sets share with training text: runs of equal words, and the places where they are."""

from __future__ import annotations

import functools
import json
import pickle
import sys
import tempfile
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from tabulate import tabulate
from tqdm import tqdm

from biphasic.config.convert import ConvertConfig
from biphasic.config.load import load_job
from biphasic.conversion.convert import source_files
from biphasic.conversion.output import require_record
from biphasic.conversion.reading import Document, read_up_to_damage
from biphasic.conversion.source_files import SourceFile
from biphasic.data.mds_reader import decode_rows, shard_file
from biphasic.data.streams import INDEX
from biphasic.data.tokenizer import load_tokenizer
from biphasic.downstream.task_folder import TaskFolder
from biphasic.errors import UserError
from biphasic.processes import available_cores
from biphasic.storage import join, open_store, user_errors
from biphasic.workers.local import parallel_map

COPIED, LONG = 0.8, 50
"""Share of an example's n-grams from which it counts as a copy; number of consecutive words that is counted apart."""
_FACTOR = 0x9E3779B97F4A7C15
_WITHOUT_SPACES = "฀-໿ က-႟ ក-៿ ぀-ヿ ㇰ-ㇿ 㐀-䶿 一-鿿 𠀀-𿿿"  # Thai, Lao, Burmese, Khmer, Japanese, Chinese
TEXT_COLUMNS = ("title", "text", "text_pair", "tokens", "question", "context")
"""Columns of tables that have text."""
_tokenizer = functools.cache(load_tokenizer)


@functools.cache
def _translation() -> dict[int, str]:
    categories = ((code, unicodedata.category(chr(code))) for code in range(sys.maxunicode + 1))
    separators = {code: " " for code, name in categories if name[0] in "PS" or name in ("Cc", "Cf", "Cs")}
    spans = [range(ord(first), ord(last) + 1) for first, _, last in _WITHOUT_SPACES.split()]
    return {**{code: f" {chr(code)} " for span in spans for code in span}, **separators}


def words_of(text: str) -> list[str]:
    """Return a text's words, in lower case after NFKC, without punctuation and symbols, which separate words.

    In scripts without spaces, each character is a word.
    """
    return unicodedata.normalize("NFKC", text).lower().translate(_translation()).split()


class Run(NamedTuple):
    """Consecutive words of an evaluation text that occur in training text: their number, the first, and the place."""

    words: int
    first: int
    place: str


class NgramIndex:
    """The n-grams of evaluation texts, as 64-bit hashes, and their occurrences.

    The occurrences of n-gram i of `hash`, which is sorted, are from `starts[i]` to `starts[i + 1]` in `text` (the
    text's number) and `at` (the position of its first word).
    """

    def __init__(self, texts: list[list[str]], words: int):
        self.words = words
        # Words of other texts are 0.
        known = {word for text in texts for word in text}
        self._word_hashes = {word: xxhash.xxh3_64_intdigest(word.encode()) or 1 for word in known}
        by_text = [self._hashes(text) for text in texts]
        hashes = np.concatenate([np.empty(0, np.uint64), *by_text])
        order = np.argsort(hashes, kind="stable")
        counts = [len(each) for each in by_text]
        self.text = np.repeat(np.arange(len(texts), dtype=np.int32), counts)[order]
        self.at = np.concatenate([np.arange(count, dtype=np.int32) for count in [0, *counts]])[order]
        self.hash, starts = np.unique(hashes[order], return_index=True)
        self.starts = np.append(starts, len(order))

    def _hashes(self, text: list[str]) -> np.ndarray:
        """Return the hash of each n-gram of a list of words, uint64 [words - n + 1]."""
        of_words = np.array([self._word_hashes.get(word, 0) for word in text], np.uint64)
        count = max(len(text) - self.words + 1, 0)
        hashes = np.zeros(count, np.uint64)
        for offset in range(self.words):
            hashes += of_words[offset : offset + count] * np.uint64(pow(_FACTOR, offset, 2**64))
        return hashes

    def find(self, document: list[str], place: str, runs: dict[int, Run]) -> np.ndarray:
        """Return the numbers of the n-grams in a document's words, and add to `runs` each text's longest run, by number.

        Of equally long runs, the earliest one counts.
        """
        hashes = self._hashes(document)
        numbers = np.searchsorted(self.hash, hashes)
        positions = np.flatnonzero(self.hash[np.minimum(numbers, len(self.hash) - 1)] == hashes)
        # A run's n-grams follow each other in the text and in the document, so the difference of their positions is one.
        unfinished = dict[tuple[int, int], tuple[int, int]]()
        for position in positions.tolist():
            for occurrence in range(self.starts[numbers[position]], self.starts[numbers[position] + 1]):
                text, at = int(self.text[occurrence]), int(self.at[occurrence])
                begin, end = unfinished.get((text, position - at), (at, at))
                begin = begin if end == at else at
                unfinished[text, position - at] = begin, at + 1
                words = at - begin + self.words
                if text not in runs or words > runs[text].words:
                    runs[text] = Run(words, begin, place)
        return numbers[positions]


def find_overlap(data: str, tasks: list[str], words: int, cache: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Search training text for the n-grams of evaluation sets, with a process for each core, and return a report.

    `data` is the folder or bucket prefix of a conversion, whose training split is read, or its YAML, whose sources are
    read with its `overrides`; `tasks` are folders of `biphasic tasks`, read without their training data; `words` is the
    length of an n-gram. Raises a UserError if a set or the training text can't be read, or no example has an n-gram.
    """
    parts, numbers = _parts(data, overrides), dict[str, int]()
    splits = [split for task in tasks for split in _read_splits(TaskFolder(task, cache, None), numbers)]
    texts = [words_of(text) for text in numbers]
    index = NgramIndex(texts, words)
    if not len(index.hash):
        raise UserError(f"--words {words}: no example of {', '.join(tasks)} has as many words")
    found, runs, read = np.zeros(len(index.hash), bool), dict[int, Run](), 0
    processes = min(available_cores(), len(parts))
    with tempfile.TemporaryDirectory() as folder, parallel_map(processes, [__name__, "streaming"]) as map_parts:
        file = Path(folder) / "index"
        file.write_bytes(pickle.dumps(index))
        results = map_parts(functools.partial(_search_part, str(file)), parts)
        for in_part, longest, count in tqdm(results, "searching", len(parts), unit="file", delay=3):
            found[in_part] = True
            read += count
            for text, run in longest.items():
                if text not in runs or run.words > runs[text].words:
                    runs[text] = run
    total = np.bincount(index.text, minlength=len(texts))
    shared = np.bincount(index.text[np.repeat(found, np.diff(index.starts))], minlength=len(texts))
    sets = []
    for task, table, examples in splits:
        flagged = [_flagged(*example, texts, total, shared, runs) for example in examples]
        flagged = sorted((example for example in flagged if example), key=lambda example: -example["run"])
        shortest = sum(not total[[*columns.values()]].sum() for _, columns in examples)
        sets.append(
            {
                "task": task,
                "split": table,
                "examples": len(examples),
                f"under {words} words": shortest,
                "shared": len(flagged),
                "share": len(flagged) / len(examples),
                f"run of {LONG}": sum(example["run"] >= LONG for example in flagged),
                f"copied {COPIED:.0%}": sum(example["share"] >= COPIED for example in flagged),
                "longest run": flagged[0]["run"] if flagged else 0,
                "found": flagged,
            }
        )
    return {"data": data, "words": words, "read": read, "sets": sets}


def describe(report: dict[str, Any], examples: int) -> str:
    """Return a Markdown table of a report's counts, and each split's first examples, those with the longest runs."""
    rows = [{**row, "share": f"{row['share']:.2%}"} for row in report["sets"]]
    shown = [(row, example) for row in rows for example in row.pop("found")[:examples]]
    lines = [
        f"\n{row['task']} {row['split']}, {example['id']}, {example['column']}: {example['run']} consecutive words, "
        f"{example['share']:.0%} of its {report['words']}-grams; {example['place']}\n    {example['passage']}"
        for row, example in shown
    ]
    return "\n".join([tabulate(rows, "keys", "pipe", intfmt=","), *lines])


def _flagged(
    id: str,
    columns: dict[str, int],
    texts: list[list[str]],
    total: np.ndarray,
    shared: np.ndarray,
    runs: dict[int, Run],
) -> dict[str, Any] | None:
    """Return what an example, whose texts have the numbers `columns`, shares with training text; None if nothing."""
    matches = {column: runs[number] for column, number in columns.items() if number in runs}
    if not matches:
        return None
    column = max(matches, key=lambda column: matches[column].words)
    run, numbers = matches[column], [*columns.values()]
    return {
        "id": id,
        "share": float(shared[numbers].sum() / total[numbers].sum()),
        "run": run.words,
        "column": column,
        "passage": " ".join(texts[columns[column]][run.first : run.first + run.words]),
        "place": run.place,
    }


@functools.lru_cache(1)
def _load_index(file: str) -> NgramIndex:
    return pickle.loads(Path(file).read_bytes())


def _search_part(file: str, part: tuple[Any, ...]) -> tuple[np.ndarray, dict[int, Run], int]:
    """Return the numbers of the n-grams in a part of the training text, each text's longest run, and the words read."""
    index, runs, count = _load_index(file), dict[int, Run](), 0
    found = np.zeros(len(index.hash), bool)
    for text, place in _documents(*part):
        words = words_of(text)
        found[index.find(words, place, runs)] = True
        count += len(words)
    return np.flatnonzero(found), runs, count


def _parts(data: str, overrides: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return the arguments of `_documents` for each part of the training text."""
    if data.endswith((".yaml", ".yml")):
        config = load_job(ConvertConfig, data, list(overrides))
        return [(file, config) for file in source_files(config).files]
    if overrides:
        raise UserError(f"{overrides[0]}: expected a conversion's YAML, which it would change; got {data}")
    require_record(data)
    with user_errors(f"{data}/train/{INDEX}: can't be read", ValueError):
        shards = json.loads(open_store(data).read(f"train/{INDEX}"))["shards"]
    ends = np.cumsum([shard["samples"] for shard in shards]).tolist()
    return [(data, shard, end - shard["samples"]) for shard, end in zip(shards, ends, strict=True)]


def _documents(source: Any, about: Any, first_row: int = 0) -> Iterator[tuple[str, str]]:
    """Yield each text of a part with its place."""
    if isinstance(source, SourceFile):
        for number, document in enumerate(read_up_to_damage(source, about, []), start=1):
            if isinstance(document, Document):
                yield document.text, f"{source.path}, document {number:,} (id {document.id})"
        return
    tokenizer, name = _tokenizer(join(source, "tokenizer")).tokenizer, f"train/{shard_file(about)['basename']}"
    with user_errors(f"{source}/{name}: can't be read", ValueError):
        content = open_store(source).read(name)
    for number, row in enumerate(decode_rows(about, content, range(about["samples"])), start=first_row):
        segments = [part.tolist() for part in np.split(row["tokens"], row["lengths"].cumsum())[:-1]]
        for segment, text in enumerate(tokenizer.decode_batch(segments, skip_special_tokens=True), start=1):
            yield text, f"row {number:,}, segment {segment} ({name})"


def _read_splits(
    folder: TaskFolder, numbers: dict[str, int]
) -> Iterator[tuple[str, str, list[tuple[str, dict[str, int]]]]]:
    """Yield the task's name, the table and its examples: the id, and by column the text's number.

    New texts are added to `numbers`.
    """
    for table in folder.record["rows"]:
        if table != "train" and not table.startswith("qrels/"):
            columns = folder.read(table, table if folder.kind == "retrieval" else folder.kind)
            examples = []
            for row, id in enumerate(columns.get("_id") or columns["id"]):
                texts = {name: columns[name][row] for name in TEXT_COLUMNS if name in columns and columns[name][row]}
                joined = {name: " ".join(text) if isinstance(text, list) else text for name, text in texts.items()}
                named = {name: numbers.setdefault(text, len(numbers)) for name, text in joined.items()}
                examples.append((id, named))
            yield folder.record["task"], table, examples
