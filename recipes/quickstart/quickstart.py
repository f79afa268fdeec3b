"""The main job from start to end on this machine's own text: `make quickstart`, or this file.

Eleven steps, each a command that a person could type. What is done and unchanged is not done again; a step that was
interrupted goes on where it can (pretraining resumes from its newest checkpoint) and starts over where it can't.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from biphasic.checkpointing.manifest import newest
from biphasic.config.load import load
from biphasic.storage import as_bytes, store

ROOT = Path(__file__).parents[2]
RUN = Path("runs/quickstart")
HERE = "recipes/quickstart"
PRETRAIN, FINETUNE, DATA = (
    "yamls/quickstart.yaml",
    "yamls/finetune/quickstart_retrieval.yaml",
    "yamls/data/quickstart.yaml",
)
TRAINED = RUN / "quickstart-pretrain"
PYTHON, COMPOSER = Path(sys.executable).name, "composer"
LAST_CHECKPOINT = "<the last checkpoint>"


@dataclass(frozen=True)
class Step:
    """A command, what it makes, and the files besides earlier steps' that decide what comes out."""

    name: str
    what: str
    command: list[str]
    makes: list[Path]
    reads: list[str]
    after: tuple[str, ...] = ()
    resumes: bool = False


CODE = ["src/biphasic/config", "src/biphasic/data", "src/biphasic/model"]
TRAINING = [*CODE, "src/biphasic/objectives", "src/biphasic/training", "src/biphasic/checkpointing"]
STEPS = [
    Step(
        "gather",
        "real English text: the docstrings of the installed packages, as Parquet in FineWeb-Edu's columns",
        [PYTHON, f"{HERE}/gather.py"],
        [RUN / "text"],
        [f"{HERE}/gather.py", DATA, "requirements.lock"],
    ),
    Step(
        "tokenizer",
        "a byte-level BPE tokenizer of 8,192 words",
        [PYTHON, f"{HERE}/train_tokenizer.py"],
        [RUN / "tokenizer"],
        [f"{HERE}/train_tokenizer.py", DATA],
        ("gather",),
    ),
    Step(
        "convert",
        "packed rows as MDS shards, training and validation",
        [PYTHON, "data_prep/convert.py", DATA],
        [RUN / "data"],
        ["data_prep/convert.py", DATA, *CODE[:2]],
        ("gather", "tokenizer"),
    ),
    Step(
        "verify",
        "every shard read again and compared with what the conversion recorded",
        [PYTHON, "data_prep/verify.py", str(RUN / "data")],
        [],
        ["data_prep/verify.py", *CODE[:2]],
        ("convert",),
    ),
    Step(
        "pretrain",
        "causal language modeling first, masked language modeling from half-way",
        [COMPOSER, "src/main.py", PRETRAIN],
        [TRAINED],
        [PRETRAIN, "src/main.py", *TRAINING],
        ("convert",),
        resumes=True,
    ),
    Step(
        "export",
        "the trained encoder as a folder that transformers and sentence-transformers load",
        [PYTHON, "-m", "biphasic.export", LAST_CHECKPOINT, str(RUN / "encoder"), "--force"],
        [RUN / "encoder"],
        [*CODE, "src/biphasic/export"],
        ("pretrain",),
    ),
    Step(
        "export-untrained",
        "the same architecture with its initial weights",
        [PYTHON, "-m", "biphasic.export", "--initial", PRETRAIN, str(RUN / "untrained"), "--force"],
        [RUN / "untrained"],
        [PRETRAIN, *CODE, "src/biphasic/export"],
        ("tokenizer",),
    ),
    *(
        Step(
            f"finetune-{start}",
            f"retrieval from docstrings' first lines, starting from {RUN / start}",
            [COMPOSER, "src/main.py", FINETUNE, f"model.path={RUN / start}", f"run_name={start}-finetuned"],
            [RUN / f"{start}-finetuned"],
            [FINETUNE, "src/main.py", *CODE, "src/biphasic/finetuning", "src/biphasic/export"],
            (before, "gather"),
        )
        for start, before in (("encoder", "export"), ("untrained", "export-untrained"))
    ),
    Step(
        "score",
        "held-out pairs scored with mteb, BM25 beside them",
        [PYTHON, f"{HERE}/score.py"],
        [RUN / "scores"],
        [f"{HERE}/score.py", *CODE, "src/biphasic/evaluation"],
        ("finetune-encoder", "finetune-untrained"),
    ),
    Step(
        "report",
        "the report",
        [PYTHON, f"{HERE}/report.py"],
        [RUN / "report.md", RUN / "loss.png"],
        [f"{HERE}/report.py", "src/biphasic/report"],
        ("score", "verify"),
    ),
]


