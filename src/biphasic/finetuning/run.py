"""`job: finetune`: one encoder, one task, one learning rate, one seed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from composer.utils import dist, get_device

from biphasic.config.errors import UserError
from biphasic.config.finetune import FinetuneConfig
from biphasic.config.load import dump
from biphasic.config.places import folder_of
from biphasic.export.card import finetuned_card
from biphasic.export.finetuned import export_finetuned, written_as
from biphasic.finetuning.task import Task, Trained
from biphasic.finetuning.trial import Outcome, train_and_score, trial_name
from biphasic.storage import as_bytes, store

RECORD = "record.json"


def run(config: FinetuneConfig) -> Path:
    """Fine-tune, score, write the model, and record what was done; a run that is recorded already is left alone.

    Returns:
        The run's folder.

    Raises:
        UserError: the model or the data can't be used.
    """
    folder = folder_of(config)
    dist.initialize_dist(get_device(None))
    name = trial_name(config)
    if (folder / RECORD).is_file():
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if found.get("trial") == name and (found["saved"] or not config.save_model):
            _say(f"{config.run_name}: already fine-tuned from the same model, data and settings; nothing to do")
            return folder
        raise UserError(f"{folder} holds another fine-tuning: choose another run_name, or remove it")
    if dist.get_global_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(dump(config), encoding="utf-8")
        # What an interrupted attempt wrote is of no use: a run this short starts over.
        (folder / "metrics.jsonl").unlink(missing_ok=True)
    dist.barrier()
    _say(f"fine-tuning {config.model.path} on {config.task.name}: scores and {folder}")
    outcome, model, task = train_and_score(config)
    for one in outcome.results:
        said = {
            split: value for split, value in (("validation", one.validation), ("test", one.test)) if value is not None
        }
        _say(f"{one.name}: " + ", ".join(f"{split} {one.metric} {value:.4f}" for split, value in said.items()))
    if dist.get_global_rank() == 0:
        if config.save_model:
            _save(config, folder, outcome, model, task)
        content = {"trial": name, "saved": config.save_model, **asdict(outcome)}
        store(str(folder)).write(RECORD, as_bytes(content))
    dist.barrier()
    return folder


def _save(config: FinetuneConfig, folder: Path, outcome: Outcome, model: Trained, task: Task) -> None:
    about, lines = outcome.about, {}
    for one in outcome.results:
        lines[one.name] = ", ".join(
            f"{metric} {value:.4f} ({split})" for split, values in one.more.items() for metric, value in values.items()
        )
    rows: dict[str, Any] = {
        "From": config.model.path,
        "Task": f"{config.task.name} ({config.task.kind}), {config.task.data}",
        "Steps": f"{about['steps']:,} of {config.batch_size}",
        "Learning rate": f"{config.optimizer.lr}, {config.warmup} warmup, then linear decay to 0",
        "Seed": config.seed,
        "Last loss": about["loss"],
        **lines,
    }
    family, coded = written_as(model.encoder)
    card = finetuned_card(config.run_name, rows, remote_code=coded, family=family)
    names = task.data.record.get("label_names")
    export_finetuned(
        model.encoder, model.head, names, folder / "model", card, prompts=task.prompts, max_length=task.longest
    )


def _say(line: str) -> None:
    if dist.get_global_rank() == 0:
        print(line, flush=True)
