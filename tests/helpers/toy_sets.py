"""Small downstream sets of each family that a tiny encoder can learn, prepared from the hub's columns as real ones are."""

from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Sequence, Value
from transformers import LlamaConfig

from biphasic.config.finetune import FinetuneConfig
from biphasic.config.tasks import TasksConfig
from biphasic.data.tokenizer import load_tokenizer
from biphasic.downstream.prepare import prepare_task
from biphasic.model.language_model import from_hf_config
from helpers.downstream_sets import ANSWERS, card, write_split
from helpers.exports import export_encoder
from helpers.tiny import WORDS

TEXT, NUMBER = Value("string"), Value("int32")
SIZES = {"train": 800, "validation": 80, "test": 80}


def write_encoder(folder: Path, tokenizer: Path, seed: int = 0) -> Path:
    """Write an untrained encoder."""
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=None,
    )  # fmt: skip
    export_encoder(from_hf_config(config, seed).backbone, load_tokenizer(str(tokenizer)), folder, "card")
    return folder


def sentence(generator: np.random.Generator, low: int, high: int, first: int = 20) -> list[str]:
    """Return random words from w<first> on."""
    return [f"w{word}" for word in generator.integers(first, 60, int(generator.integers(low, high)))]


def classification_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return SST-2's columns: a text with w1 is positive, one with w2 negative."""
    generator, rows = np.random.default_rng(seed), []
    for at in range(count):
        words, label = sentence(generator, 2, 30), int(generator.integers(2))
        words.insert(int(generator.integers(len(words) + 1)), "w1" if label else "w2")
        rows.append({"sentence": " ".join(words), "label": label, "idx": at})
    return rows


def similarity_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return STS-B's columns: a pair is as similar, from 0 to 5, as often as w1 stands in its first sentence."""
    generator, rows = np.random.default_rng(seed), []
    for at, score in enumerate(generator.integers(0, 6, count).tolist()):
        words = generator.permutation(["w1"] * score + ["w2"] * (5 - score))
        pair = " ".join(sentence(generator, 1, 4))
        rows.append({"sentence1": " ".join(words), "sentence2": pair, "label": float(score), "idx": at})
    return rows


def tokens_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return CoNLL-2003's columns: w1 to w4 begin a person, w5 to w8 a place, and w9 continues either."""
    generator, rows = np.random.default_rng(seed), []
    for _ in range(count):
        words, labels = [], []
        for _ in range(int(generator.integers(1, 8))):
            kind = int(generator.integers(4))
            if kind < 2:
                words.append(f"w{int(generator.integers(1, 5)) + 4 * kind}")
                labels.append(1 + 2 * kind)
                if generator.integers(2):
                    words.append("w9")
                    labels.append(2 + 2 * kind)
            else:
                words += sentence(generator, 1, 3)
                labels += [0] * (len(words) - len(labels))
        rows.append({"words": words, "ner": labels})
    return rows


def answers_rows(count: int, seed: int, unanswerable: bool = False) -> list[dict[str, Any]]:
    """Return SQuAD's columns: w1 asks for the word from w11 to w14, w2 for that from w15 to w18; a context has both."""
    generator, rows = np.random.default_rng(seed), []
    for at in range(count):
        kind, words = int(generator.integers(2)), sentence(generator, 4, 30)
        candidates = [f"w{int(generator.integers(4)) + 11 + 4 * other}" for other in range(2)]
        missing = unanswerable and generator.integers(3) == 0
        for word in [candidates[1 - kind]] if missing else candidates:
            words.insert(int(generator.integers(len(words) + 1)), word)
        context = " ".join(words)
        start = f"{context} ".find(f"{candidates[kind]} ")
        answers: dict[str, Any] = {"text": [candidates[kind]], "answer_start": [start]}
        if missing:
            answers = {"text": [], "answer_start": []}
        rows.append({"id": str(at), "title": "t", "context": context, "question": f"w{kind + 1}", "answers": answers})
    return rows


