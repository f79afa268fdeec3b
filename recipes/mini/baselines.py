"""Score two baselines on each of the four tasks: chance, and one that ignores the order of words.

    python recipes/mini/baselines.py FOLDER/tasks

    task         chance                                 bag of words
    types        the most frequent kind                 logistic regression on TF-IDF
    parameters   every word has the most frequent tag   every word has its own most frequent tag
    questions    a random word of the context           its word that was the answer in the largest share of the training
                                                        examples that ask for the same kind and have it in the context
    retrieval    a random order                         TF-IDF, or BM25 if it is better

The scores are those of fine-tuning: accuracy, F1 of entities, F1 of words, NDCG@10.
"""

import argparse
import json
import math
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import pyarrow.parquet as pq
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from biphasic.evaluation.search import rank_documents, retrieval_scores
from biphasic.evaluation.squad import squad_scores
from biphasic.finetuning.classification import entity_scores

Scores = tuple[float, float]
"""Of chance, and of the bag of words."""


def types(folder: Path) -> Scores:
    """Return accuracies."""
    train, test = _read(folder / "train"), _read(folder / "test")
    labels = np.array(test["label"])
    most = Counter(train["label"]).most_common(1)[0][0]
    vectorizer = TfidfVectorizer(sublinear_tf=True)
    model = LogisticRegression(C=10, max_iter=300).fit(vectorizer.fit_transform(train["text"]), train["label"])
    predicted = model.predict(vectorizer.transform(test["text"]))
    return float((labels == most).mean()), float((labels == predicted).mean())


def parameters(folder: Path) -> Scores:
    """Return F1 of entities."""
    names = json.loads((folder / "task.json").read_text())["label_names"]
    train, test = _read(folder / "train"), _read(folder / "test")
    tags: dict[str, Counter[int]] = defaultdict(Counter)
    for words, labels in zip(train["tokens"], train["labels"], strict=True):
        for word, label in zip(words, labels, strict=True):
            tags[word][label] += 1
    most = sum(tags.values(), Counter[int]()).most_common(1)[0][0]
    gold = [[names[label] for label in labels] for labels in test["labels"]]
    by_word = [
        [names[tags[word].most_common(1)[0][0] if word in tags else most] for word in words] for words in test["tokens"]
    ]
    same = [[names[most]] * len(words) for words in test["tokens"]]
    return entity_scores(gold, same)["f1"], entity_scores(gold, by_word)["f1"]


def questions(folder: Path) -> Scores:
    """Return F1 of words."""
    train, test = _read(folder / "train"), _read(folder / "test")
    seen, answered = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for question, context, answers in zip(train["question"], train["context"], train["answers"], strict=True):
        seen.update((question, word) for word in set(context.split()))
        answered[question, answers["text"][0]] += 1
    generator, guesses, likely = random.Random(0), list[str](), list[str]()
    for question, context in zip(test["question"], test["context"], strict=True):
        words = context.split()
        guesses.append(generator.choice(words))
        # Two more examples, so that a word that is rare in training isn't the likeliest.
        likely.append(max(words, key=lambda word: answered[question, word] / (seen[question, word] + 2)))
    gold = [answers["text"] for answers in test["answers"]]
    return squad_scores(gold, guesses)["f1"], squad_scores(gold, likely)["f1"]


def retrieval(folder: Path) -> Scores:
    """Return NDCG@10."""
    judged = _read(folder / "qrels" / "test")
    qrels = {query: {document: 1} for query, document in zip(judged["query-id"], judged["corpus-id"], strict=True)}
    queries, corpus = _read(folder / "queries"), _read(folder / "corpus")
    texts = dict(zip(queries["_id"], queries["text"], strict=True))
    vectorizer = TfidfVectorizer(sublinear_tf=True, max_features=20_000).fit(corpus["text"])
    embedded = [_dense(vectorizer.transform(part)) for part in ([texts[query] for query in qrels], corpus["text"])]
    generator = torch.Generator().manual_seed(0)
    guessed = [torch.randn(len(part), 8, generator=generator) for part in embedded]
    guess, tfidf = (
        retrieval_scores(rank_documents(list(qrels), found[0], corpus["_id"], found[1]), qrels)["ndcg_at_10"]
        for found in (guessed, embedded)
    )
    return guess, max(tfidf, _bm25([texts[query] for query in qrels], list(qrels), corpus, qrels))


def _bm25(texts: list[str], names: list[str], corpus: dict[str, list[Any]], qrels: dict[str, dict[str, int]]) -> float:
    """Return BM25's NDCG@10; of one right document, at rank r from 1: 1 / log2(r + 1)."""
    index = bm25s.BM25()
    index.index(bm25s.tokenize(corpus["text"], show_progress=False), show_progress=False)
    found, _ = index.retrieve(bm25s.tokenize(texts, show_progress=False), k=10, show_progress=False)
    gains = [
        1 / math.log2(rank + 2) if corpus["_id"][document] in qrels[name] else 0.0
        for name, ranking in zip(names, found, strict=True)
        for rank, document in enumerate(ranking)
    ]
    return sum(gains) / len(names)


def _dense(matrix: Any) -> torch.Tensor:
    """Return a sparse matrix of scipy as a dense tensor."""
    return torch.from_numpy(matrix.toarray().astype(np.float32))


def _read(file: Path) -> dict[str, list[Any]]:
    return pq.read_table(file.with_name(f"{file.name}.parquet")).to_pydict()


def main(arguments: list[str] | None = None) -> int:
    """Print the scores, in points. Exit status 2 when the folder lacks a task."""
    parser = argparse.ArgumentParser(description="Score guesses and bags of words on the mini study's tasks.")
    parser.add_argument("tasks", type=Path, help="the folder that tasks.yaml writes")
    folder, tasks = parser.parse_args(arguments).tasks, (types, parameters, questions, retrieval)
    if missing := [task.__name__ for task in tasks if not (folder / task.__name__).is_dir()]:
        print(f"{folder}: has no {missing[0]}; biphasic tasks recipes/mini/tasks.yaml writes it", file=sys.stderr)
        return 2
    print(f"{'test (points)':14} {'chance':>8} {'bag of words':>14}")
    for task in tasks:
        chance, bag = task(folder / task.__name__)
        print(f"{task.__name__:14} {100 * chance:>8.1f} {100 * bag:>14.1f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
