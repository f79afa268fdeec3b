"""Embedding a corpus of very different lengths: Biphasic over sentence-transformers with its defaults, the same model.

Two models: one of EuroBERT's format, which transformers 5 runs natively (in the environment of `make test-interop`) and
Biphasic packs, and a BERT. The sides take turns over the same texts, tokenization included.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tables import save
from workload import ROOT, asked, command, say

import finetuning

GOAL = 1.5
NEWER = ROOT / ".venv-interop" / "bin" / "python"
WAYS = {"native": "sentence-transformers, transformers 5", "here": "sentence-transformers, transformers 4.57"}


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


def measure(shape: Shape, names: tuple[str, ...] = finetuning.MODELS) -> dict[str, Any]:
    """Seconds of each side and round of the models, and how far the embeddings are apart."""
    import torch

    from biphasic.model.encoder import load_encoder

    torch.set_num_threads(shape.threads)
    models = finetuning.Shape(steps=1, width=shape.width, layers=shape.layers, words=shape.words, longest=shape.longest,
                              median=shape.median, spread=shape.spread)  # fmt: skip
    texts, _ = finetuning.texts(models, shape.texts, seed=5)
    found: dict[str, Any] = {"shape": asdict(shape), "tokens": sum(len(text.split()) for text in texts), "models": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "work"
        finetuning.prepare(folder, models, 32, 32)
        (folder / "texts.json").write_text(json.dumps(texts))
        for model in names:
            # What transformers 4.57 lacks is ours there too: its number says what packing in its place is worth.
            sides = (
                {"native": NEWER, "here": Path(sys.executable)} if model == "llama" else {"here": Path(sys.executable)}
            )
            others = {way: _Other(python, folder, model, way, shape.threads) for way, python in sides.items()}
            encoder = load_encoder(str(folder / model))
            encoder.backbone.eval()
            ours = encoder.embed(encoder.tokenize(texts[:64]))
            seconds: dict[str, list[float]] = {way: [] for way in ("ours", *others)}
            for number in range(shape.rounds):
                say(f"{model}: round {number + 1} of {shape.rounds}")
                start = time.monotonic()
                ours = encoder.embed(encoder.tokenize(texts))
                seconds["ours"].append(time.monotonic() - start)
                for way, other in others.items():
                    seconds[way].append(other.seconds())
            apart = {way: float(np.abs(other.embeddings() - ours.numpy()).max()) for way, other in others.items()}
            about = {way: other.about for way, other in others.items()}
            found["models"][model] = {"seconds": seconds, "apart": apart, "about": about}
    return found


class _Other:
    """A process with sentence-transformers."""

    def __init__(self, python: Path, folder: Path, model: str, way: str, threads: int):
        self._out = folder / f"{model}-{way}.npy"
        script = ROOT / "benchmarks" / "encoding_sentence_transformers.py"
        arguments = [str(folder / model), str(folder / "texts.json"), str(self._out), str(threads)]
        # transformers 4.57 learns of the format from us; the newer one knows it.
        start = [str(python)] if way == "native" else [str(python), "-c", _IMPORT]
        self._process = subprocess.Popen(
            [*start, str(script), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = self._line()

    def seconds(self) -> float:
        """Of one pass over all texts."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return float(self._line())

    def embeddings(self) -> np.ndarray:
        """Of the last pass; ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.wait(120):
            raise SystemExit("sentence-transformers' side failed")
        return np.load(self._out)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit("sentence-transformers' side failed")
        return line


_IMPORT = "import sys, runpy, biphasic; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def table(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table's header and rows."""
    rows = []
    for model, one in found["models"].items():
        times = {way: statistics.median(seconds) for way, seconds in one["seconds"].items()}
        rows.append([f"{model}: Biphasic", f"{found['tokens'] / times['ours']:,.0f}", "", "", ""])
        for way in one["apart"]:
            goal = f"≥ {GOAL}" if way == "native" or model == "bert" else ""
            rate, ratio = found["tokens"] / times[way], times[way] / times["ours"]
            rows.append([f"{model}: {WAYS[way]}", f"{rate:,.0f}", f"{ratio:.2f}", goal, f"{one['apart'][way]:.0e}"])
    return ["", "tokens/s", "Biphasic over it", "goal", "largest difference"], rows


def main() -> None:
    """Measure, and write the table."""
    shape = asked(Shape, __doc__)
    if not NEWER.is_file():
        raise SystemExit(f"{NEWER} isn't there: make bench-encoding builds it")
    found = measure(shape)
    header, rows = table(found)
    title = "Embedding over sentence-transformers"
    print(save("encoding", title, command("bench-encoding"), header, rows, found, note=shape.describe()))


if __name__ == "__main__":
    main()
