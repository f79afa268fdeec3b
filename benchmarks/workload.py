"""What the training benchmarks share: documents, shards, a YAML, the trainer and the bare loop as processes of their own.

Everything is drawn from a seed: documents of log-normal lengths, packed best-fit into rows, trained on with CLM first and
MLM after. All of it runs on the CPU, in fp32.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

Asked = TypeVar("Asked")
ROOT = Path(__file__).parents[1]
PHASES = ("clm", "mlm")
MASKING_RATIO = 0.4
PAD, BOS, EOS, MASK = range(4)
SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "mask_token": "<mask>"}
AGREE = 1e-4
"""Nats by which two losses of the same step may differ."""


@dataclass(frozen=True)
class Shape:
    """How much is trained, of what size. Its fields are the benchmarks' options."""

    vocabulary: int = 16384
    width: int = 256
    layers: int = 4
    heads: int = 4
    length: int = 512
    """Tokens in a row."""
    mean: int = 200
    """Tokens in a document, on average; the lengths are log-normal (sigma 1)."""
    rows: int = 8
    """In a step, all ranks together."""
    microbatch: int = 4
    """Rows in a forward pass."""
    steps: int = 14
    """Of each phase."""
    dropped: int = 3
    """Steps at the beginning of each phase that aren't timed."""
    threads: int = 2
    """Of each rank."""
    seed: int = 17

    @property
    def tokens(self) -> int:
        """Positions in all rows of both phases, and of the rows that fill an epoch up."""
        return (len(PHASES) * self.steps + 2) * self.rows * self.length

    def timed(self, phase: int) -> range:
        """The steps of a phase that are timed, counted from 0 over both phases."""
        return range(phase * self.steps + self.dropped, (phase + 1) * self.steps)

    def describe(self) -> str:
        """In words, for the result's page."""
        head = 2 * self.vocabulary * self.width
        layer = 4 * self.width**2 + 3 * self.width * feed_forward(self.width)
        return (
            f"{(head + self.layers * layer) / 1e6:.1f}M parameters (width {self.width}, {self.layers} layers, vocabulary "
            f"{self.vocabulary:,}), rows of {self.length}, documents of {self.mean} tokens on average, {self.rows} rows a "
            f"step in microbatches of {self.microbatch}, {self.threads} threads a rank, fp32; {self.steps} steps of each "
            f"phase, the first {self.dropped} not timed."
        )


def add_options(parser: ArgumentParser, **defaults: int) -> None:
    """An option for each field of `Shape`, and `--rounds`."""
    for field in dataclasses.fields(Shape):
        parser.add_argument(f"--{field.name}", type=int, default=defaults.get(field.name, field.default))
    parser.add_argument("--rounds", type=int, default=defaults.get("rounds", 3), help="runs of each; they take turns")


def shape_of(given: Namespace) -> Shape:
    """The shape that the options ask for."""
    return Shape(**{field.name: getattr(given, field.name) for field in dataclasses.fields(Shape)})


def asked(kind: type[Asked], about: str | None) -> Asked:
    """What the command line says: an option for each field of a shape of numbers. `about` is the script's docstring."""
    parser = ArgumentParser(description=(about or "").splitlines()[0])
    for field in dataclasses.fields(kind):  # pyright: ignore[reportArgumentType]
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    return kind(**vars(parser.parse_args()))


def command(name: str) -> str:
    """The command that this process was started with, for the result's page."""
    return (
        " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]) if sys.argv[1:] else f"make {name}"
    )


def documents(shape: Shape) -> list[np.ndarray]:
    """Token ids (uint16 [n], each) of documents for `shape.tokens` positions. Small ids are more frequent, so that losses
    fall and depend on the batch."""
    noise = np.random.default_rng(shape.seed)
    mu = np.log(shape.mean) - 0.5
    found, total = [], 0
    while total < shape.tokens:
        length = int(np.clip(noise.lognormal(mu, 1.0), 4, 8 * shape.length))
        words = 4 + ((shape.vocabulary - 4) * noise.random(length - 1) ** 3).astype(np.uint16)
        found.append(np.append(words, np.uint16(EOS)))
        total += length
    return found


