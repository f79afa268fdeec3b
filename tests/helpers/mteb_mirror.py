"""Small copies of mteb's data sets in the hub's layout, and an encoder to score."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Value
from transformers import LlamaConfig

from biphasic.config.evaluate import EvaluateConfig
from biphasic.data.tokenizer import load_tokenizer
from biphasic.model.language_model import from_hf_config
from helpers.downstream_sets import TEXT, card, write_split
from helpers.exports import export_encoder
from helpers.tiny import LENGTH, WORDS, write_tokenizer

QUERIES, DOCUMENTS = 30, 150
PROMPTS = {"query": "w1 w2 ", "document": "w3 "}
"""The encoder's prompts."""
_TABLES: dict[str, dict[str, Any]] = {
    "corpus": {"_id": TEXT, "title": TEXT, "text": TEXT},
    "queries": {"_id": TEXT, "text": TEXT},
    "qrels": {"query-id": TEXT, "corpus-id": TEXT, "score": Value("int32")},
}


def rows(
    seed: int, first: str, splits: list[str], count: int = DOCUMENTS
) -> tuple[list[Any], list[Any], dict[str, list[Any]]]:
    """Return documents, queries made of words of a document, and judgments by split."""
    generator = np.random.default_rng(seed)
    documents, queries, qrels = [], [], {split: [] for split in splits}
    for at in range(count):
        words = [f"w{word}" for word in generator.integers(5, WORDS - 4, int(generator.integers(2, 50)))]
        documents.append({"_id": f"{first}{at}", "title": "w4" if at % 3 else "", "text": " ".join(words)})
    for at in range(QUERIES * len(splits)):
        words = documents[at]["text"].split()
        queries.append({"_id": f"q{at}", "text": " ".join(generator.permutation(words)[:5])})
        judged = {f"{first}{(7 * at + 90) % count}": int(at % 4 == 0), f"{first}{at}": 1}
        for document, score in judged.items():
            qrels[splits[at % len(splits)]].append({"query-id": f"q{at}", "corpus-id": document, "score": score})
    return documents, queries, qrels


def write_set(folder: Path, seed: int, splits: list[str], prefix: str = "") -> None:
    """Write the hub's configurations: `corpus`, `queries` and `default` (judgments), or all three with a language prefix."""
    documents, queries, qrels = rows(seed, f"{folder.name}-", splits)
    configurations: dict[str, list[str]] = {}
    for table, content in (("corpus", documents), ("queries", queries)):
        # MS MARCO and NQ have one table for all splits; sets with languages have one for each.
        names = splits if prefix else [table]
        for name in names:
            write_split(folder / f"{prefix}{table}", name, content, _TABLES[table])
        configurations[f"{prefix}{table}"] = names
    judgments = f"{prefix}qrels" if prefix else "default"
    for split in splits:
        write_split(folder / judgments, split, qrels[split], _TABLES["qrels"])
    card(folder, {**configurations, judgments: splits})


def write_mirror(root: Path) -> Path:
    """Write two sets of the paper, one of NanoBEIR's, and one without retrieval."""
    write_set(root / "mteb" / "nq", 2, ["test"])
    write_set(root / "mteb" / "MultiLongDocRetrieval", 3, ["dev", "test"], "en-")
    write_set(root / "NanoNQRetrieval", 4, ["train"])
    generator = np.random.default_rng(5)
    pairs = []
    for at in range(40):
        words = [f"w{word}" for word in generator.integers(5, 60, 8)]
        other = [*words[: at % 9], *(f"w{word}" for word in generator.integers(5, 60, 8 - at % 9))]
        pairs.append({"sentence1": " ".join(words), "sentence2": " ".join(other), "score": at % 9 / 2})
    features = {"sentence1": TEXT, "sentence2": TEXT, "score": Value("float64")}
    write_split(root / "mteb" / "stsbenchmark-sts" / "default", "test", pairs, features)
    card(root / "mteb" / "stsbenchmark-sts", {"default": ["test"]})
    return root


def write_own(folder: Path, documents: int = DOCUMENTS) -> Path:
    """Write a local set in BEIR's layout."""
    corpus, queries, qrels = rows(9, "d", ["test"], documents)
    (folder / "qrels").mkdir(parents=True)
    for name, content in (("corpus", corpus), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    lines = [
        "\t".join(["query-id", "corpus-id", "score"]),
        *("\t".join(map(str, row.values())) for row in qrels["test"]),
    ]
    (folder / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n")
    return folder


def write_model(folder: Path, prompts: dict[str, str] | None = None) -> Path:
    """Write an untrained encoder, whose embeddings are nearly bags of words."""
    write_tokenizer(folder.with_name(f"{folder.name}-tokenizer"))
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, pad_token_id=None, rms_norm_eps=1e-5,
    )  # fmt: skip
    tokenizer = load_tokenizer(str(folder.with_name(f"{folder.name}-tokenizer")))
    export_encoder(from_hf_config(config, 3).backbone, tokenizer, folder, "card", prompts=prompts)
    return folder


def config_of(model: Path | str, folder: Path, **changes: Any) -> EvaluateConfig:
    """Return the configuration of an evaluation that writes to `folder`."""
    content: dict[str, Any] = {
        "job": "evaluate",
        "run_name": "scored",
        "output": str(folder / "runs"),
        "cache": str(folder / "cache"),
        "model": {"path": str(model)},
    }
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        (content[section] if section else content)[name] = value
    return EvaluateConfig.model_validate(content)


def records_of(folder: Path) -> list[dict[str, Any]]:
    """Return the records of an evaluation's folder."""
    return json.loads((folder / "scores.json").read_text())["records"]


def values_of(folder: Path) -> dict[tuple[str, str, str], float]:
    """Return the main scores by task, split and system."""
    return {
        (scores["task"], scores["split"], record["system"]): scores["value"]
        for record in records_of(folder)
        for scores in record["scores"]
    }
