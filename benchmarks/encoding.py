"""Embedding a corpus of very different lengths: Biphasic over sentence-transformers with its defaults, the same model.

Two models: one of EuroBERT's format, which Biphasic packs, and a BERT. The sides take turns over the same texts,
tokenization included.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tables import save
from workload import asked, command, say

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
    """Tokens of the text in the middle; lengths are lognormal with this spread."""
    spread: float = 1.2
    longest: int = 2048
    threads: int = 2

    def describe(self) -> str:
        """A line for the page."""
        return (
            f"{self.texts:,} texts, lengths lognormal around {self.median} tokens (sigma {self.spread}, at most "
            f"{self.longest:,}); {self.layers} layers of width {self.width}, fp32, {self.threads} threads; the median of "
            f"{self.rounds} rounds in which the sides take turns"
        )


def load(path: str) -> dict[str, Callable[[list[str]], Any]]:
    """A function from texts to their embeddings for each side."""
    from sentence_transformers import SentenceTransformer

    from biphasic.model.encoder import load_encoder

    encoder, other = load_encoder(path), SentenceTransformer(path, device="cpu")
    encoder.backbone.eval()

    def ours(texts: list[str]) -> Any:
        return encoder.embed(encoder.tokenize(texts))

    def theirs(texts: list[str]) -> Any:
        return other.encode(texts, convert_to_tensor=True)  # sorted by length, in batches of 32: its defaults

    return dict(zip(SIDES, (ours, theirs), strict=True))


def measure(shape: Shape, names: tuple[str, ...] = finetuning.MODELS) -> dict[str, Any]:
    """Seconds of each side and round of the models, and how far the embeddings are apart."""
    import torch

    torch.set_num_threads(shape.threads)
    models = finetuning.Shape(steps=1, width=shape.width, layers=shape.layers, words=shape.words, longest=shape.longest,
                              median=shape.median, spread=shape.spread)  # fmt: skip
    texts, _ = finetuning.texts(models, shape.texts, seed=5)
    found: dict[str, Any] = {"shape": asdict(shape), "tokens": sum(len(text.split()) for text in texts), "models": {}}
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
            one, another = embeddings.values()
            found["models"][model] = {"seconds": seconds, "apart": float((one - another).abs().max())}
    return found


def table(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table's header and rows."""
    rows = []
    for model, one in found["models"].items():
        ours, theirs = (statistics.median(one["seconds"][side]) for side in SIDES)
        rows.append([f"{model}: {SIDES[0]}", f"{found['tokens'] / ours:,.0f}", "", "", ""])
        rate, apart = f"{found['tokens'] / theirs:,.0f}", f"{one['apart']:.0e}"
        rows.append([f"{model}: {SIDES[1]}", rate, f"{theirs / ours:.2f}", f"≥ {GOAL}", apart])
    return ["", "tokens/s", "Biphasic over it", "goal", "largest difference"], rows


def main() -> None:
    """Measure, and write the table."""
    shape = asked(Shape, __doc__)
    found = measure(shape)
    header, rows = table(found)
    title = "Embedding over sentence-transformers"
    print(save("encoding", title, command("bench-encoding"), header, rows, found, note=shape.describe()))


if __name__ == "__main__":
    main()
