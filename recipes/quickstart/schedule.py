"""Run commands in the order that they need, some side by side, and record which are done and what they read.

A step that is done and unchanged is not repeated. An interrupted step continues where its command can, and otherwise starts
again.
"""

import hashlib
import json
import shlex
import shutil
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import forked

from biphasic.storage import json_bytes, open_store
from biphasic.training.metrics_file import parse_metrics

RUN = Path("runs/quickstart")
PROGRESS_SECONDS = 20.0
_KEPT = {"checkpoints/*.json": "resumes from its newest checkpoint", "trials/**/*.json": "keeps its finished trials"}
"""What an interrupted step may have finished, and what it does with it."""


@dataclass(frozen=True)
class Step:
    """A command, the paths that it makes, and the files of this repository that decide the result."""

    name: str
    description: str
    command: list[str]
    makes: list[Path]
    reads: list[str]
    after: tuple[str, ...] = ()
    resumes: bool = False
    alone: bool = False
    """It uses all cores itself, so no other step runs beside it."""
    folder: Path = RUN
    """Its record and its log are in `steps/` there."""

    @property
    def log(self) -> Path:
        """The file with the command's output."""
        return self.folder / "steps" / f"{self.name}.log"


@dataclass
class Running:
    """A step's command that runs now."""

    step: Step
    process: ForkProcess
    record: dict[str, Any]
    spent: float
    """Seconds of interrupted attempts that this one continues."""
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds up to now."""
        return self.spent + time.monotonic() - self.started


class Schedule:
    """Runs steps as soon as those before them are done, the first of the list first."""

    def __init__(self, steps: list[Step]):
        self.steps = steps
        self.fingerprints: dict[str, str] = {}
        for step in steps:
            self.fingerprints[step.name] = fingerprint(step, self.fingerprints)
        self.done: set[str] = set()
        self.running: dict[str, Running] = {}

    def run(self) -> int:
        """Run all steps. Exit status: that of the first step that fails; steps that run beside it are ended."""
        for step in self.steps:
            record = read(step)
            unchanged = record.get("fingerprint") == self.fingerprints[step.name]
            if unchanged and "seconds" in record and all(path.exists() for path in step.makes):
                self.done.add(step.name)
                self.say(step, f"done before and unchanged ({record['seconds']:.0f} s)")
        imported, shown = False, time.monotonic()
        try:
            while len(self.done) < len(self.steps):
                self.start_ready()
                if not imported:
                    forked.import_libraries()  # beside the first step, which needs none of them
                    imported = True
                wait([running.process.sentinel for running in self.running.values()], 1.0)
                if status := self.finish_ended():
                    return status
                if time.monotonic() - shown > PROGRESS_SECONDS:
                    shown = time.monotonic()
                    print(f"        {'; '.join(map(progress, self.running.values()))}", flush=True)
        finally:
            self.end_all()
        return 0

    def start_ready(self) -> None:
        """Start steps until as many run as can run side by side."""
        for step in self.steps:
            if len(self.running) == forked.AT_ONCE or any(running.step.alone for running in self.running.values()):
                return
            ready = step.name not in self.done and step.name not in self.running and set(step.after) <= self.done
            if ready and not (step.alone and self.running):
                self.running[step.name] = self.start(step)

    def start(self, step: Step) -> Running:
        """Start a step, after removing what an earlier attempt made, unless the command resumes from it."""
        previous, content_hash = read(step), self.fingerprints[step.name]
        resumes = step.resumes and previous.get("fingerprint") == content_hash
        if not resumes:
            for path in step.makes:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            step.log.unlink(missing_ok=True)
        elif any(path.exists() for path in step.makes):
            kept = (text for pattern, text in _KEPT.items() if any(any(path.glob(pattern)) for path in step.makes))
            self.say(step, f"was interrupted; it {next(kept, 'starts again')}")
        self.say(step, f"{step.description}\n        {shlex.join(step.command)}")
        number = self.steps.index(step) + 1
        record = {"fingerprint": content_hash, "number": number, "command": step.command}
        spent = previous.get("spent", 0.0) if resumes else 0.0
        write(step, {**record, "spent": spent})
        return Running(step, forked.start(step.command, step.log), record, spent)

    def finish_ended(self) -> int:
        """Record the steps that have ended. Returns the exit status of one that failed, or 0."""
        for name, running in list(self.running.items()):
            status = running.process.exitcode
            if status is None:
                continue
            running.process.join()
            del self.running[name]
            if status:
                write(running.step, {**running.record, "spent": running.seconds})
                lines = running.step.log.read_text(encoding="utf-8", errors="replace").splitlines()
                print("\n".join(lines[-30:]), file=sys.stderr)
                self.say(
                    running.step,
                    f"failed (exit status {status}, all of its output: {running.step.log}); the same command continues here",
                    sys.stderr,
                )
                return status if status > 0 else 128 - status
            write(running.step, {**running.record, "seconds": running.seconds})
            self.done.add(name)
            self.say(running.step, f"done, {running.seconds:.0f} s")
        return 0

    def end_all(self) -> None:
        """End the steps that still run; pretraining saves a checkpoint first."""
        for running in self.running.values():
            running.process.terminate()
        for running in self.running.values():
            running.process.join()
            write(running.step, {**running.record, "spent": running.seconds})
        self.running.clear()

    def say(self, step: Step, text: str, stream: Any = None) -> None:
        """Print a line about a step."""
        number = f"[{self.steps.index(step) + 1}/{len(self.steps)}]"
        print(f"{number:>7} {step.name}: {text}", file=stream or sys.stdout, flush=True)


def progress(running: Running) -> str:
    """Say how far a step is: of training, the batch and the loss; of a sweep, the number of finished trials."""
    text = f"{running.step.name} {running.seconds:.0f} s"
    for path in running.step.makes:
        file = path / "metrics.jsonl"
        if trials := len(list((path / "trials").glob("**/*.json"))):
            text += f", {trials} trials done"
        metrics = parse_metrics(file.read_text(encoding="utf-8")) if file.is_file() else []
        if metrics:
            loss = next((entry["loss/train/total"] for entry in reversed(metrics) if "loss/train/total" in entry), None)
            text += f", batch {metrics[-1]['batch']:,}" + (f", loss {loss:.2f}" if loss is not None else "")
    return text


def fingerprint(step: Step, earlier: dict[str, str]) -> str:
    """A hash of everything that decides a step's result: its command, the files it reads, and the steps before it."""
    content = hashlib.sha256(repr((step.command, [earlier[name] for name in step.after])).encode())
    for name in step.reads:
        path = Path(name)
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            content.update(file.as_posix().encode() + file.read_bytes())
    return content.hexdigest()


def read(step: Step) -> dict[str, Any]:
    """The record of a step's last attempt; empty when there is none."""
    path = step.folder / "steps" / f"{step.name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write(step: Step, record: dict[str, object]) -> None:
    """Write the record of an attempt; it has `seconds` only when the attempt succeeded."""
    open_store(str(step.folder / "steps")).write(f"{step.name}.json", json_bytes(record))
