"""Trials of two parameters, in place of fine-tunings: their functions have the names of `biphasic.finetuning.trial`.

What a trial does stands in its model's file: `{"do": "train" | "fail" | "die" | "sleep", "seconds": …}`. Each one that is
trained to its end leaves a line in the file that SMALL_TRIALS_LOG names, which nothing ever shortens.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

from biphasic.config.errors import UserError
from biphasic.config.finetune import FinetuneConfig
from biphasic.sweep.records import GridTask, Result


class Outcome(NamedTuple):
    results: tuple[Result, ...]
    seconds: dict[str, float]
    about: dict[str, Any]


class Cost(NamedTuple):
    parameters: int | None
    train_tokens: int
    scored_tokens: int
    flops: float | None
    bytes: int | None


def trial_name(config: FinetuneConfig) -> str:
    path = Path(config.model.path)
    if not path.is_file():
        raise UserError(f"model {path}: is not there")
    settings = config.model_dump(mode="json", exclude={"run_name", "model", "logging", "output"})
    return hashlib.sha256(path.read_bytes() + json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def results_of(config: FinetuneConfig) -> GridTask:
    return GridTask(config.task.name, "classification", ((config.task.name, config.task.name, "accuracy"),))


def cost_of(config: FinetuneConfig) -> Cost:
    return Cost(2, 1000, 1000, 7.2e6, json.loads(Path(config.model.path).read_text()).get("bytes"))


def run_trial(config: FinetuneConfig) -> Outcome:
    asked = json.loads(Path(config.model.path).read_text())
    log("began", config)
    if asked["do"] == "fail" and config.seed == 0 and not os.path.exists(asked.get("mended", "")):
        raise ValueError("no such luck\nat all")
    if asked["do"] == "die" and len(lines("began", config.run_name)) <= asked["times"]:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(asked.get("seconds", 0))
    begin = time.monotonic()
    score = train(config)
    log("trained", config)
    results = (Result(config.task.name, config.task.name, "classification", "accuracy", score, score),)
    return Outcome(results, {"train": time.monotonic() - begin}, {"threads": threads(), "pid": os.getpid()})


def train(config: FinetuneConfig) -> float:
    import torch

    torch.manual_seed(config.seed)
    model = torch.nn.Linear(1, 1)
    x = torch.linspace(-1, 1, 16)[:, None]
    for _ in range(20):
        loss = ((model(x) - 3 * x - 1) ** 2).mean()
        # By hand: torch.optim takes seconds to import.
        for parameter, slope in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
            parameter.data -= 1e3 * config.optimizer.lr * slope
    return 1 / (1 + loss.item())


def threads() -> list[Any]:
    import torch

    names = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES")
    return [torch.get_num_threads(), *map(os.environ.get, names)]


def log(what: str, config: FinetuneConfig) -> None:
    # One write of a few bytes at the end of a file is whole or absent.
    file = os.open(os.environ["SMALL_TRIALS_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{what} {config.run_name}\n".encode())
    os.close(file)


def lines(what: str, name: str | None = None, path: str | None = None) -> list[str]:
    file = Path(path or os.environ["SMALL_TRIALS_LOG"])
    found = [line.split() for line in file.read_text().splitlines()] if file.exists() else []
    return [run for kind, run in found if kind == what and name in (None, run)]
