"""Trials of two parameters in place of fine-tunings; the functions are named as in `biphasic.finetuning.trial`.

The model's file says what a trial does: `{"do": "train" | "fail" | "die" | "hang" | "break", "log": FILE, ...}`. Trials
that fail or hang train instead once the file `mended` exists. A trial adds a line to the log when it starts and when its
training ends.
"""

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from biphasic.config.finetune import FinetuneConfig
from biphasic.errors import UserError
from biphasic.finetuning.records import DownstreamResult, TrialResult


def trial_name(config: FinetuneConfig) -> str:
    path = Path(config.model.path)
    if not path.is_file():
        raise UserError(f"model {path}: is not there")
    settings = config.model_dump(mode="json", exclude={"run_name", "model", "logging", "output"})
    return hashlib.sha256(path.read_bytes() + json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def require_unchanged(config: FinetuneConfig, name: str) -> None:
    if trial_name(config) != name:
        raise UserError(f"model {config.model.path}: has changed")


def scored_sets(config: FinetuneConfig) -> tuple[tuple[str, str, str], ...]:
    return ((config.task.name, config.task.name, "accuracy"),)


def require_validation(config: FinetuneConfig) -> None:
    pass


def check_trial(config: FinetuneConfig) -> list[str]:
    return []


def run_trial(config: FinetuneConfig) -> TrialResult:
    settings = json.loads(Path(config.model.path).read_text())
    log = Path(settings["log"])
    write_line(log, "started", config.run_name)
    mended = os.path.exists(settings.get("mended", ""))
    if settings["do"] == "fail" and config.seed == 0 and not mended:
        raise ValueError("no such luck\nat all")
    if settings["do"] == "hang" and not mended:
        time.sleep(100)
    if settings["do"] == "die" and read_log(log, "started").count(config.run_name) <= settings["times"]:
        os.kill(os.getpid(), signal.SIGKILL)
    if settings["do"] == "break" and read_log(log, "started").count(config.run_name) <= settings["times"]:
        write_line(log, "broken", str(os.getpid()))
        break_gpu()
    time.sleep(settings.get("seconds", 0))
    start = time.monotonic()
    score = train(config)
    write_line(log, "trained", config.run_name)
    results = (DownstreamResult(config.task.name, config.task.name, "classification", "accuracy", score, score),)
    return TrialResult(results, {"train": time.monotonic() - start}, {"threads": threads(), "pid": os.getpid()})


def break_gpu() -> None:
    """Raise a GPU's error, as all later calls do."""
    import torch

    def fail() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    torch.cuda.is_available = lambda: True
    torch.cuda.synchronize = fail  # pyright: ignore[reportAttributeAccessIssue]
    fail()


def train(config: FinetuneConfig) -> float:
    import torch

    torch.manual_seed(config.seed)
    model = torch.nn.Linear(1, 1)
    x = torch.linspace(-1, 1, 16)[:, None]
    for _ in range(20):
        loss = ((model(x) - 3 * x - 1) ** 2).mean()
        # By hand: torch.optim takes seconds to import.
        for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
            parameter.data -= 1e3 * config.optimizer.lr * gradient
    return 1 / (1 + loss.item())


def threads() -> list[Any]:
    import torch

    names = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM")
    return [torch.get_num_threads(), *map(os.environ.get, names)]


def write_line(log: Path, event: str, name: str) -> None:
    # One short write in append mode is atomic.
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{event} {name}\n".encode())
    os.close(file)


def read_log(log: Path, event: str) -> list[str]:
    """The names of the trials with this event, in order."""
    lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    return [name for kind, name in lines if kind == event]