def write_tokenizer(folder: Path, words: int) -> None:
    """A tokenizer folder of `words` words, the special tokens first."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    known = {word: at for at, word in enumerate([*SPECIAL.values(), *(f"w{at}" for at in range(words - len(SPECIAL)))])}
    tokenizer = Tokenizer(models.WordLevel(known, "w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(folder)


def prepare(folder: Path, shape: Shape) -> Path:
    """Write shards, tokenizer, `batches.pt` and the run's YAML into a folder.

    `batches.pt` holds the batches of the run in its own order, for a loop that reads no shards.

    Returns:
        The YAML.
    """
    import torch
    import yaml

    from biphasic.config.load import load
    from biphasic.config.schema import PretrainConfig
    from biphasic.data.rows import columns, pack_documents, padded
    from biphasic.data.streaming import loader

    say(f"preparing {shape.tokens:,} tokens")
    from streaming import MDSWriter

    with MDSWriter(
        out=str(folder / "train"), columns=columns(shape.length, "uint16"), hashes=["xxh64"], compression="zstd"
    ) as out:
        for row in pack_documents(documents(shape), shape.length, window=1024):
            out.write(padded(row, shape.length, PAD))
    write_tokenizer(folder / "tokenizer", shape.vocabulary)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(_content(folder, shape)), encoding="utf-8")
    # From a copy: Streaming lets one job at a time use a folder, and this process's dataset lives on.
    shutil.copytree(folder / "train", folder / "copy")
    config = load(path, [f"data.train.local={folder / 'copy'}", "data.num_workers=0"])
    assert isinstance(config, PretrainConfig)
    batches = loader(config.data, config.data.streams, shape.rows, config.seed, train=True).dataloader
    wanted = len(PHASES) * shape.steps
    found = [batch for batch, _ in zip(batches, range(wanted), strict=False)]
    assert len(found) == wanted, f"{len(found)} batches of {wanted}"
    torch.save(found, folder / "batches.pt")
    return path


def _content(folder: Path, shape: Shape) -> dict[str, Any]:
    last = len(PHASES) * shape.steps
    return {
        "job": "pretrain", "run_name": "bench", "output": str(folder / "runs"), "seed": shape.seed,
        "tokenizer": str(folder / "tokenizer"), "max_duration": f"{last}ba", "global_batch_size": shape.rows,
        "microbatch_size": shape.microbatch,
        "model": {"vocab_size": shape.vocabulary, "hidden_size": shape.width, "num_layers": shape.layers,
                  "intermediate_size": feed_forward(shape.width), "num_heads": shape.heads},
        "data": {"sequence_length": shape.length, "train": {"local": str(folder / "train")}, "num_canonical_nodes": 1},
        "objective": {"phases": [{"name": "clm", "until": f"{shape.steps}ba"},
                                 {"name": "mlm", "masking_ratio": MASKING_RATIO}]},
        "schedule": {"warmup": "2ba", "decay": f"{shape.steps // 2}ba"},
        "checkpoint": {"interval": f"{last}ba"},
        "logging": {"progress_bar": False},
    }  # fmt: skip


def feed_forward(width: int) -> int:
    """Width of the gated layer: Llama's share, in steps of 32."""
    return round(8 * width / 3 / 32) * 32


@dataclass(frozen=True)
class Run:
    """What a run reports: times are seconds since the epoch."""

    started: float
    """The process's start."""
    began: float
    """The first step's: its batch is there."""
    ends: list[float]
    """Of each step."""
    losses: list[float]
    """Of each step, in nats."""
    tokens: list[int]
    """Of each step, padding not counted."""

    @property
    def start_seconds(self) -> float:
        """From the process's start to the first step's."""
        return self.began - self.started

    @property
    def seconds(self) -> list[float]:
        """Of each step, from the end of the one before it."""
        return [end - before for before, end in zip([self.began, *self.ends], self.ends, strict=False)]


def launch(arguments: list[str], ranks: int, threads: int) -> float:
    """Run a script of this repository's until its ranks have ended: as `python` for one, by a launcher for more.

    Args:
        arguments: the script and its arguments; `main.py` is started by `composer`, others by `torchrun`.
        ranks: processes.
        threads: of each.

    Returns:
        When it was started, seconds since the epoch.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    launcher: list[str] = []
    if ranks > 1:
        ours = Path(arguments[0]).name == "main.py"
        module = ["composer.cli.launcher", "-n"] if ours else ["torch.distributed.run", "--nproc-per-node"]
        launcher = ["-m", *module, str(ranks)]
        # Several of these run on a machine, one after another: the port of the last one may still be held.
        launcher += ["--master_port" if ours else "--master-port", str(_free_port())]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    started = time.time()
    run = subprocess.run(
        [sys.executable, *launcher, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if run.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {run.returncode}:\n{run.stdout[-4000:]}")
    return started


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def ours(path: Path, name: str, shape: Shape, ranks: int = 1, *overrides: str) -> Run:
    """Train the YAML with Biphasic, as users do.

    Args:
        path: what `prepare` returned.
        name: of the run, a new one each time.
        shape: that was prepared.
        ranks: processes.
        overrides: further keys, `key=value`.
    """
    say(f"{name}: Biphasic, {ranks} ranks")
    started = launch([str(ROOT / "src" / "main.py"), str(path), f"run_name={name}", *overrides], ranks, shape.threads)
    folder = path.parent / "runs" / name
    # Not `read_metrics`: it adds the line of the run's end, written after the last save, to that of the last batch.
    written = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    lines = [line for line in map(json.loads, written) if "loss/train/total" in line]
    began = _first_batch(folder)
    shutil.rmtree(folder)
    tokens = [line["tokens"] for line in lines]
    return Run(
        started=started,
        began=began,
        ends=[line["time"] for line in lines],
        losses=[line["loss/train/total"] for line in lines],
        tokens=[after - before for before, after in zip([0, *tokens], tokens, strict=False)],
    )


def _first_batch(folder: Path) -> float:
    """When a run's first batch was there. TensorBoard keeps the time at which a number was logged, not only its step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # Each rank has a file, and the first one's holds the numbers.
    name, found = "data/wait_seconds", []
    for events in folder.rglob("events.out.tfevents.*"):
        kept = EventAccumulator(str(events)).Reload()
        if name in kept.Tags()["scalars"]:
            found.append(kept.Scalars(name)[0].wall_time)
    return min(found)