def main() -> int:
    """Run what is missing or changed, in order. Exit status: the first failing step's."""
    os.chdir(ROOT)
    # What this interpreter's environment installed is what the steps run, whether or not it was activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    print(f"quickstart: text in, a biphasic encoder out; {len(STEPS)} steps, about 8 minutes on two cores, into {RUN}/")
    fingerprints: dict[str, str] = {}
    for number, step in enumerate(STEPS, 1):
        fingerprints[step.name] = mark = fingerprint(step, fingerprints)
        heading = f"[{number}/{len(STEPS)}] {step.name}"
        done = read(step)
        if done.get("fingerprint") == mark and "seconds" in done and all(path.exists() for path in step.makes):
            print(f"{heading}: done before and unchanged ({done['seconds']:.0f} s then)", flush=True)
            continue
        if not (step.resumes and done.get("fingerprint") == mark):
            for path in step.makes:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        elif any(path.exists() for path in step.makes):
            print(f"{heading}: was interrupted; it goes on from its newest checkpoint", flush=True)
        command = [str(last_checkpoint()) if part == LAST_CHECKPOINT else part for part in step.command]
        print(f"{heading}: {step.what}\n    {' '.join(command)}", flush=True)
        spent = done.get("spent", 0.0) if step.resumes and done.get("fingerprint") == mark else 0.0
        write(step, {"fingerprint": mark, "number": number, "command": command, "spent": spent})
        start = time.monotonic()
        status = subprocess.run(command).returncode
        seconds = spent + time.monotonic() - start
        if status:
            write(step, {"fingerprint": mark, "number": number, "command": command, "spent": seconds})
            print(f"{heading}: failed (exit status {status}); run it again to go on from here", file=sys.stderr)
            return status
        write(step, {"fingerprint": mark, "number": number, "command": command, "seconds": seconds})
    print((RUN / "scores" / "summary.txt").read_text(encoding="utf-8").rstrip())
    print(f"report: {RUN / 'report.md'}")
    return 0


def fingerprint(step: Step, earlier: dict[str, str]) -> str:
    """A hash of everything that decides what a step makes: its command, the files it reads, the steps before it."""
    content = hashlib.sha256(repr((step.command, [earlier[name] for name in step.after])).encode())
    for name in step.reads:
        path = Path(name)
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            content.update(file.as_posix().encode() + file.read_bytes())
    return content.hexdigest()


def last_checkpoint() -> Path:
    """Where pretraining ended."""
    found = newest(store(str(TRAINED / "checkpoints")), TRAINED / "checkpoints")
    if found is None:
        raise SystemExit(f"{TRAINED / 'checkpoints'} has no checkpoint: remove {TRAINED} and run this again")
    return TRAINED / "checkpoints" / found.path


def read(step: Step) -> dict[str, Any]:
    """What is known of a step's last attempt."""
    path = RUN / "steps" / f"{step.name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write(step: Step, record: dict[str, object]) -> None:
    """Remember an attempt; `seconds` stands in it only when it succeeded."""
    store(str(RUN / "steps")).write(f"{step.name}.json", as_bytes(record))


if __name__ == "__main__":
    load(ROOT / PRETRAIN)  # A broken YAML is said before anything is spent.
    raise SystemExit(main())
