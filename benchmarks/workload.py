"""Shared by the benchmarks: options, tables of results, and runs of the trainer and the bare loop on the same rows.

Everything depends on a seed. Documents have log-normal lengths and are packed best-fit into rows; CLM comes first,
MLM second. Everything runs on the CPU, in fp32.
"""

import dataclasses
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

ShapeType = TypeVar("ShapeType")
Result = TypeVar("Result")
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
AGREE = 1e-4
"""Nats by which the losses of the same step of two runs may differ."""
PHASES = ("clm", "mlm")
MASKING_RATIO = 0.4
PAD, BOS, EOS, MASK = range(4)
SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "mask_token": "<mask>"}


@dataclass(frozen=True)
class Shape:
    """The size of the model and of the training. Its fields are the benchmarks' options."""

    vocabulary: int = 16384
    width: int = 256
    layers: int = 4
    heads: int = 4
    length: int = 512
    """Tokens in a row."""
    mean: int = 200
    """Tokens in a document, on average; the lengths are log-normal (sigma 1)."""
    rows: int = 8
    """In a step, over all ranks."""
    microbatch: int = 4
    """Rows in a forward pass."""
    steps: int = 14
    """Of each phase."""
    dropped: int = 3
    """Steps at the start of each phase that are not timed."""
    threads: int = 2
    """Of each rank."""
    seed: int = 17

    @property
    def tokens(self) -> int:
        """Tokens in all rows of both phases, including the rows that complete the epoch."""
        return (len(PHASES) * self.steps + 2) * self.rows * self.length

    def timed(self, phase: int) -> range:
        """The timed steps of a phase, counted from 0 over both phases."""
        return range(phase * self.steps + self.dropped, (phase + 1) * self.steps)

    def describe(self) -> str:
        """A description for the result's page."""
        head = 2 * self.vocabulary * self.width
        layer = 4 * self.width**2 + 3 * self.width * feed_forward(self.width)
        return (
            f"{(head + self.layers * layer) / 1e6:.1f}M parameters (width {self.width}, {self.layers} layers, vocabulary "
            f"{self.vocabulary:,}), rows of {self.length}, documents of {self.mean} tokens on average, {self.rows} rows a "
            f"step in microbatches of {self.microbatch}, {self.threads} threads a rank, fp32; {self.steps} steps of each "
            f"phase, the first {self.dropped} not timed."
        )


def parse_options(shape: type[ShapeType], description: str | None, **defaults: Any) -> tuple[ShapeType, Namespace]:
    """Parse the command line: an option for each field of a shape of numbers, and for each further name in `defaults`."""
    parser = ArgumentParser(description=(description or "").splitlines()[0])
    fields = {field.name: field.default for field in dataclasses.fields(shape)}  # pyright: ignore[reportArgumentType]
    for name, default in {**fields, **defaults}.items():
        kind = int if default is None else type(default)
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, type=kind, default=default)
    options = parser.parse_args()
    return shape(**{name: getattr(options, name) for name in fields}), options


def report(
    name: str, title: str, header: list[str], rows: list[list[str]], numbers: dict[str, Any], note: str | None = None
) -> None:
    """Write and print `results/NAME.md`, a table with the machine it was measured on; all `numbers` are in `NAME.json`."""
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    about, date = machine(), datetime.now(UTC).date().isoformat()
    described = f"`{command}`, {date}: " + ", ".join(f"{key} {value}" for key, value in about.items())
    lines = [f"# {title}", "", described, "", *([] if note is None else [note, ""])]
    table = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    text = "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in table)]) + "\n"
    RESULTS.mkdir(exist_ok=True)
    content = {"title": title, "command": command, "date": date, "machine": about, **numbers}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)


