"""Divide and reformat the public sets that no tool reads as they lie: SQuAD's answerable questions, and SciFact.

    python recipes/mini/public/prepare.py FOLDER

FOLDER has the files of README.md. The results are written beside them, to FOLDER/squad and FOLDER/scifact.
"""

import argparse
import csv
import json
import re
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TRAIN_ARTICLES = 12
"""Of the 16 articles of SQuAD's file; the last four are the test."""
_SENTENCE = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")
"""SciFact's abstracts are NumPy arrays of sentences, as text."""


def squad(folder: Path) -> None:
    """Write the answerable questions of `dev-v2.0.json`, divided by article."""
    articles = json.loads((folder / "dev-v2.0.json").read_text(encoding="utf-8"))["data"]
    for split, part in (("train", articles[:TRAIN_ARTICLES]), ("test", articles[TRAIN_ARTICLES:])):
        for article in part:
            for paragraph in article["paragraphs"]:
                paragraph["qas"] = [each for each in paragraph["qas"] if not each["is_impossible"]]
        (folder / f"{split}.json").write_text(json.dumps({"version": "v2.0", "data": part}), encoding="utf-8")


def scifact(folder: Path) -> None:
    """Write corpus, training pairs and judgments in BEIR's form."""
    with zipfile.ZipFile(folder / "scifact.zip").open("corpus_train.csv") as file:
        rows = list(csv.DictReader(line.decode() for line in file))
    abstracts = {row["doc_id"]: " ".join(a or b for a, b in _SENTENCE.findall(row["abstract"])) for row in rows}
    titles = {row["doc_id"]: row["title"] for row in rows}
    _write(folder / "corpus.jsonl", ({"_id": key, "title": titles[key], "text": abstracts[key]} for key in abstracts))
    queries = {row["_id"]: row["text"] for row in map(json.loads, _lines(folder / "queries.jsonl"))}
    train = [line.split("\t")[:2] for line in _lines(folder / "train.tsv")[1:]]
    test = [(fields[0], fields[2]) for fields in map(str.split, _lines(folder / "test.tsv"))]
    pairs = [{"query": queries[query], "positive": f"{titles[document]} {abstracts[document]}"} for query, document in train]
    _write(folder / "pairs.jsonl", pairs)
    # A tenth of the training queries is also the validation: rates are fixed, so nothing is chosen by it.
    for split, judged in (("validation", train[::10]), ("test", test)):
        lines = ["query-id\tcorpus-id\tscore", *(f"{query}\t{document}\t1" for query, document in judged)]
        (folder / f"{split}_qrels.tsv").write_text("\n".join(lines) + "\n")


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


def _write(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> int:
    """Write the files."""
    parser = argparse.ArgumentParser(description="Divide and reformat SQuAD and SciFact for the mini study.")
    parser.add_argument("folder", type=Path, help="the folder with the files of README.md")
    folder: Path = parser.parse_args().folder
    try:
        squad(folder / "squad")
        scifact(folder / "scifact")
    except OSError as error:
        print(f"{error}; README.md says which files {folder} must hold", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
