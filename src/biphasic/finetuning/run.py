"""Run `job: finetune`: fine-tune one encoder on one task with one learning rate and one seed."""

import functools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from composer.utils import dist

from biphasic.checkpointing.rank_group import RankGroup
from biphasic.checkpointing.run_lock import RunLock
from biphasic.config.base import flatten
from biphasic.config.finetune import NOT_IN_RESULT, FinetuneConfig
from biphasic.config.load import dump
from biphasic.devices import rank_device
from biphasic.downstream.task_folder import TaskFolder
from biphasic.errors import UserError
from biphasic.export.card import finetuned_card
from biphasic.export.finetuned import export_finetuned
from biphasic.finetuning.finetuned_model import TASK_FILE, describe_task
from biphasic.finetuning.records import TrialResult
from biphasic.finetuning.task import FinetuneTask, TrainedModel
from biphasic.finetuning.trial import train_and_score, trial_name
from biphasic.ranks import COLLECTIVE_SECONDS, close_on_fault, is_first_rank, print_once
from biphasic.storage import json_bytes, open_store
from biphasic.training.anomalies import ANOMALOUS_BATCHES

FINETUNING_FILE = "record.json"


def run(config: FinetuneConfig) -> Path:
    """Fine-tune, score and save a model, and return the run's folder.

    The record is written last; a run with a record is not repeated. A lock keeps a second start out of the folder.
    Raises a UserError if the model or the data can't be used, or the folder holds another run, or one that is running.
    """
    dist.initialize_dist(rank_device(), COLLECTIVE_SECONDS)
    lock, ranks = RunLock(str(config.run_folder), key="output", alternative="run_name"), RankGroup()
    ranks.on_first_rank(lambda: lock.acquire(ranks.size))
    with close_on_fault(lock.release):
        folder = _run(config)
    lock.release("finished")
    return folder


def _run(config: FinetuneConfig) -> Path:
    folder = config.run_folder
    name, label_names = trial_name(config), TaskFolder(config.task.data, config.cache, None).record.get("label_names")
    if (folder / FINETUNING_FILE).is_file():
        record = json.loads((folder / FINETUNING_FILE).read_text(encoding="utf-8"))
        # Label names are not in the trial's name, since they decide no score, but the saved model has them.
        is_same = record.get("trial") == name and record.get("label_names", label_names) == label_names
        if is_same and (not config.save_model or (record["saved"] and (folder / "model" / TASK_FILE).is_file())):
            print_once(f"{config.run_name}: already fine-tuned from the same model, data and settings; nothing to do")
            return folder
        if not (is_same and record["saved"]):
            differ = _differences(record["about"]["config"], config)
            raise UserError(f"{folder} holds another fine-tuning ({differ}): choose another run_name, or remove it")
        print_once(f"{folder}/model is gone, or not complete: the same fine-tuning makes it again")
    if is_first_rank():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(dump(config), encoding="utf-8")
        # An interrupted run starts from the beginning.
        for log in ("metrics.jsonl", ANOMALOUS_BATCHES):
            (folder / log).unlink(missing_ok=True)
    dist.barrier()
    print_once(f"fine-tuning {config.model.path} on {config.task.name}: scores and {folder}")
    trial, model, task, files = train_and_score(config)
    for result in trial.results:
        scores = (("validation", result.validation), ("test", result.test))
        parts = [f"{split} {result.metric} {score:.4f}" for split, score in scores if score is not None]
        print_once(f"{result.name}: {', '.join(parts)}")
    for table, cut in task.cut.items():
        if description := cut.describe():
            print_once(f"{config.task.name} {table}: {description}")
    for warning in task.data.record.get("warnings", []):
        print_once(f"WARNING: {config.task.name}: {warning}")
    if is_first_rank():
        store = open_store(str(folder))
        if config.save_model:
            _save(config, folder, trial, model, task)
            store.write(f"model/{TASK_FILE}", json_bytes(describe_task(config, task)))
        predictions = {f"predictions/{file}": content for file, content in files.items()}
        for file, content in predictions.items():
            store.write(file, content())
        about = {"trial": name, "label_names": label_names, "saved": config.save_model}
        record = {**about, **asdict(trial), "predictions": list(predictions)}
        store.write(FINETUNING_FILE, json_bytes(record))
    dist.barrier()
    return folder


def _differences(recorded: str, config: FinetuneConfig) -> str:
    """Return up to three keys in which a fine-tuning differs from a recorded one, with both values."""
    old, new = (dict(flatten(yaml.safe_load(text))) for text in (recorded, dump(config)))
    free = NOT_IN_RESULT.keys() - {"model", "task", "save_model"}
    keys = [key for key in {**new, **old} if old.get(key) != new.get(key) and key.split(".")[0] not in free]
    shown = [f"{key}: {old.get(key)}, now {new.get(key)}" for key in keys[:3]]
    return "; ".join([*shown, *["and others"] * (len(keys) > 3)]) or "its model, its data or Biphasic has changed"


def _save(config: FinetuneConfig, folder: Path, trial: TrialResult, model: TrainedModel, task: FinetuneTask) -> None:
    rows: dict[str, Any] = {
        "From": config.model.path,
        "Task": f"{config.task.name} ({config.task.kind}), {config.task.data}",
        "Steps": f"{trial.about['steps']:,} of {config.batch_size}",
        "Learning rate": f"{config.optimizer.lr}, {config.warmup} warmup, then linear decay to 0",
        "Seed": config.seed,
        "Last loss": f"{trial.about['loss']:.4f}",
    }
    for result in trial.results:
        scores = [(split, *score) for split, values in result.more.items() for score in values.items()]
        rows[result.name] = ", ".join(f"{metric} {value:.4f} ({split})" for split, metric, value in scores)
    if names := task.label_names:
        rows["Labels"] = ", ".join(names)
    encoder = model.encoder
    card = functools.partial(
        finetuned_card, config.run_name, rows, config.task, task.scored_length,
        marks_continuations=bool(getattr(encoder.tokenizer.tokenizer.model, "continuing_subword_prefix", None)),
    )  # fmt: skip
    out = folder / "model"
    options: Any = {"prompts": task.prompts, "max_length": task.scored_length, "problem_type": task.problem_type}
    options["truncate_dim"] = (getattr(config.task, "dimensions", None) or [None])[0]  # values beyond it are not trained
    options["refuse_pairs"] = "{text_pair}" in getattr(config.task, "text", "")
    export_finetuned(encoder, model.head, names, out, card, **options)
