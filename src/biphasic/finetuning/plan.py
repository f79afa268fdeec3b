"""Plan a fine-tuning: whether model and data are there and fit each other, and where the scores go."""

from pathlib import Path

from biphasic.config.finetune import FinetuneConfig, TaskConfig
from biphasic.config.plan import JobPlan
from biphasic.downstream.task_folder import TaskFolder
from biphasic.downstream.writer import TASK_RECORD
from biphasic.errors import UserError, first_line
from biphasic.storage import is_remote, open_store
from biphasic.storage.hub import why_missing


def require_data(config: FinetuneConfig) -> None:
    """Raise a UserError if a dataset of a fine-tuning is missing or of another kind. No slow package is imported."""
    for path, key in _datasets(config.task).items():
        TaskFolder(path, config.cache, config.task.family, key=key)


def _datasets(task: TaskConfig) -> dict[str, str]:
    """Return the datasets' folders and the key that names each."""
    return dict.fromkeys([task.data, *task.retrieval_sets.values()], "task.scored_on") | {task.data: "task.data"}


def plan_finetuning(config: FinetuneConfig, ranks: int) -> JobPlan:
    """Return the plan, from the data's records and, if everything is there, the model's configuration and tokenizer.

    PyTorch is imported only in that case.
    """
    job_plan = JobPlan(str(config.run_folder), f"{config.job}, {ranks} rank{'s' * (ranks > 1)}")
    lines, model, task = job_plan.lines, config.model, config.task
    lines["model"] = model.path
    if is_remote(model.path):
        reason = "a model in a bucket is not supported: download it to a folder"
        job_plan.problems.append(f"model.path {model.path}: {reason}")
    elif not Path(model.path).exists() and (reason := why_missing(model.path, model.revision)):
        job_plan.missing.append(f"model.path {model.path}: {reason}")
    for path, key in _datasets(task).items():
        try:
            if open_store(path).stat(TASK_RECORD) is None:
                job_plan.missing.append(f"{key} {path}: there is no {TASK_RECORD}: prepare it with biphasic tasks")
                continue
            rows = TaskFolder(path, config.cache, task.family, key=key).record["rows"]
        except (UserError, OSError) as error:
            job_plan.problems.append(first_line(error))
        else:
            topic = "data" if path == task.data else f"scored on {path}"
            lines[topic] = f"{path}: {', '.join(f'{table} {count:,}' for table, count in rows.items())} rows"
    limit = "" if config.max_duration.unit == "ep" else ", or one epoch if that is shorter"
    lines["length"] = f"{config.max_duration}{limit}, of {config.batch_size} examples; {config.warmup} warmup"
    lines["learning rate"] = f"{config.optimizer.lr:g} after the warmup, then linearly to 0; seed {config.seed}"
    if not job_plan.missing and not job_plan.problems:
        from biphasic.finetuning.trial import check_trial

        try:
            job_plan.warnings += check_trial(config)
        except UserError as error:
            job_plan.problems.append(str(error))
    saved = ", model/" if config.save_model else ", no model (save_model: false)"
    lines["writes"] = f"{config.run_folder}: record.json, metrics.jsonl{saved}"
    return job_plan
