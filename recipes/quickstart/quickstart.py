"""The complete job on this machine's own text: `make quickstart`, or this file.

The same number of tokens for masked language modeling (MLM) alone, for causal language modeling (CLM) followed by MLM, and
for CLM alone; each model, and one that was not pretrained, is fine-tuned alike, by a sweep on token labelling and once on
retrieval, which is scored beside BM25. Every step is a command that a person could type. It runs as a fork of this process,
which has made the imports, and two steps run side by side. A step that is done and unchanged is not repeated. An interrupted
step continues where it can (pretraining resumes from its newest checkpoint) and otherwise starts again.

    python recipes/quickstart/quickstart.py [--seed N]

Another seed shares the text, the tokenizer and the rows, and has a folder of its own, runs/quickstart/seed-N.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import shlex
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import forked

from biphasic.amounts import format_seconds
from biphasic.config.load import load_job
from biphasic.config.pretrain import PretrainConfig
from biphasic.errors import PREEMPTED
from biphasic.storage import json_bytes, open_store
from biphasic.training.metrics_file import parse_metrics

ROOT = Path(__file__).parents[2]
RUN = Path("runs/quickstart")
HERE, MINI = "recipes/quickstart", "recipes/mini"
PRETRAIN, DATA = "yamls/quickstart.yaml", "yamls/data/quickstart.yaml"
RETRIEVAL, LABELLING = "yamls/finetune/quickstart_retrieval.yaml", "yamls/finetune/quickstart_parameters.yaml"
TASKS, SWEEP = f"{HERE}/tasks.yaml", f"{HERE}/sweep.yaml"
MODELS = ("clm-mlm", "mlm", "clm", "untrained")
PROGRESS_SECONDS = 20.0
CODE = ["src/biphasic/config", "src/biphasic/data", "src/biphasic/model"]
CONVERSION = ["src/biphasic/config", "src/biphasic/data", "src/biphasic/conversion"]
TRAINING = [*CODE, "src/main.py", "src/biphasic/objectives", "src/biphasic/training", "src/biphasic/checkpointing"]
FINETUNING = [*CODE, "src/main.py", "src/biphasic/downstream", "src/biphasic/finetuning", "src/biphasic/export"]
REPORT = ["src/biphasic/report", "src/biphasic/report/report.html"]


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


MLM, CLM = "objective.phases=[{name: mlm, masking_ratio: 0.4}]", "objective.phases=[{name: clm}]"


def make_steps(seed: int | None = None) -> list[Step]:
    """Return the steps in an order in which they can run. Default: the YAMLs' seeds.

    Raises:
        ConfigError: the pretraining YAML is invalid.
    """
    config = load_job(PretrainConfig, PRETRAIN)
    switch = config.objective.phases[0].until
    folder = RUN if seed is None else RUN / f"seed-{seed}"
    of_seed = [] if seed is None else [f"seed={seed}", f"output={folder}"]
    shared = [
        Step(
            "gather",
            "real English text: the docstrings of the installed packages, eight of which are held out for the tasks",
            ["python", f"{HERE}/gather.py"],
            [RUN / "text" / name for name in ("documents.parquet", "docstrings.parquet", "pairs", "gathered.json")],
            [f"{HERE}/gather.py", DATA, "requirements.lock"],
        ),
        Step(
            "examples",
            "token labelling: which words of a docstring's parameters are names, which are types?",
            ["python", f"{MINI}/make_tasks.py", str(RUN / "text"), "parameters"],
            [RUN / "text" / "sources"],
            [f"{MINI}/make_tasks.py", f"{MINI}/sections.py"],
            ("gather",),
        ),
        Step(
            "tasks",
            "the examples in the columns that fine-tuning reads",
            ["biphasic", "tasks", TASKS],
            [RUN / "tasks"],
            [TASKS, "src/biphasic/config", "src/biphasic/downstream"],
            ("examples",),
        ),
        Step(
            "tokenizer",
            "a byte-level BPE tokenizer of the text's own",
            ["biphasic", "tokenizer", DATA, "--size", str(config.model.vocab_size)],
            [RUN / "tokenizer"],
            ["src/biphasic/conversion/train_tokenizer.py", DATA],
            ("gather",),
        ),
        Step(
            "convert",
            "packed rows as MDS shards, training and validation",
            ["biphasic", "convert", DATA],
            [RUN / "data"],
            [DATA, *CONVERSION],
            ("gather", "tokenizer"),
        ),
        Step(
            "verify",
            "every shard is read again and compared with the conversion's record",
            ["biphasic", "verify", str(RUN / "data")],
            [],
            CONVERSION,
            ("convert",),
        ),
    ]

    def pretrain(run_name: str, description: str, overrides: list[str], after: str) -> Step:
        command = ["composer", "src/main.py", PRETRAIN, f"run_name={run_name}", *overrides, *of_seed]
        return Step(
            f"pretrain-{run_name}",
            description,
            command,
            [folder / run_name],
            [PRETRAIN, *TRAINING],
            (after,),
            resumes=True,
            folder=folder,
        )

    trunk = f"start_from={folder / 'clm-trunk'}"
    beginning = [f"max_duration={switch}", "schedule.decay=0ba", CLM]
    pretraining = [
        pretrain("clm-trunk", "the CLM batches before the switch, which two models share", beginning, "convert"),
        pretrain("mlm", "MLM alone", [MLM], "convert"),
        # Before clm-mlm, because it takes longer.
        pretrain("clm", "CLM alone", [CLM, trunk], "pretrain-clm-trunk"),
        pretrain("clm-mlm", "CLM up to the switch, then MLM", [trunk], "pretrain-clm-trunk"),
    ]
    exports, finetunings = list[Step](), list[Step]()
    encoders = {name: folder / name / "encoder" for name in MODELS}
    for name, out in encoders.items():
        source = ["--initial", PRETRAIN] if name == "untrained" else [str(folder / name / "checkpoints")]
        initial_seed = of_seed[:1] if name == "untrained" else []
        exports.append(
            Step(
                f"export-{name}",
                "a folder that transformers and sentence-transformers load",
                ["biphasic", "export", *source, str(out), *initial_seed, "--force"],
                [out],
                [PRETRAIN, *CODE, "src/biphasic/export"],
                ("tokenizer" if name == "untrained" else f"pretrain-{name}",),
                folder=folder,
            )
        )
        finetuned = f"{name}-finetuned"
        finetunings.append(
            Step(
                f"finetune-{name}",
                "retrieval: a docstring's first line finds the rest of it",
                ["composer", "src/main.py", RETRIEVAL, f"model.path={out}", f"run_name={finetuned}", *of_seed],
                [folder / finetuned],
                [RETRIEVAL, *FINETUNING],
                (f"export-{name}", "gather"),
                folder=folder,
            )
        )
    of_folder = [f"output={folder / 'sweep'}", *(f"models.{name}.path={out}" for name, out in encoders.items())]
    last = [
        Step(
            "sweep",
            "token labelling: each encoder at the best of three rates by validation, with three seeds",
            ["python", "src/main.py", SWEEP, *([] if seed is None else of_folder)],
            [folder / "sweep"],
            [SWEEP, LABELLING, *FINETUNING, "src/biphasic/sweep"],
            (*(step.name for step in exports), "tasks"),
            resumes=True,
            alone=True,
            folder=folder,
        ),
        Step(
            "score",
            "retrieval from held-out packages scored with mteb, BM25 beside it",
            ["python", f"{HERE}/score.py", str(folder)],
            [folder / "scores.json"],
            [f"{HERE}/score.py", *CODE, "src/biphasic/evaluation"],
            tuple(step.name for step in finetunings),
            folder=folder,
        ),
        Step(
            "sweep-report",
            "the sweep's tables and figures",
            ["biphasic", "report", str(folder / "sweep")],
            [folder / "sweep" / "report"],
            REPORT,
            ("sweep",),
            folder=folder,
        ),
        Step(
            "report",
            "what was shown and what wasn't, with pictures of scores and losses",
            ["python", f"{HERE}/report.py", str(folder)],
            [folder / name for name in ("report.md", "report.html", "summary.txt", "scores.png", "losses.png")],
            [f"{HERE}/report.py", *REPORT],
            ("score", "sweep-report", "verify"),
            folder=folder,
        ),
    ]
    return [*shared, *pretraining, *exports, *finetunings, *last]


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
            self.say(step, "was interrupted; it resumes from its newest checkpoint")
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


def main(arguments: list[str] | None = None) -> int:
    """Run the steps that are missing or changed. Exit status: that of the first step that fails."""
    parser = argparse.ArgumentParser(description="Text in, biphasic encoders out, and what the biphasic recipe gains.")
    parser.add_argument("--seed", type=int, help="of weights, order and masks; default: the YAMLs'")
    options = parser.parse_args(arguments)
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(PREEMPTED))
    start, steps = time.monotonic(), make_steps(options.seed)
    folder = steps[-1].folder
    print(
        f"quickstart: text in, encoders out; {len(steps)} commands, {forked.AT_ONCE} at a time, 5 minutes on two "
        f"cores, into {folder}/"
    )
    try:
        status = Schedule(steps).run()
    except KeyboardInterrupt:
        status = 130
    gc.unfreeze()  # otherwise extension modules report leaks at the end
    if status:
        return status
    print((folder / "summary.txt").read_text(encoding="utf-8").rstrip())
    print(f"report: {folder / 'report.html'}, report.md ({format_seconds(time.monotonic() - start)} in all)")
    return 0


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


if __name__ == "__main__":
    raise SystemExit(main())