def machine() -> dict[str, Any]:
    """Processor, cores that may be used, memory, and the versions that matter."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    packages = ("torch", "transformers", "tokenizers", "mosaicml", "mosaicml-streaming", "pyarrow", "ray")
    about = {"processor": model, "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory / 2**30, 1)}
    return {**about, "python": platform.python_version(), **{name: version(name) for name in packages}}


def documents(shape: Shape) -> list[np.ndarray]:
    """Token ids, uint16 [n], of documents with `shape.tokens` tokens in all; small ids are more frequent."""
    generator = np.random.default_rng(shape.seed)
    mu = np.log(shape.mean) - 0.5
    texts, total = [], 0
    while total < shape.tokens:
        length = int(np.clip(generator.lognormal(mu, 1.0), 4, 8 * shape.length))
        words = 4 + ((shape.vocabulary - 4) * generator.random(length - 1) ** 3).astype(np.uint16)
        texts.append(np.append(words, np.uint16(EOS)))
        total += length
    return texts


def write_tokenizer(folder: Path, size: int) -> None:
    """Write a tokenizer folder with a vocabulary of `size` words, the special tokens first."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        word: index for index, word in enumerate([*SPECIAL.values(), *(f"w{index}" for index in range(size - len(SPECIAL)))])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(folder)


def prepare(folder: Path, shape: Shape) -> Path:
    """Write shards, tokenizer, `batches.pt` (the run's batches in order) and the run's YAML, which is returned."""
    import torch
    import yaml

    from biphasic.config.load import load_job
    from biphasic.config.pretrain import PretrainConfig
    from biphasic.data.packing import DocumentPacker, mds_columns, padded
    from biphasic.data.streaming import build_loader

    say(f"preparing {shape.tokens:,} tokens")
    from streaming import MDSWriter

    with MDSWriter(
        out=str(folder / "train"), columns=mds_columns(shape.length, "uint16"), hashes=["xxh64"], compression="zstd"
    ) as out:
        packer = DocumentPacker(shape.length, window=1024)
        for row in [*chain.from_iterable(map(packer.add, documents(shape))), *packer.finish()]:
            out.write(padded(row, shape.length, PAD))
    write_tokenizer(folder / "tokenizer", shape.vocabulary)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(_content(folder, shape)), encoding="utf-8")
    # From a copy: Streaming allows one job at a time per folder, and this process keeps its dataset.
    shutil.copytree(folder / "train", folder / "copy")
    config = load_job(PretrainConfig, path, [f"data.train.local={folder / 'copy'}", "data.num_workers=0"])
    batches = build_loader(config.data.reading, config.data.streams, shape.rows, config.seed, train=True)
    steps = len(PHASES) * shape.steps
    first = [batch for batch, _ in zip(batches, range(steps), strict=False)]
    assert len(first) == steps, f"{len(first)} batches of {steps}"
    torch.save(first, folder / "batches.pt")
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
    """Width of the gated layer: Llama's ratio, rounded to a multiple of 32."""
    return round(8 * width / 3 / 32) * 32


@dataclass(frozen=True)
class Run:
    """The measurements of a run; times are seconds since the epoch."""

    started: float
    """Start of the process."""
    began: float
    """Start of the first step, when its batch has arrived."""
    ends: list[float]
    """End of each step."""
    losses: list[float]
    """Of each step, in nats."""
    tokens: list[int]
    """Of each step, without padding."""

    @property
    def start_seconds(self) -> float:
        """From the start of the process to the start of the first step."""
        return self.began - self.started

    @property
    def seconds(self) -> list[float]:
        """Of each step, from the end of the previous one."""
        return [end - before for before, end in zip([self.began, *self.ends], self.ends, strict=False)]


class Disagreement(Exception):
    """Two runs that should train the same model do not."""


class Agreement:
    """Compares each run's losses with the first run's as soon as it ends, so that a wrong benchmark stops early."""

    def __init__(self) -> None:
        self.largest = 0.0
        """Largest difference so far, in nats."""
        self._first: Run | None = None

    def __call__(self, run: Run, label: str) -> Run:
        """Return the run. Raises a Disagreement if its losses differ, or their number."""
        first = self._first = self._first or run
        if len(first.losses) != len(run.losses):
            raise Disagreement(f"{label}: {len(first.losses)} steps against {len(run.losses)}")
        for step, (expected, loss) in enumerate(zip(first.losses, run.losses, strict=True), 1):
            # In this form a NaN counts as a difference.
            if not abs(expected - loss) <= AGREE:
                raise Disagreement(
                    f"{label}: at step {step} the losses are {expected:.6f} and {loss:.6f}, more than {AGREE} apart: "
                    "they don't train the same model on the same batches, so their times can't be compared"
                )
            self.largest = max(self.largest, abs(expected - loss))
        return run


