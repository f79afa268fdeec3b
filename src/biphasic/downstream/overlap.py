"""Report what evaluation sets share with training text: runs of equal words, and the places where they are."""

from __future__ import annotations

import functools
import itertools
import json
import pickle
import re
import sys
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
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
from biphasic.data.mds_reader import INDEX, decode_rows, shard_file
from biphasic.data.tokenizer import load_tokenizer
from biphasic.downstream.task_folder import TaskFolder
from biphasic.errors import UserError
from biphasic.grouping import groups_up_to
from biphasic.limits import available_cores
from biphasic.storage import join, open_store, user_errors
from biphasic.workers.local import parallel_map

COPIED, LONG = 0.8, 50
"""Share of an example's n-grams from which it counts as a copy; number of consecutive words that is counted apart."""
_CHARACTERS_AT_ONCE, _MATCHES_AT_ONCE = 1 << 22, 1 << 24
_FACTOR = 0x9E3779B97F4A7C15
_WITHOUT_SPACES = "฀-໿ က-႟ ក-៿ ぀-ヿ ㇰ-ㇿ 㐀-䶿 一-鿿 𠀀-𿿿"  # Thai, Lao, Burmese, Khmer, Japanese, Chinese
TEXT_COLUMNS = ("title", "text", "text_pair", "tokens", "question", "context")
"""Columns of tables that have text."""
_PIECE = re.compile("[{0}]|[^\\s{0}]+".format(_WITHOUT_SPACES.replace(" ", "")))
"""Parts of a text that are found without splitting words: characters of scripts without spaces, or up to a space."""
_AROUND, _LONGEST_EXCERPT = 15, 100
"""Numbers of such parts on each side of a match in an excerpt, and of the matched words that it shows at most."""
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


def excerpt(text: str, first: int, words: int) -> str:
    """Return the part of a text around consecutive words, which are between `**`; a long match is cut.

    `first` is the index of the first word in `words_of(text)`.
    """
    text, shown = unicodedata.normalize("NFKC", text), min(words, _LONGEST_EXCERPT)
    parts = list(_PIECE.finditer(text))
    ends = np.cumsum([len(words_of(part[0])) for part in parts])
    begin, last = np.searchsorted(ends, [first, first + shown - 1], side="right").tolist()
    start, end = parts[begin].start(), parts[last].end()
    before, after = (
        text[parts[max(begin - _AROUND, 0)].start() : start],
        text[end : parts[min(last + _AROUND, len(parts) - 1)].end()],
    )
    cut = " […]" if shown < words else after
    return " ".join(f"{before}**{text[start:end]}**{cut}".split())


class Run(NamedTuple):
    """Consecutive words of an evaluation text that occur in training text: their number, the first, and the place.

    `at` is the index of the first of them in the training text, and `excerpt` the part of it around them.
    """

    words: int
    first: int
    place: str
    at: int
    excerpt: str = ""


