"""The complete job on this machine's own text: `make quickstart`, or this file.

Eleven steps, each a command that a person could type. A step that is done and unchanged is not repeated. An interrupted step
continues where it can (pretraining resumes from its newest checkpoint) and otherwise starts again.
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

from biphasic.checkpointing.manifest import newest_complete
from biphasic.config.load import load
from biphasic.storage import json_bytes, open_store

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
    """A command, the paths that it makes, and the files of this repository that decide the result."""

    name: str
    description: str
    command: list[str]
    makes: list[Path]
    reads: list[str]
    after: tuple[str, ...] = ()
    resumes: bool = False


CODE = ["src/biphasic/config", "src/biphasic/data", "src/biphasic/model"]
CONVERSION = ["src/biphasic/config", "src/biphasic/data", "src/biphasic/conversion"]
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
        [PYTHON, "-m", "biphasic", "tokenizer", DATA, "--size", "8192", "--force"],
        [RUN / "tokenizer"],
        ["src/biphasic/conversion/train_tokenizer.py", DATA],
        ("gather",),
    ),
    Step(
        "convert",
        "packed rows as MDS shards, training and validation",
        [PYTHON, "-m", "biphasic", "convert", DATA],
        [RUN / "data"],
        [DATA, *CONVERSION],
        ("gather", "tokenizer"),
    ),
    Step(
        "verify",
        "every shard is read again and compared with the conversion's record",
        [PYTHON, "-m", "biphasic", "verify", str(RUN / "data")],
        [],
        CONVERSION,
        ("convert",),
    ),
    Step(
        "pretrain",
        "causal language modeling first, masked language modeling from the middle",
        [COMPOSER, "src/main.py", PRETRAIN],
        [TRAINED],
        [PRETRAIN, "src/main.py", *TRAINING],
        ("convert",),
        resumes=True,
    ),
    Step(
        "export",
        "the trained encoder as a folder that transformers and sentence-transformers load",
        [PYTHON, "-m", "biphasic", "export", LAST_CHECKPOINT, str(RUN / "encoder"), "--force"],
        [RUN / "encoder"],
        [*CODE, "src/biphasic/export"],
        ("pretrain",),
    ),
    Step(
        "export-untrained",
        "the same architecture with its initial weights",
        [PYTHON, "-m", "biphasic", "export", "--initial", PRETRAIN, str(RUN / "untrained"), "--force"],
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
            [
                FINETUNE,
                "src/main.py",
                *CODE,
                "src/biphasic/downstream",
                "src/biphasic/finetuning",
                "src/biphasic/export",
            ],
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
        [f"{HERE}/report.py"],
        ("score", "verify"),
    ),
]


def main() -> int:
    """Run the steps that are missing or changed, in order. Exit status: that of the first step that fails."""
    os.chdir(ROOT)
    # The steps run this interpreter's environment, whether or not it is activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    print(f"quickstart: text in, a biphasic encoder out; {len(STEPS)} steps, about 8 minutes on two cores, into {RUN}/")
    fingerprints: dict[str, str] = {}
    for number, step in enumerate(STEPS, 1):
        fingerprints[step.name] = content_hash = fingerprint(step, fingerprints)
        heading = f"[{number}/{len(STEPS)}] {step.name}"
        previous = read(step)
        unchanged = previous.get("fingerprint") == content_hash
        if unchanged and "seconds" in previous and all(path.exists() for path in step.makes):
            print(f"{heading}: done before and unchanged ({previous['seconds']:.0f} s)", flush=True)
            continue
        if not (step.resumes and unchanged):
            for path in step.makes:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        elif any(path.exists() for path in step.makes):
            print(f"{heading}: was interrupted; it resumes from its newest checkpoint", flush=True)
        command = [str(last_checkpoint()) if part == LAST_CHECKPOINT else part for part in step.command]
        print(f"{heading}: {step.description}\n    {' '.join(command)}", flush=True)
        spent = previous.get("spent", 0.0) if step.resumes and unchanged else 0.0
        write(step, {"fingerprint": content_hash, "number": number, "command": command, "spent": spent})
        start = time.monotonic()
        status = subprocess.run(command).returncode
        seconds = spent + time.monotonic() - start
        if status:
            write(step, {"fingerprint": content_hash, "number": number, "command": command, "spent": seconds})
            print(f"{heading}: failed (exit status {status}); the same command continues here", file=sys.stderr)
            return status
        write(step, {"fingerprint": content_hash, "number": number, "command": command, "seconds": seconds})
    print((RUN / "scores" / "summary.txt").read_text(encoding="utf-8").rstrip())
    print(f"report: {RUN / 'report.md'}")
    return 0


def fingerprint(step: Step, earlier: dict[str, str]) -> str:
    """A hash of everything that decides a step's result: its command, the files it reads, and the steps before it."""
    content = hashlib.sha256(repr((step.command, [earlier[name] for name in step.after])).encode())
    for name in step.reads:
        path = Path(name)
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            content.update(file.as_posix().encode() + file.read_bytes())
    return content.hexdigest()


def last_checkpoint() -> Path:
    """The last checkpoint of pretraining."""
    checkpoint = newest_complete(open_store(str(TRAINED / "checkpoints")), TRAINED / "checkpoints")
    if checkpoint is None:
        raise SystemExit(f"{TRAINED / 'checkpoints'} has no checkpoint: remove {TRAINED} and run this again")
    return TRAINED / "checkpoints" / checkpoint.path


def read(step: Step) -> dict[str, Any]:
    """The record of a step's last attempt; empty when there is none."""
    path = RUN / "steps" / f"{step.name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write(step: Step, record: dict[str, object]) -> None:
    """Write the record of an attempt; it has `seconds` only when the attempt succeeded."""
    open_store(str(RUN / "steps")).write(f"{step.name}.json", json_bytes(record))


if __name__ == "__main__":
    load(ROOT / PRETRAIN)  # A broken YAML is reported before any step runs.
    raise SystemExit(main())
