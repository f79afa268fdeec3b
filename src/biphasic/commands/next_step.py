"""The last line that a command prints: what to run next."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from posixpath import abspath, basename
from typing import TYPE_CHECKING, Any

from biphasic.storage import is_remote, join

if TYPE_CHECKING:
    from biphasic.config.load import Config
    from biphasic.config.tasks import TasksConfig

_SMALL_TOKENS = 10_000_000
"""Text with fewer tokens is a few batches of the paper's (2.4 million), and has its own command in README."""
_FINETUNE = Path("yamls/finetune")


def after_conversion(output: str, record: Mapping[str, Any]) -> str:
    """Return the pretraining command for a finished conversion."""
    from omegaconf import OmegaConf

    output = output.rstrip("/")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", basename(output if is_remote(output) else abspath(output))).strip("-._")
    name, folder = (  # 2024 and true need quotes
        json.dumps(word) if word.isalnum() and OmegaConf.from_dotlist([f"word={word}"]).word != word else word
        for word in (name or "mine", output)
    )
    words, vocabulary = [f"run_name={name}", f"data.folder={folder}"], record["tokenizer"]["vocab_size"]
    if record["splits"]["train"]["tokens"] < _SMALL_TOKENS:
        file, words = (
            "yamls/quickstart.yaml",
            [*words, "output=runs", "tokenizer=null", f"model.vocab_size={vocabulary}"],
        )
    else:
        file = "yamls/210m_biphasic.yaml"
        words += [f"model.vocab_size={vocabulary}"] * (not 127_000 <= vocabulary <= 128_256)  # it has 128,256 rows
    if not record["splits"].get("validation", {}).get("rows"):
        words += ["data.validation=null", "evaluation.interval=null", "evaluation.batches=null"]
    return _next(file, *words, f"data.sequence_length={record['sequence_length']}")


def after_tasks(config: TasksConfig, names: list[str]) -> str:
    """Return the fine-tuning command for the first prepared task that has training data."""
    trained = [name for name in names if getattr(config.tasks[name], "train", True) is not None]
    if not trained:
        sets = f"sets=[{join(config.output, names[0])}]"
        return _next("yamls/evaluate/own.yaml", "model.path=ENCODER", sets)
    name = next((name for name in trained if (_FINETUNE / f"{name}.yaml").is_file()), trained[0])
    own, keys = _FINETUNE / f"{name}.yaml", [f"task.data={join(config.output, name)}"]
    if not own.is_file():
        own, keys = _FINETUNE / f"own_{config.tasks[name].kind}.yaml", [*keys, f"task.name={name}"]
        keys += ["task.text={text} {text_pair}"] * (getattr(config.tasks[name], "text_pair_column", None) is not None)
    return _next(str(own), "model.path=ENCODER", *keys)


def after_export(folder: Path) -> str:
    """Return how to fine-tune an exported folder."""
    return _next(f"{_FINETUNE}/sst2.yaml", f"model.path={folder}")


def after_run(config: Config) -> str:
    """Return the next step after a pretraining run, a fine-tuning, an evaluation, or a sweep without failures."""
    if config.job == "pretrain":
        return f"next: {shlex.join(['biphasic', 'export', config.checkpoint_destination, f'{config.run_folder}/encoder'])}"
    if config.job == "finetune" and config.save_model:
        model = f"{config.run_folder}/model"
        if config.task.kind == "retrieval":
            sets = f"sets=[{', '.join(config.task.retrieval_sets.values())}]"
            return _next("yamls/evaluate/own.yaml", f"model.path={model}", sets)
        return f"next: biphasic predict {shlex.quote(model)} FILE.jsonl"
    if config.job == "finetune":
        return f"scores: {config.run_folder}/record.json"
    if config.job == "evaluate":
        return f"scores: {config.run_folder}/scores.md"
    return f"tables: {config.output}/report"


def _next(file: str, *keys: str) -> str:
    return f"next: {shlex.join(['composer', 'src/main.py', file, *keys])}"
