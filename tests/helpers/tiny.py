"""A small dataset with a pattern in it, and tiny runs over it."""

import atexit
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from streaming import MDSWriter
from streaming.base.constant import TICK
from streaming.base.dataset import _Iterator, _IterState
from streaming.base.shared.memory import SharedMemory
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from biphasic.checkpointing.manifest import batch_of
from biphasic.config.load import load
from biphasic.config.pretrain import PretrainConfig
from biphasic.devices import describe_machine_once
from biphasic.training.metrics_file import read_metrics
from helpers import warm

describe_machine_once()

ROOT = Path(__file__).parents[2]
T = TypeVar("T")
WORDS, LENGTH = 64, 32
SIZE = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
}
"""The tiny model."""
PAD, BOS, EOS, MASK = range(4)


def documents(count: int, seed: int) -> list[np.ndarray]:
    """Counting sequences with a few errors, so that there is something to learn in either direction; EOS at the end."""
    generator = np.random.default_rng(seed)
    sequences = []
    for _ in range(count):
        length, step = int(generator.integers(3, 30)), int(generator.integers(1, 4))
        tokens = 4 + (int(generator.integers(60)) + step * np.arange(length)) % 60
        wrong = generator.random(length) < 0.05
        tokens[wrong] = generator.integers(4, 64, wrong.sum())
        sequences.append(np.append(tokens, EOS))
    return sequences


def write_rows(folder: Path, count: int, seed: int, length: int = LENGTH) -> None:
    columns = {"tokens": f"ndarray:uint16:{length}", "lengths": "ndarray:uint32"}
    with MDSWriter(out=str(folder), columns=columns, hashes=["xxh64"], compression="zstd", size_limit=1 << 14) as out:
        row, lengths = np.full(length, PAD, np.uint16), []
        for document in documents(count, seed):
            if sum(lengths) + len(document) > length:
                out.write({"tokens": row, "lengths": np.array(lengths, np.uint32)})
                row, lengths = np.full(length, PAD, np.uint16), []
            row[sum(lengths) : sum(lengths) + len(document)] = document
            lengths.append(len(document))


