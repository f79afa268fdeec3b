"""Fine-tuning against Hugging Face's Trainer with dynamic padding: the same texts, weights, head, optimizer and schedule.

Texts of very different lengths; tokens of text a second, and the test's accuracy. Two models: one of Llama's shape, which
Biphasic packs, and a BERT, which is called with padding on either side. Hugging Face's Trainer runs twice: with
`DataCollatorWithPadding` alone, and with `group_by_length` too, which changes the order of texts.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tables import save
from workload import ROOT, asked, command, launch, say

GOAL = 1.3
MODELS = ("llama", "bert")
WAYS = ("ours", "padded", "grouped")
SPECIAL = ["[PAD]", "[EOS]", "[CLS]", "[SEP]", "[MASK]"]


@dataclass(frozen=True)
class Shape:
    """The task and the models."""

    steps: int = 60
    """Batches of 32 texts."""
    dropped: int = 5
    """First steps that are not timed."""
    seeds: int = 3
    width: int = 192
    layers: int = 3
    words: int = 2000
    median: int = 40
    """Tokens of the text in the middle; lengths are lognormal with this spread."""
    spread: float = 1.0
    longest: int = 512
    threads: int = 2

    def describe(self) -> str:
        """A line for the page."""
        return (
            f"{self.steps} steps of 32 texts, lengths lognormal around {self.median} tokens (sigma {self.spread}, at most "
            f"{self.longest}), one label in ten drawn at random; {self.layers} layers of width {self.width}, "
            f"{self.words:,} words, fp32, {self.threads} threads, {self.seeds} seeds"
        )


def texts(shape: Shape, count: int, seed: int) -> tuple[list[str], list[int]]:
    """Texts and labels: one of two words, somewhere, decides."""
    noise = np.random.default_rng([7, seed])
    lengths = np.clip(noise.lognormal(np.log(shape.median), shape.spread, count), 2, shape.longest - 4).astype(int)
    found, labels = [], []
    for length in lengths:
        label = int(noise.integers(2))
        words = [f"w{word}" for word in noise.integers(10, shape.words, length)]
        # Three of them, so that a mean over a long text still shows them.
        for at in noise.integers(0, length, 3):
            words[at] = f"w{label}"
        found.append(" ".join(words))
        labels.append(label if noise.random() > 0.1 else int(noise.integers(2)))
    return found, labels


def prepare(folder: Path, shape: Shape, validation: int = 256, test: int = 1024) -> None:
    """The set (with so many texts to score), the tokenizer and both models' first weights."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    from biphasic.config.architecture import Architecture
    from biphasic.data.downstream import SCHEMAS
    from biphasic.data.tokenizer import load_tokenizer
    from biphasic.export.write import export_encoder
    from biphasic.model.fresh import from_hf_config, llama_config

    (folder / "set").mkdir(parents=True)
    for number, (split, count) in enumerate((("train", shape.steps * 32), ("validation", validation), ("test", test))):
        found, labels = texts(shape, count, number)
        rows = {"id": [str(at) for at in range(count)], "text": found, "text_pair": [None] * count, "label": labels}
        pq.write_table(pa.table(rows, SCHEMAS["classification"]), folder / "set" / f"{split}.parquet")
    record = {"kind": "classification", "label_names": ["a", "b"], "rows": {}}
    (folder / "set" / "task.json").write_text(json.dumps(record))
    vocabulary = {word: at for at, word in enumerate([*SPECIAL, *(f"w{number}" for number in range(shape.words))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(["pad_token", "eos_token", "cls_token", "sep_token", "mask_token"], SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder / "tokenizer")
    heads = shape.width // 32
    size = Architecture(len(vocabulary), shape.width, 2 * shape.width, shape.layers, heads, heads, 32, False)
    encoder = from_hf_config(llama_config(size, shape.longest), seed=0).backbone
    export_encoder(encoder, load_tokenizer(str(folder / "tokenizer")), folder / "llama", "card")
    torch.manual_seed(0)
    bert = BertConfig(
        vocab_size=len(vocabulary), hidden_size=shape.width, num_hidden_layers=shape.layers,
        num_attention_heads=heads, intermediate_size=2 * shape.width, max_position_embeddings=shape.longest,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    BertModel(bert).save_pretrained(folder / "bert")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder / "bert")


def content(folder: Path, model: str, seed: int) -> dict[str, Any]:
    """Our YAML."""
    return {
        "job": "finetune", "run_name": f"{model}-{seed}", "output": str(folder / "runs"), "cache": str(folder / "cache"),
        "seed": seed, "model": {"path": str(folder / model)},
        "task": {"kind": "classification", "name": "texts", "data": str(folder / "set"), "max_length": 512},
        "optimizer": {"lr": 1e-3}, "save_model": False, "logging": {"tensorboard": False, "progress_bar": False},
    }  # fmt: skip


def ours(folder: Path, model: str, seed: int, shape: Shape) -> dict[str, Any]:
    """Train and score with `src/main.py`: seconds and tokens of each step, accuracy."""
    import yaml

    from biphasic.training.jsonl_logger import read_metrics

    path = folder / f"{model}-{seed}.yaml"
    path.write_text(yaml.safe_dump(content(folder, model, seed)))
    launch([str(ROOT / "src" / "main.py"), str(path)], 1, shape.threads)
    run = folder / "runs" / f"{model}-{seed}"
    lines = read_metrics(run / "metrics.jsonl")
    ends, counted = [line["time"] for line in lines], [line["tokens"] for line in lines]
    [result] = json.loads((run / "record.json").read_text())["results"]
    return {
        "seconds": np.diff(ends).tolist(),
        "tokens": np.diff(counted).tolist(),
        "accuracy": result["test"],
        "loss": lines[-1]["loss/train/total"],
    }


def theirs(folder: Path, model: str, seed: int, shape: Shape, way: str) -> dict[str, Any]:
    """The same with Hugging Face's Trainer, in a process of its own."""
    out = folder / f"{model}-{way}-{seed}.json"
    arguments = [str(ROOT / "benchmarks" / "finetuning_hugging_face.py"), str(folder), model, str(seed), way, str(out)]
    launch(arguments, 1, shape.threads)
    return json.loads(out.read_text())


def measure(shape: Shape) -> dict[str, Any]:
    """Run all in turn."""
    runs: dict[str, dict[str, list[Any]]] = {model: {way: [] for way in WAYS} for model in MODELS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "work"
        prepare(folder, shape)
        (folder / "shape.json").write_text(json.dumps(asdict(shape)))
        for seed in range(shape.seeds):
            for model in MODELS:
                for way in WAYS:
                    say(f"{model}, seed {seed}: {way}")
                    one = ours(folder, model, seed, shape) if way == "ours" else theirs(folder, model, seed, shape, way)
                    runs[model][way].append(one)
    return {"shape": asdict(shape), "runs": runs, "rates": rates(runs, shape)}


def rates(runs: dict[str, dict[str, list[Any]]], shape: Shape) -> dict[str, dict[str, Any]]:
    """Tokens/s over all timed steps of all seeds, their ratio to ours, and accuracies."""
    found: dict[str, dict[str, Any]] = {}
    for model, ways in runs.items():
        found[model] = {}
        for way, made in ways.items():
            timed = [(one["tokens"][shape.dropped :], one["seconds"][shape.dropped :]) for one in made]
            tokens, seconds = (sum(sum(part[at]) for part in timed) for at in range(2))
            accuracies = [one["accuracy"] for one in made]
            found[model][way] = {
                "tokens_per_second": tokens / seconds,
                "accuracy": statistics.fmean(accuracies),
                "spread": statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0,
            }
        for way in WAYS[1:]:
            found[model][way]["ratio"] = (
                found[model]["ours"]["tokens_per_second"] / found[model][way]["tokens_per_second"]
            )
    return found


def table(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table's header and rows."""
    names = {
        "ours": "Biphasic",
        "padded": "Hugging Face, dynamic padding",
        "grouped": "Hugging Face, and group_by_length",
    }
    rows = []
    for model, ways in found["rates"].items():
        for way, one in ways.items():
            ratio = [f"{one['ratio']:.2f}", f"≥ {GOAL}" if way == "padded" else ""] if way != "ours" else ["", ""]
            score = f"{one['accuracy']:.4f} ± {one['spread']:.4f}"
            rows.append([f"{model}: {names[way]}", f"{one['tokens_per_second']:,.0f}", *ratio, score])
    return ["", "tokens/s", "Biphasic over it", "goal", "test accuracy, and its standard deviation over seeds"], rows


def main() -> None:
    """Measure, and write the table."""
    shape = asked(Shape, __doc__)
    found = measure(shape)
    header, rows = table(found)
    title = "Fine-tuning against Hugging Face's Trainer"
    print(save("finetuning", title, command("bench-finetuning"), header, rows, found, note=shape.describe()))


if __name__ == "__main__":
    main()
