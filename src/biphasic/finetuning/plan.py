"""Plan a fine-tuning: whether model and data are there, and its steps, tokens, FLOPs, memory and outputs."""

from __future__ import annotations

from pathlib import Path

from biphasic.amounts import format_bytes
from biphasic.config.finetune import FinetuneConfig
from biphasic.config.plan import JobPlan
from biphasic.downstream.task_folder import TaskFolder
from biphasic.downstream.writer import TASK_RECORD
from biphasic.errors import UserError, first_line
from biphasic.storage import is_remote, open_store
from biphasic.storage.hub import why_missing

_ROWS = 1000
"""Number of first rows of each table of which a plan counts the texts that are cut."""


def plan_finetuning(config: FinetuneConfig, ranks: int) -> JobPlan:
    """Return the plan, from the data's records and, if everything is there, the model's configuration and tokenizer.

    PyTorch is imported only in that case.
    """
    job_plan, task = JobPlan(str(config.run_folder), f"{config.job}, {ranks} rank{'s' * (ranks > 1)}"), config.task
    lines = job_plan.lines
    lines["model"] = config.model.path
    if is_remote(config.model.path):
        job_plan.problems.append(
            f"model.path {config.model.path}: fine-tuning can't read a model from a bucket: download it to a folder"
        )
    elif not Path(config.model.path).exists() and (reason := why_missing(config.model.path, config.model.revision)):
        job_plan.missing.append(f"model.path {config.model.path}: {reason}")
    for path in dict.fromkeys([task.data, *task.retrieval_sets.values()]):
        _add_data(job_plan, path, config)
    limit = "" if config.max_duration.unit == "ep" else ", or one epoch if that is shorter"
    lines["length"] = f"{config.max_duration}{limit}, of {config.batch_size} examples; {config.warmup} warmup"
    lines["learning rate"] = f"{config.optimizer.lr:g} after the warmup, then linearly to 0; seed {config.seed}"
    if not job_plan.missing and not job_plan.problems:
        try:
            _add_cost(job_plan, config)
        except UserError as error:
            job_plan.problems.append(str(error))
    done = " (holds a finished fine-tuning)" if (config.run_folder / "record.json").is_file() else ""
    model = ", model/" if config.save_model else ", no model (save_model: false)"
    lines["writes"] = f"{config.run_folder}: record.json, metrics.jsonl{model}{done}"
    return job_plan


def _add_data(job_plan: JobPlan, path: str, config: FinetuneConfig) -> None:
    try:
        if open_store(path).stat(TASK_RECORD) is None:
            job_plan.missing.append(f"data {path}: there is no {TASK_RECORD}: prepare it with biphasic tasks")
            return
        rows = TaskFolder(path, config.cache, config.task.family).record["rows"]
    except (UserError, OSError) as error:
        job_plan.problems.append(first_line(error) if isinstance(error, OSError) else str(error))
        return
    counts = ", ".join(f"{table} {count:,}" for table, count in rows.items())
    topic, source = ("data", f"{path}: ") if path == config.task.data else (f"scored on {path}", "")
    job_plan.lines[topic] = f"{source}{counts} rows"


def _add_cost(job_plan: JobPlan, config: FinetuneConfig) -> None:
    from biphasic.finetuning.trial import build_task, estimate_cost

    cost = estimate_cost(config)
    lines = job_plan.lines
    cuts = build_task(config.model, config.task, config.cache).first_cuts(_ROWS)
    for table, cut in cuts.items():
        if description := cut.describe():
            lines[f"{table} (first rows)"] = description
    lines["length"] = f"{cost.steps:,} batches of {config.batch_size}; {config.warmup} warmup"
    lines["tokens"] = f"about {cost.train_tokens:,.0f} to train on (four characters to a token)"
    if cost.flops is None or cost.bytes is None:
        lines["model"] += " (size unknown: no estimate of FLOPs and memory)"
        return
    lines["model"] += f": {cost.parameters:,} parameters without the language-model head"
    lines["FLOPs"] = f"{cost.flops:.3g}, scoring included"
    lines["memory"] = (
        f"about {format_bytes(cost.bytes)} a rank: weights, gradients, optimizer, "
        f"activations of {cost.forward_tokens:,} tokens, 2 GiB for CUDA"
    )
