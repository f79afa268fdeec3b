"""Report what evaluation sets share with the training split of a conversion: runs of equal words, and their places.

    python recipes/overlap/overlap.py data/mine data/tasks/sst2 data/tasks/squad --out overlap.json

A process for each core reads the rows. docs/evaluate.md describes the table; `--out` gets all examples that share an n-gram.
"""

import argparse
import functools
import multiprocessing
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate
from tqdm import tqdm

from biphasic.conversion.output import require_record
from biphasic.data.mds_reader import decode_rows, shard_file
from biphasic.data.streams import read_index
from biphasic.data.tokenizer import load_tokenizer
from biphasic.downstream.task_folder import TaskFolder
from biphasic.errors import UserError
from biphasic.processes import available_cores
from biphasic.storage import join, json_bytes, open_store

COPIED, LONG = 0.8, 50
"""Share of an example's n-grams from which it counts as a copy; number of consecutive words that is counted apart."""
_WITHOUT_SPACES = "฀-໿ က-႟ ក-៿ ぀-ヿ ㇰ-ㇿ 㐀-䶿 一-鿿 𠀀-𿿿"  # Thai, Lao, Burmese, Khmer, Japanese, Chinese
TEXT_COLUMNS = ("title", "text", "text_pair", "tokens", "question", "context")
Grams = dict[int, list[tuple[int, int]]]
"""The evaluation texts' n-grams by their hash: the numbers of the texts that have one, and its first word's position."""
Runs = dict[int, tuple[int, int, str]]
"""By text, its longest run of words in training text: the number of words, the first, and the place."""
_tokenizer = functools.cache(load_tokenizer)
_grams: Grams = defaultdict(list)


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


def ngrams(words: list[str], n: int) -> Iterator[tuple[int, int]]:
    """Yield the position of each n-gram and its hash, which is that of this process only."""
    for at in range(len(words) - n + 1):
        yield at, hash(tuple(words[at : at + n]))


def remember(texts: list[list[str]], n: int) -> None:
    """Fill `_grams` in a process that searches."""
    for number, words in enumerate(texts):
        for at, gram in ngrams(words, n):
            _grams[gram].append((number, at))


def read_examples(folder: TaskFolder) -> Iterator[tuple[str, list[tuple[str, dict[str, str]]]]]:
    """Yield the set's tables, without training data and judgments, and their examples: the id, and texts by column."""
    for table in folder.record["rows"]:
        if table != "train" and not table.startswith("qrels/"):
            columns = folder.read(table, table if folder.kind == "retrieval" else folder.kind)
            examples = []
            for row, id in enumerate(columns.get("_id") or columns["id"]):
                texts = {name: columns[name][row] for name in TEXT_COLUMNS if name in columns and columns[name][row]}
                joined = {name: " ".join(text) if isinstance(text, list) else text for name, text in texts.items()}
                examples.append((id, joined))
            yield table, examples


def search(data: str, n: int, part: tuple[dict[str, Any], int]) -> tuple[set[tuple[int, int]], Runs, int]:
    """Return the texts and positions of the n-grams in a shard's rows, each text's longest run, and the words read."""
    (shard, row), found, runs, count = part, set[tuple[int, int]](), Runs(), 0
    tokenizer, file = _tokenizer(join(data, "tokenizer")).tokenizer, shard_file(shard)["basename"]
    content = open_store(data).read(f"train/{file}")
    for number, stored in enumerate(decode_rows(shard, content, range(shard["samples"])), start=row):
        segments = [each.tolist() for each in np.split(stored["tokens"], stored["lengths"].cumsum())[:-1]]
        for segment, document in enumerate(tokenizer.decode_batch(segments, skip_special_tokens=True), start=1):
            words, unfinished = words_of(document), dict[tuple[int, int], tuple[int, int]]()
            count += len(words)
            for position, gram in ngrams(words, n):
                # A run's n-grams follow each other in both texts, so the difference of their positions is one.
                for text, at in _grams.get(gram, ()):
                    found.add((text, at))
                    begin, end = unfinished.get((text, position - at), (at, at))
                    begin = begin if end == at else at
                    unfinished[text, position - at] = begin, at + 1
                    if at - begin + n > runs.get(text, (0,))[0]:
                        runs[text] = at - begin + n, begin, f"row {number:,}, segment {segment} (train/{file})"
    return found, runs, count