class NgramIndex:
    """The n-grams of evaluation texts, as 64-bit hashes, and their occurrences.

    The occurrences of n-gram i of `hash`, which is sorted, are from `starts[i]` to `starts[i + 1]` in `text` (the
    text's number) and `at` (the position of its first word).
    """

    def __init__(self, texts: Iterable[list[str]], words: int):
        self.words, self.vocabulary, parts = words, dict[str, int](), []
        for number, text in enumerate(texts):
            # Words of other texts only are 0.
            self.vocabulary.update((word, xxhash.xxh3_64_intdigest(word.encode()) or 1) for word in text)
            hashes = self._hashes(text)
            parts.append((hashes, np.full(len(hashes), number), np.arange(len(hashes))))
        hashes, text, at = (np.concatenate(part) for part in zip(*parts, strict=True))
        order = np.argsort(hashes, kind="stable")
        self.text, self.at = text[order].astype(np.int32), at[order].astype(np.int32)
        self.hash, starts = np.unique(hashes[order], return_index=True)
        self.starts = np.append(starts, len(order))
        # A look-up of the first bits is faster than a binary search, and few other n-grams pass it.
        bits = min(max(20, (8 * len(self.hash)).bit_length()), 28)
        self._shift, self._prefixes = np.uint64(64 - bits), np.zeros(1 << bits, bool)
        self._prefixes[self.hash >> self._shift] = True

    def _hashes(self, text: list[str]) -> np.ndarray:
        """Return the hash of each n-gram of a list of words, uint64 [words - n + 1]."""
        ids = np.fromiter(map(self.vocabulary.get, text, itertools.repeat(0)), np.uint64, len(text))
        count = max(len(ids) - self.words + 1, 0)
        factors = [np.uint64(pow(_FACTOR, offset, 2**64)) for offset in range(self.words)]
        return sum((ids[at : at + count] * factor for at, factor in enumerate(factors)), np.zeros(count, np.uint64))

    def find(self, documents: list[list[str]], places: list[str]) -> tuple[np.ndarray, dict[int, Run]]:
        """Return the numbers of the n-grams that occur in documents, and the longest run of each text, by number.

        Of equally long runs, the earliest one counts.
        """
        hashes = self._hashes([word for document in documents for word in (*document, "")])
        at = np.flatnonzero(self._prefixes[hashes >> self._shift])
        numbers = np.searchsorted(self.hash, hashes[at])
        same = self.hash[np.minimum(numbers, len(self.hash) - 1)] == hashes[at]
        at, numbers = at[same], numbers[same]
        counts = self.starts[numbers + 1] - self.starts[numbers]
        if counts.sum() > _MATCHES_AT_ONCE and len(documents) > 1:
            half = len(documents) // 2
            earlier, later = (self.find(documents[part], places[part]) for part in (slice(half), slice(half, None)))
            return np.union1d(earlier[0], later[0]), _longest(earlier[1], later[1])
        # Matches of a text and a document, which continue each other if both positions grow by one.
        match = np.repeat(self.starts[numbers] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        text, first, at = self.text[match], self.at[match].astype(np.int64), np.repeat(at, counts)
        order = np.lexsort((at, at - first, text))
        text, first, at = text[order], first[order], at[order]
        breaks = (np.diff(text) != 0) | (np.diff(at - first) != 0) | (np.diff(at) != 1)
        begin = np.flatnonzero(np.append(True, breaks)[: len(text)])
        lengths = np.diff(np.append(begin, len(text))) + self.words - 1
        longest_first = np.lexsort((at[begin], -lengths))
        _, chosen = np.unique(text[begin[longest_first]], return_index=True)
        ends, runs = np.cumsum([len(document) + 1 for document in documents]), {}
        for run in longest_first[chosen]:
            position = int(at[begin[run]])
            number = int(np.searchsorted(ends, position, side="right"))
            within = position - int(ends[number]) + len(documents[number]) + 1
            runs[int(text[begin[run]])] = Run(int(lengths[run]), int(first[begin[run]]), places[number], within)
        return np.unique(numbers), runs


def find_overlap(data: str, tasks: list[str], words: int, cache: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Search training text for the n-grams of evaluation sets, with a process for each core, and return a report.

    `data` is the folder or bucket prefix of a conversion, whose training split is read, or its YAML, whose sources are
    read with its `overrides`; `tasks` are folders of `biphasic tasks`, read without their training data; `words` is the
    length of an n-gram.

    Raises:
        UserError: a set or the training text can't be read, or no example has an n-gram.
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
        with tqdm(results, "searching", len(parts), unit="file", delay=3) as bar:
            for in_part, longest, count in bar:
                found[in_part] = True
                runs, read = _longest(runs, longest), read + count
                bar.set_postfix_str(f"{read / max(bar.format_dict['elapsed'], 1e-9):,.0f} words/s", refresh=False)
    total = np.bincount(index.text, minlength=len(texts))
    shared = np.bincount(index.text[np.repeat(found, np.diff(index.starts))], minlength=len(texts))
    sets = [_summary(*split, words, list(numbers), total, shared, runs) for split in splits]
    return {"data": data, "words": words, "read": read, "sets": sets}


def describe(report: dict[str, Any], examples: int) -> str:
    """Return a Markdown table of a report's counts, and each split's first examples, those with the longest runs."""
    rows = [{**row, "share": f"{row['share']:.2%}"} for row in report["sets"]]
    shown = [(row, example) for row in rows for example in row.pop("found")[:examples]]
    lines = [
        f"\n{row['task']} {row['split']}, {example['id']}, {example['column']}: {example['run']} consecutive words, "
        f"{example['share']:.0%} of its {report['words']}-grams; {example['place']}\n"
        f"    evaluation: {example['text']}\n    training:   {example['training_text']}"
        for row, example in shown
    ]
    return "\n".join([tabulate(rows, "keys", "pipe", intfmt=","), *lines])


def _summary(
    task: str, table: str, examples: list[tuple[str, dict[str, int]]], words: int, texts: list[str],
    total: np.ndarray, shared: np.ndarray, runs: dict[int, Run],
) -> dict[str, Any]:  # fmt: skip
    """Return the counts of a split and, as `found`, its examples with a shared n-gram, longest runs first."""
    found = []
    for id, columns in examples:
        if matches := [(runs[number], column, number) for column, number in columns.items() if number in runs]:
            run, column, number = max(matches, key=lambda match: match[0].words)
            share, in_texts = total[[*columns.values()]].sum(), shared[[*columns.values()]].sum()
            passage = " ".join(words_of(texts[number])[run.first : run.first + run.words])
            found.append({"id": id, "share": float(in_texts / share), "run": run.words, "column": column,
                          "passage": passage, "text": excerpt(texts[number], run.first, run.words),
                          "place": run.place, "training_text": run.excerpt})  # fmt: skip
    found.sort(key=lambda example: -example["run"])
    return {
        "task": task,
        "split": table,
        "examples": len(examples),
        f"under {words} words": sum(not total[[*columns.values()]].sum() for _, columns in examples),
        "shared": len(found),
        "share": len(found) / len(examples),
        f"run of {LONG}": sum(example["run"] >= LONG for example in found),
        f"copied {COPIED:.0%}": sum(example["share"] >= COPIED for example in found),
        "longest run": max((example["run"] for example in found), default=0),
        "found": found,
    }


@functools.lru_cache(1)
def _load_index(file: str) -> NgramIndex:
    return pickle.loads(Path(file).read_bytes())


def _search_part(file: str, part: tuple[Any, ...]) -> tuple[np.ndarray, dict[int, Run], int]:
    """Return what `NgramIndex.find` returns, for a part of the training text, and its number of words."""
    index, found, runs, count = _load_index(file), [np.empty(0, np.int64)], dict[int, Run](), 0
    for group in groups_up_to(_CHARACTERS_AT_ONCE, _documents(*part), lambda document: len(document[0])):
        documents = [words_of(text) for text, _ in group]
        numbers, longest = index.find(documents, [place for _, place in group])
        found.append(numbers)
        by_place = {place: text for text, place in group}
        for text, run in longest.items():
            if text not in runs or run.words > runs[text].words:
                runs[text] = run._replace(excerpt=excerpt(by_place[run.place], run.at, run.words))
        count += sum(map(len, documents))
    return np.unique(np.concatenate(found)), runs, count


def _longest(runs: dict[int, Run], later: dict[int, Run]) -> dict[int, Run]:
    """Add later runs to `runs`, and return it; of equally long runs of a text, the earlier one is kept."""
    runs.update((text, run) for text, run in later.items() if text not in runs or run.words > runs[text].words)
    return runs


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
