"""Fine-tuning against Hugging Face's Trainer with dynamic padding: the same texts, weights, head, optimizer and schedule.

Texts of very different lengths; the results are tokens of text per second and test accuracy. Two models: one of Llama's
shape, which Biphasic packs, and a BERT, which both trainers call with padding. Hugging Face's Trainer runs twice: with
`DataCollatorWithPadding`, and also with `group_by_length`, which changes the order of texts.
"""

import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from workload import ROOT, launch, parse_options, report, say

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
    """Steps at the start that are not timed."""
    seeds: int = 3
    width: int = 192
    layers: int = 3
    words: int = 2000
    median: int = 40
    """Median tokens of a text; lengths are log-normal with `spread`."""
    spread: float = 1.0
    longest: int = 512
    threads: int = 2

    def describe(self) -> str:
        return (
            f"{self.steps} steps of 32 texts, lengths lognormal around {self.median} tokens (sigma {self.spread}, at most "
            f"{self.longest}), one label in ten drawn at random; {self.layers} layers of width {self.width}, "
            f"{self.words:,} words, fp32, {self.threads} threads, {self.seeds} seeds"
        )


def texts(shape: Shape, count: int, seed: int) -> tuple[list[str], list[int]]:
    """Texts and labels: one of two words at random positions decides the label."""
    generator = np.random.default_rng([7, seed])
    lengths = np.clip(generator.lognormal(np.log(shape.median), shape.spread, count), 2, shape.longest - 4).astype(int)
    sentences, labels = [], []
    for length in lengths:
        label = int(generator.integers(2))
        words = [f"w{word}" for word in generator.integers(10, shape.words, length)]
        # Three times, so that it still shows in the mean over a long text.
        for position in generator.integers(0, length, 3):
            words[position] = f"w{label}"
        sentences.append(" ".join(words))
        labels.append(label if generator.random() > 0.1 else int(generator.integers(2)))
    return sentences, labels


def prepare(folder: Path, shape: Shape, validation: int = 256, test: int = 1024) -> None:
    """Write the dataset, the tokenizer and both models' initial weights."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    from biphasic.data.tokenizer import load_tokenizer
    from biphasic.downstream.writer import SCHEMAS
    from biphasic.export.formats import choose_format
    from biphasic.export.write import write_folder
    from biphasic.model.architecture import Architecture
    from biphasic.model.language_model import from_hf_config, llama_config

    (folder / "set").mkdir(parents=True)
    for number, (split, count) in enumerate((("train", shape.steps * 32), ("validation", validation), ("test", test))):
        sentences, labels = texts(shape, count, number)
        ids = [str(index) for index in range(count)]
        rows = {"id": ids, "text": sentences, "text_pair": [None] * count, "label": labels}
        pq.write_table(pa.table(rows, SCHEMAS["classification"]), folder / "set" / f"{split}.parquet")
    record = {"kind": "classification", "label_names": ["a", "b"], "rows": {}}
    (folder / "set" / "task.json").write_text(json.dumps(record))
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *(f"w{number}" for number in range(shape.words))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(["pad_token", "eos_token", "cls_token", "sep_token", "mask_token"], SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder / "tokenizer")
    heads = shape.width // 32
    size = Architecture(len(vocabulary), shape.width, 2 * shape.width, shape.layers, heads, heads, 32, False)
    encoder = from_hf_config(llama_config(size, shape.longest), seed=0).backbone
    own, weights = load_tokenizer(str(folder / "tokenizer")), encoder.state_dict()
    write_folder(choose_format(encoder.config, own), "Model", weights, own, folder / "llama", "card")
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
    return {
        "job": "finetune", "run_name": f"{model}-{seed}", "output": str(folder / "runs"), "cache": str(folder / "cache"),
        "seed": seed, "model": {"path": str(folder / model)},
        "task": {"kind": "classification", "name": "texts", "data": str(folder / "set"), "max_length": 512},
        "optimizer": {"lr": 1e-3}, "save_model": False, "logging": {"tensorboard": False, "progress_bar": False},
    }  # fmt: skip


def run_biphasic(folder: Path, model: str, seed: int, shape: Shape) -> dict[str, Any]:
    """Train and score with `src/main.py`: seconds and tokens of each step, accuracy."""
    import yaml

    from biphasic.training.metrics_file import read_metrics

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


def run_hugging_face(folder: Path, model: str, seed: int, shape: Shape, way: str) -> dict[str, Any]:
    """Train and score with Hugging Face's Trainer in its own process: as `run_biphasic`."""
    out = folder / f"{model}-{way}-{seed}.json"
    script = str(ROOT / "benchmarks" / "hugging_face.py")
    launch([script, "classify", str(folder), model, str(seed), way, str(out)], 1, shape.threads)
    return json.loads(out.read_text())


def measure(shape: Shape) -> dict[str, Any]:
    runs: dict[str, dict[str, list[Any]]] = {model: {way: [] for way in WAYS} for model in MODELS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "work"
        prepare(folder, shape)
        (folder / "shape.json").write_text(json.dumps(asdict(shape)))
        for seed in range(shape.seeds):
            for model in MODELS:
                for way in WAYS:
                    say(f"{model}, seed {seed}: {way}")
                    given = folder, model, seed, shape
                    run = run_biphasic(*given) if way == "ours" else run_hugging_face(*given, way)
                    runs[model][way].append(run)
    return {"shape": asdict(shape), "runs": runs, "rates": rates(runs, shape)}


def rates(runs: dict[str, dict[str, list[Any]]], shape: Shape) -> dict[str, dict[str, Any]]:
    """Tokens/s over all timed steps of all seeds, the ratios to Biphasic's, and accuracies."""
    results: dict[str, dict[str, Any]] = {}
    for model, ways in runs.items():
        results[model] = {}
        for way, of_way in ways.items():
            timed = [(run["tokens"][shape.dropped :], run["seconds"][shape.dropped :]) for run in of_way]
            tokens, seconds = (sum(sum(run_parts[part]) for run_parts in timed) for part in range(2))
            accuracies = [run["accuracy"] for run in of_way]
            results[model][way] = {
                "tokens_per_second": tokens / seconds,
                "accuracy": statistics.fmean(accuracies),
                "spread": statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0,
            }
        for way in WAYS[1:]:
            of_way = results[model][way]
            of_way["ratio"] = results[model]["ours"]["tokens_per_second"] / of_way["tokens_per_second"]
    return results


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    labels = ("Biphasic", "Hugging Face, dynamic padding", "Hugging Face, and group_by_length")
    names = dict(zip(WAYS, labels, strict=True))
    rows = []
    for model, ways in results["rates"].items():
        for way, rate in ways.items():
            ratio = [f"{rate['ratio']:.2f}", f"≥ {GOAL}" if way == "grouped" else ""] if way != "ours" else ["", ""]
            score = f"{rate['accuracy']:.4f} ± {rate['spread']:.4f}"
            rows.append([f"{model}: {names[way]}", f"{rate['tokens_per_second']:,.0f}", *ratio, score])
    return ["", "tokens/s", "Biphasic over it", "goal", "test accuracy ± standard deviation over seeds"], rows


def main() -> None:
    shape, _ = parse_options(Shape, __doc__)
    results = measure(shape)
    report("finetuning", "Fine-tuning against Hugging Face's Trainer", *table(results), results, note=shape.describe())


if __name__ == "__main__":
    main()