def main(arguments: list[str] | None = None) -> int:
    """Search, and print what was found. Exit status 2 when the conversion or a set is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", metavar="DATA", help="a conversion's folder or bucket prefix")
    parser.add_argument("sets", nargs="+", metavar="FOLDER", help="sets of `biphasic tasks`")
    parser.add_argument("--words", type=int, default=13, metavar="N", help="length of a shared n-gram (default: 13)")
    parser.add_argument("--examples", type=int, default=3, metavar="N", help="examples to print of each table")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the counts and all examples")
    try:
        report(parser.parse_args(arguments))
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def report(options: argparse.Namespace) -> None:
    """Search the training text for the n-grams of sets, and print a table and the examples with the longest runs."""
    n, texts, tables = options.words, list[list[str]](), list[tuple[str, str, list[Any]]]()
    for place in options.sets:
        folder = TaskFolder(place, "runs/cache", None)
        for table, examples in read_examples(folder):
            numbered = []
            for id, columns in examples:
                numbered.append((id, dict(zip(columns, range(len(texts), len(texts) + len(columns)), strict=True))))
                texts += map(words_of, columns.values())
            tables.append((folder.record["task"], table, numbered))
    require_record(options.data)
    shards = read_index(join(options.data, "train"))["shards"]
    ends = np.cumsum([shard["samples"] for shard in shards]).tolist()
    parts = [(shard, end - shard["samples"]) for shard, end in zip(shards, ends, strict=True)]
    shared, runs, read = [0] * len(texts), Runs(), 0
    found = set[tuple[int, int]]()
    context = multiprocessing.get_context("spawn")  # a fork copies locks that this process's threads hold
    processes = min(available_cores(), len(parts))
    with ProcessPoolExecutor(processes, context, initializer=remember, initargs=(texts, n)) as pool:
        results = pool.map(functools.partial(search, options.data, n), parts)
        for in_part, longest, count in tqdm(results, "searching", len(parts), unit="file", delay=3):
            found |= in_part
            read += count
            runs |= {text: run for text, run in longest.items() if run[0] > runs.get(text, (0,))[0]}
    for text, _ in found:
        shared[text] += 1
    sets = []
    for task, table, examples in tables:
        flagged, short = [], 0
        for id, columns in examples:
            total = sum(max(len(texts[text]) - n + 1, 0) for text in columns.values())
            short += not total
            if matched := {column: text for column, text in columns.items() if text in runs}:
                column = max(matched, key=lambda column, matched=matched: runs[matched[column]][0])
                words, first, where = runs[matched[column]]
                share = sum(shared[text] for text in columns.values()) / total
                passage = " ".join(texts[matched[column]][first : first + words])
                flagged.append(
                    {"id": id, "share": share, "run": words, "column": column, "passage": passage, "place": where}
                )
        flagged.sort(key=lambda example: -example["run"])
        sets.append(
            {
                "task": task, "split": table, "examples": len(examples), f"under {n} words": short,
                "shared": len(flagged), "share": len(flagged) / len(examples),
                f"run of {LONG}": sum(example["run"] >= LONG for example in flagged),
                f"copied {COPIED:.0%}": sum(example["share"] >= COPIED for example in flagged),
                "longest run": flagged[0]["run"] if flagged else 0, "found": flagged,
            }
        )  # fmt: skip
    if options.out is not None:
        options.out.write_bytes(json_bytes({"data": options.data, "words": n, "read": read, "sets": sets}))
    rows = [{**row, "share": f"{row['share']:.2%}"} for row in sets]
    shown = [(row, example) for row in rows for example in row.pop("found")[: options.examples]]
    print(tabulate(rows, "keys", "pipe", intfmt=","))
    for row, example in shown:
        print(f"\n{row['task']} {row['split']}, {example['id']}, {example['column']}: {example['run']} consecutive words, "
              f"{example['share']:.0%} of its {n}-grams; {example['place']}\n    {example['passage']}")  # fmt: skip
    print(f"\nread {read:,} words")


if __name__ == "__main__":
    raise SystemExit(main())