def write_tokenizer(folder: Path) -> None:
    """One word for each token of the rows."""
    special = ["<|pad|>", "<|bos|>", "<|eos|>", "<|mask|>"]
    vocabulary = {word: index for index, word in enumerate([*special, *(f"w{i}" for i in range(WORDS - 4))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(["pad_token", "bos_token", "eos_token", "mask_token"], special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def content_of(name: str, output: Path, data: Path) -> dict[str, Any]:
    """A tiny run's YAML; `data` has the folders `train` and `tokenizer`."""
    return {
        "job": "pretrain",
        "run_name": name,
        "output": str(output),
        "seed": 7,
        "tokenizer": str(data / "tokenizer"),
        "max_duration": "12ba",
        "global_batch_size": 8,
        "microbatch_size": 4,
        "model": dict(SIZE),
        "data": {
            "sequence_length": LENGTH,
            "train": {"local": str(data / "train")},
            "num_canonical_nodes": 2,
            "shuffle_block_size": 64,
            "num_workers": 0,
        },
        "objective": {"phases": [{"name": "clm", "until": "6ba"}, {"name": "mlm", "masking_ratio": 0.4}]},
        "optimizer": {"lr": 5e-3},
        "schedule": {"warmup": "3ba", "decay": "4ba"},
        "checkpoint": {"interval": "1ba"},
        "logging": {"tensorboard": False, "progress_bar": False},
    }


def config_of(path: Path, **overrides: Any) -> PretrainConfig:
    config = load(path, [f"{key}={value}" for key, value in overrides.items()])
    assert isinstance(config, PretrainConfig)
    return config


def train(config: PretrainConfig) -> Path:
    """Run it in this process, and free what Streaming holds for the next one."""
    from biphasic.training.recipe import pretrain

    try:
        return pretrain(config)
    finally:
        release_streaming()


def launch(path: Path, *overrides: str, processes: int = 1, code: str = "") -> subprocess.CompletedProcess[str]:
    """Run it to its end, its ranks as processes of their own with one thread each; `code` runs first in each."""
    return start(path, *overrides, processes=processes, code=code).wait(600)


def train_alone(path: Path) -> Path:
    """Run it in a process of its own, and return its folder.

    For runs with loader processes: on Python 3.13.0 these end with a segmentation fault when they are forked from a process
    in which Ray was used.
    """
    run = launch(path)
    assert run.returncode == 0, run.stderr[-3000:]
    return config_of(path).run_folder


def start(path: Path, *overrides: str, processes: int = 1, code: str = "") -> warm.Job:
    """The same, without waiting."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return warm.start([str(path), *overrides], processes, environment, code=code)


def add_callback(callback: Any, patch: Callable[[object, str, Any], object] = setattr) -> None:
    """Give every Trainer of a pretraining run one more callback; `patch` may be a MonkeyPatch's `setattr`."""
    from biphasic.training import recipe

    trainer = recipe.Trainer
    patch(recipe, "Trainer", lambda **keys: trainer(**{**keys, "callbacks": [callback, *keys["callbacks"]]}))


def wait_for_batch(folder: Path, batch: int, job: warm.Job | subprocess.Popen[str]) -> None:
    """Wait until a running job has trained so many batches."""
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 400
    while not metrics.exists() or len(metrics.read_text().splitlines()) < batch:
        assert job.poll() is None and time.monotonic() < deadline, job
        time.sleep(0.002)


def composer_command(*arguments: str | Path, processes: int = 1) -> list[str]:
    """The command of Composer's launcher; `arguments` are a script, or `-m` and a module, and its arguments."""
    return [str(Path(sys.executable).parent / "composer"), "-n", str(processes), *map(str, arguments)]


def losses(folder: Path) -> list[float]:
    return [entry["loss/train/total"] for entry in read_metrics(folder / "metrics.jsonl")]


def weights(folder: Path, batch: int) -> dict[str, torch.Tensor]:
    from biphasic.model.checkpoint import read_weights

    checkpoints = folder / "checkpoints"
    path = checkpoints / f"ba{batch}-rank0.pt"
    return read_weights(str(path if path.exists() else next(checkpoints.glob(f"ep*-ba{batch}"))))


def keep_checkpoints_up_to(folder: Path, batch: int) -> None:
    """Delete newer checkpoints, as if the run had been killed right after that batch."""
    for path in (folder / "checkpoints").iterdir():
        saved = batch_of(f"{path.name}/" if path.is_dir() else path.name)
        if saved is not None and saved > batch:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


_callbacks_without_memory = -1
"""Number of `atexit` callbacks when no shared memory was left. Streaming registers one for each that it creates."""


def release_streaming() -> None:
    """End the threads of datasets that were not read to their end, and free the shared memory of those that no longer exist.

    Streaming does so when the process ends. In a process with many tests, each such thread would look for work 140 times a
    second, and each new dataset would open all shared memory, until the process runs out of files.
    """
    global _callbacks_without_memory
    if atexit._ncallbacks() == _callbacks_without_memory:  # looking through all objects takes 20 ms
        return
    unfinished = [iterator for iterator in _alive(_Iterator) if iterator._state == _IterState.ITERATING]
    for iterator in unfinished:
        iterator.non_blocking_exit()
    time.sleep(2 * TICK if unfinished else 0)
    gc.collect()
    for memory in _alive(SharedMemory):  # `atexit` refers to each until it is cleaned up
        with suppress(BufferError):  # still in use
            memory.cleanup()
            atexit.unregister(memory.cleanup)
        del memory
    if not _alive(SharedMemory):
        _callbacks_without_memory = atexit._ncallbacks()


def _alive(kind: type[T]) -> list[T]:
    return [thing for thing in gc.get_objects() if type(thing) is kind]


def dump_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