def bare(path: Path, name: str, shape: Shape, ranks: int = 1, seed: int | None = None) -> Run:
    """Train the same in the bare loop.

    Args:
        path: what `prepare` returned.
        name: of the run.
        shape: that was prepared.
        ranks: processes.
        seed: of the initial weights and the masks; default the YAML's.
    """
    say(f"{name}: the bare loop, {ranks} ranks")
    out = path.parent / f"{name}.json"
    script = str(Path(__file__).with_name("bare_loop.py"))
    seeds = [] if seed is None else ["--seed", str(seed)]
    started = launch([script, str(path), str(path.parent / "batches.pt"), str(out), *seeds], ranks, shape.threads)
    return Run(started=started, **json.loads(out.read_text(encoding="utf-8")))


class Disagreement(Exception):
    """Two runs that should train the same don't."""


def require_same(one: Run, other: Run, what: str) -> float:
    """Compare the losses of every step.

    Returns:
        The largest difference, in nats.

    Raises:
        Disagreement: at some step they differ by more than `AGREE`, or a run has fewer steps.
    """
    if len(one.losses) != len(other.losses):
        raise Disagreement(f"{what}: {len(one.losses)} steps against {len(other.losses)}")
    largest = 0.0
    for step, (mine, theirs) in enumerate(zip(one.losses, other.losses, strict=True), 1):
        # Written so that a NaN is a difference.
        if not abs(mine - theirs) <= AGREE:
            raise Disagreement(
                f"{what}: at step {step} the losses are {mine:.6f} and {theirs:.6f}, more than {AGREE} apart: they don't "
                "train the same model on the same batches, so their times say nothing"
            )
        largest = max(largest, abs(mine - theirs))
    return largest


class Agreement:
    """Compares each run's losses with the first run's, as soon as it is there: nobody should wait for rounds that mean
    nothing."""

    def __init__(self) -> None:
        self.largest = 0.0
        """Difference so far, in nats."""
        self._first: Run | None = None

    def __call__(self, run: Run, what: str) -> Run:
        """The run, if it trains the same.

        Raises:
            Disagreement: it doesn't.
        """
        self._first = self._first or run
        self.largest = max(self.largest, require_same(self._first, run, what))
        return run


def rates(runs: list[Run], shape: Shape) -> dict[str, dict[str, float]]:
    """For each phase, over the timed steps of all rounds: the median of a step's seconds, and real tokens a second at it.

    `both` is a step of each phase together.
    """
    found: dict[str, dict[str, float]] = {}
    for index, phase in enumerate(PHASES):
        steps = [(run.seconds[at], run.tokens[at]) for run in runs for at in shape.timed(index)]
        seconds, tokens = statistics.median(one for one, _ in steps), statistics.mean(count for _, count in steps)
        found[phase] = {"seconds": seconds, "tokens_per_second": tokens / seconds, "tokens": tokens}
    seconds, tokens = (sum(one[key] for one in found.values()) for key in ("seconds", "tokens"))
    found["both"] = {"seconds": seconds, "tokens_per_second": tokens / seconds, "tokens": tokens}
    return found


def raw(runs: list[Run]) -> list[dict[str, Any]]:
    """Everything measured, for the JSON."""
    return [
        {
            "start_seconds": round(run.start_seconds, 3),
            "step_seconds": [round(value, 4) for value in run.seconds],
            "tokens": run.tokens,
            "losses": [round(value, 6) for value in run.losses],
        }
        for run in runs
    ]


def take_turns(rounds: int, makers: dict[str, Callable[[int], Run]]) -> dict[str, list[Run]]:
    """Run each in turn, `rounds` times, so that a slow minute of the machine hits all of them."""
    found: dict[str, list[Run]] = {name: [] for name in makers}
    for turn, name in _turns(rounds, list(makers)):
        found[name].append(makers[name](turn))
    return found


def _turns(rounds: int, names: list[str]) -> Iterator[tuple[int, str]]:
    for turn in range(rounds):
        for name in names:
            yield turn, name


def say(text: str) -> None:
    """Print a line of progress, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
