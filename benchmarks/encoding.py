"""Embedding a corpus of very different lengths: Biphasic against sentence-transformers with its defaults, the same model.

Two models: one in EuroBERT's format, which Biphasic packs, and a BERT. Both libraries embed the same texts in turn,
including tokenization.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workload import parse_options, report, say

import finetuning

GOAL = 1.5
SIDES = ("Biphasic", "sentence-transformers")


@dataclass(frozen=True)
class Shape:
    """The corpus and the models."""

    texts: int = 800
    rounds: int = 3
    width: int = 384
    layers: int = 6
    words: int = 2000
    median: int = 30
    """Median tokens of a text; lengths are log-normal with `spread`."""
    spread: float = 1.2
    longest: int = 2048
    threads: int = 2

    def describe(self) -> str:
        return (
            f"{self.texts:,} texts, lengths lognormal around {self.median} tokens (sigma {self.spread}, at most "
            f"{self.longest:,}); {self.layers} layers of width {self.width}, fp32, {self.threads} threads; the median of "
            f"{self.rounds} rounds, in turn"
        )


def load(path: str) -> dict[str, Callable[[list[str]], Any]]:
    """A function from texts to their embeddings for each library."""
    from sentence_transformers import SentenceTransformer

    from biphasic.model.encoder import load_encoder

    encoder, other = load_encoder(path), SentenceTransformer(path, device="cpu")
    encoder.backbone.eval()

    def embed_biphasic(texts: list[str]) -> Any:
        return encoder.embed(encoder.tokenize(texts))

    def embed_other(texts: list[str]) -> Any:
        return other.encode(texts, convert_to_tensor=True)  # sorted by length, in batches of 32: its defaults

    return dict(zip(SIDES, (embed_biphasic, embed_other), strict=True))


def measure(shape: Shape, names: tuple[str, ...] = finetuning.MODELS) -> dict[str, Any]:
    import torch

    torch.set_num_threads(shape.threads)
    models = finetuning.Shape(steps=1, width=shape.width, layers=shape.layers, words=shape.words, longest=shape.longest,
                              median=shape.median, spread=shape.spread)  # fmt: skip
    texts, _ = finetuning.texts(models, shape.texts, seed=5)
    results: dict[str, Any] = {"shape": asdict(shape), "tokens": sum(len(text.split()) for text in texts), "models": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "work"
        finetuning.prepare(folder, models, 32, 32)
        for model in names:
            sides = load(str(folder / model))
            embeddings = {side: embed(texts[:64]) for side, embed in sides.items()}
            seconds: dict[str, list[float]] = {side: [] for side in SIDES}
            for number in range(shape.rounds):
                say(f"{model}: round {number + 1} of {shape.rounds}")
                for side, embed in sides.items():
                    start = time.monotonic()
                    embeddings[side] = embed(texts)
                    seconds[side].append(time.monotonic() - start)
            first, second = embeddings.values()
            results["models"][model] = {"seconds": seconds, "apart": float((first - second).abs().max())}
    return results


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = []
    for model, times in results["models"].items():
        biphasic, other = (statistics.median(times["seconds"][side]) for side in SIDES)
        rows.append([f"{model}: {SIDES[0]}", f"{results['tokens'] / biphasic:,.0f}", "", "", ""])
        rate, apart = f"{results['tokens'] / other:,.0f}", f"{times['apart']:.0e}"
        rows.append([f"{model}: {SIDES[1]}", rate, f"{other / biphasic:.2f}", f"≥ {GOAL}", apart])
    return ["", "tokens/s", "Biphasic over it", "goal", "largest difference"], rows


def main() -> None:
    shape, _ = parse_options(Shape, __doc__)
    results = measure(shape)
    report("encoding", "Embedding over sentence-transformers", *table(results), results, note=shape.describe())


if __name__ == "__main__":
    main()