def launch(arguments: list[str], ranks: int, threads: int) -> float:
    """Run a script with its arguments until its ranks have ended, and return the time of its start, since the epoch.

    With several ranks, `composer` starts `main.py`, and `torchrun` others. A RuntimeError has the end of its output.
    """
    launcher: list[str] = []
    if ranks > 1:
        is_biphasic = Path(arguments[0]).name == "main.py"
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node"]
        launcher = ["-m", *(["composer.cli.launcher", "-n"] if is_biphasic else torchrun), str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    started = time.time()
    command = [sys.executable, *launcher, *arguments]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {run.returncode}:\n{run.stdout[-4000:]}")
    return started


def run_biphasic(path: Path, name: str, shape: Shape, ranks: int = 1, *overrides: str) -> Run:
    """Train with Biphasic, as users do, with the YAML of `prepare` and a new name."""
    say(f"{name}: Biphasic, {ranks} ranks")
    started = launch([str(ROOT / "src" / "main.py"), str(path), f"run_name={name}", *overrides], ranks, shape.threads)
    folder = path.parent / "runs" / name
    # Not `read_metrics`, which merges the line of the last batch with the line of the run's end, after the last save.
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
    """The time at which a run's first batch had arrived. TensorBoard stores the time of each number beside its step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # Each rank has a file; only the first rank's holds numbers.
    name, times = "data/wait_seconds", []
    for events in folder.rglob("events.out.tfevents.*"):
        accumulator = EventAccumulator(str(events)).Reload()
        if name in accumulator.Tags()["scalars"]:
            times.append(accumulator.Scalars(name)[0].wall_time)
    return min(times)


def run_bare_loop(path: Path, name: str, shape: Shape, ranks: int = 1, *overrides: str, seed: int | None = None) -> Run:
    """Train the same model on the same batches in the bare loop. `seed`: of weights and masks, by default the same."""
    say(f"{name}: the bare loop, {ranks} ranks")
    out = path.parent / f"{name}.json"
    script = str(Path(__file__).with_name("bare_loop.py"))
    seeds = [] if seed is None else ["--seed", str(seed)]
    started = launch(
        [script, str(path), str(path.parent / "batches.pt"), str(out), *overrides, *seeds], ranks, shape.threads
    )
    return Run(started=started, **json.loads(out.read_text(encoding="utf-8")))


def rates(runs: list[Run], shape: Shape) -> dict[str, dict[str, float]]:
    """For each phase, over the timed steps of all rounds: the median seconds of a step, and its real tokens per second.

    `both` is one step of each phase.
    """
    by_phase: dict[str, dict[str, float]] = {}
    for index, phase in enumerate(PHASES):
        steps = [(run.seconds[step], run.tokens[step]) for run in runs for step in shape.timed(index)]
        seconds, tokens = statistics.median(step[0] for step in steps), statistics.mean(step[1] for step in steps)
        by_phase[phase] = {"seconds": seconds, "tokens_per_second": tokens / seconds, "tokens": tokens}
    seconds, tokens = (sum(phase_rates[key] for phase_rates in by_phase.values()) for key in ("seconds", "tokens"))
    by_phase["both"] = {"seconds": seconds, "tokens_per_second": tokens / seconds, "tokens": tokens}
    return by_phase


def raw(runs: list[Run]) -> list[dict[str, Any]]:
    """All measurements, for the JSON."""
    return [
        {"start_seconds": round(run.start_seconds, 3), "step_seconds": [round(value, 4) for value in run.seconds],
         "tokens": run.tokens, "losses": [round(value, 6) for value in run.losses]} for run in runs
    ]  # fmt: skip


def take_turns(rounds: int, starters: dict[str, Callable[[int], Result]]) -> dict[str, list[Result]]:
    """Run each in turn, `rounds` times, so that a slow minute of the machine affects all of them."""
    runs: dict[str, list[Result]] = {name: [] for name in starters}
    for round_ in range(rounds):
        for name, start in starters.items():
            runs[name].append(start(round_))
    return runs


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