def retrieval_pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Return pairs in which word i of a query is word i + 30 of its document."""
    generator, pairs = np.random.default_rng(seed), []
    for _ in range(count):
        topic = generator.choice(30, size=4, replace=False)
        document = " ".join(f"w{word + 30}" for word in generator.permutation(topic))
        pairs.append((" ".join(f"w{word}" for word in topic), document))
    return pairs


SPLIT_TASKS: dict[str, dict[str, Any]] = {
    "sst2": {"kind": "classification", "text_column": "sentence", "id_column": "idx"},
    "stsb": {"kind": "regression", "text_column": "sentence1", "text_pair_column": "sentence2", "id_column": "idx"},
    "conll2003": {"kind": "tokens", "tokens_column": "words", "labels_column": "ner",
                  "label_names": ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]},
    "squad": {"kind": "question_answering", "id_column": "id"},
    "squad_v2": {"kind": "question_answering", "id_column": "id"},
}  # fmt: skip
ROWS = {
    "sst2": (
        classification_rows,
        {"sentence": TEXT, "label": ClassLabel(names=["negative", "positive"]), "idx": NUMBER},
    ),
    "stsb": (similarity_rows, {"sentence1": TEXT, "sentence2": TEXT, "label": Value("float32"), "idx": NUMBER}),
    "conll2003": (tokens_rows, {"words": Sequence(TEXT), "ner": Sequence(NUMBER)}),
    "squad": (answers_rows, {"id": TEXT, "title": TEXT, "context": TEXT, "question": TEXT, "answers": ANSWERS}),
}


def make_sets(root: Path, sizes: dict[str, int] = SIZES) -> Path:
    """Write all sets as `biphasic tasks` does: root/tasks/<name>."""
    tasks: dict[str, Any] = {}
    for name, about in SPLIT_TASKS.items():
        make, features = ROWS[name.removesuffix("_v2")]
        for number, (split, count) in enumerate(sizes.items()):
            more = {"unanswerable": True} if name.endswith("_v2") else {}
            write_split(root / name / "default", split, make(count, number, **more), features)
        card(root / name, {"default": list(sizes)})
        tasks[name] = {
            "license": "none",
            "source": {"path": str(root / name)},
            "splits": {s: s for s in sizes},
            **about,
        }
    tasks["msmarco"] = retrieval_set(root, sizes)
    config = TasksConfig.model_validate({"job": "tasks", "output": str(root / "tasks"), "tasks": tasks})
    for name in tasks:
        prepare_task(name, config)
    return root / "tasks"


def retrieval_set(root: Path, sizes: dict[str, int]) -> dict[str, Any]:
    """Write MS MARCO's tables: pairs, a corpus, queries and judgments."""
    pairs = {split: retrieval_pairs(2 * count, 10 + number) for number, (split, count) in enumerate(sizes.items())}
    rows = [{"query": query, "positive": document} for query, document in pairs["train"]]
    write_split(root / "pairs" / "default", "train", rows, {"query": TEXT, "positive": TEXT})
    card(root / "pairs", {"default": ["train"]})
    held = [(f"{split}{at}", *pair) for split in ("validation", "test") for at, pair in enumerate(pairs[split])]
    columns = {"_id": TEXT, "title": TEXT, "text": TEXT}
    write_split(root / "beir" / "corpus", "corpus", [{"_id": i, "title": "", "text": d} for i, _, d in held], columns)
    write_split(root / "beir" / "queries", "queries", [{"_id": i, "title": "", "text": q} for i, q, _ in held], columns)
    card(root / "beir", {"corpus": ["corpus"], "queries": ["queries"]})
    for split in ("validation", "test"):
        judged = [{"query-id": i, "corpus-id": i, "score": 1} for i, _, _ in held if i.startswith(split)]
        write_split(root / "qrels" / "default", split, judged, {"query-id": TEXT, "corpus-id": TEXT, "score": NUMBER})
    card(root / "qrels", {"default": ["validation", "test"]})
    beir, qrels = str(root / "beir"), str(root / "qrels")
    return {
        "kind": "retrieval",
        "license": "none",
        "train": {"path": str(root / "pairs")},
        "corpus": {"path": beir, "name": "corpus", "split": "corpus"},
        "queries": [{"path": beir, "name": "queries", "split": "queries"}],
        "qrels": {split: {"path": qrels, "split": split} for split in ("validation", "test")},
    }


def task_section(name: str, sets: Path) -> dict[str, Any]:
    """Return the YAML's `task:` section of a toy set."""
    about: dict[str, Any] = {"kind": SPLIT_TASKS.get(name, {"kind": "retrieval"})["kind"], "name": name}
    about["data"] = str(sets / name)
    if name == "squad_v2":
        about["unanswerable"] = True
    if name == "stsb":
        about["metrics"] = ["pearson"]
    if name == "msmarco":
        about |= {"query_prompt": "w0 ", "document_prompt": "", "scored_on": {"msmarco": str(sets / name)}}
    return about


def config_of(name: str, sets: Path, model: Path, folder: Path, **changes: Any) -> FinetuneConfig:
    """Return the configuration of a short run on a toy set."""
    content = {
        "job": "finetune",
        "run_name": name,
        "output": str(folder / "runs"),
        "cache": str(folder / "cache"),
        "model": {"path": str(model)},
        "task": task_section(name, sets),
        "max_duration": "4ep",
        "optimizer": {"lr": 5e-3},
        "save_model": False,
        "logging": {"tensorboard": False, "progress_bar": False, "jsonl": False},
    }
    for key, value in changes.items():
        at, parts = content, key.split("__")
        for part in parts[:-1]:
            at = at.setdefault(part, {})
        at[parts[-1]] = value
    return FinetuneConfig.model_validate(content)
