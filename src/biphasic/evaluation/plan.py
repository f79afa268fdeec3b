"""Plan an evaluation: whether model and tasks are there, what is searched, and where the scores go."""

from pathlib import Path

from biphasic.amounts import format_bytes
from biphasic.config.evaluate import EvaluateConfig
from biphasic.config.plan import JobPlan
from biphasic.errors import UserError
from biphasic.model.stored_weights import weights_problem
from biphasic.storage import is_remote
from biphasic.storage.hub import why_missing


def plan_evaluation(config: EvaluateConfig) -> JobPlan:
    """Return the plan. Downloads nothing; mteb, whose import takes seconds, checks the names of tasks."""
    job_plan, path = JobPlan(str(config.run_folder), config.job), config.model.path
    lines = job_plan.lines
    lines["model"] = path + (" (read when it starts)" if is_remote(path) else "")
    if not Path(path).exists() and (reason := why_missing(path, config.model.revision)):
        job_plan.missing.append(f"model.path {path}: {reason}")
    elif (problem := weights_problem(path)) is not None:
        job_plan.problems.append(problem)
    job_plan.missing += [f"sets {path}: there is no such folder" for path in config.sets if not Path(path).is_dir()]
    if config.mirror is not None and not Path(config.mirror).is_dir():
        job_plan.missing.append(f"mirror {config.mirror}: there is no such folder")
    lines["tasks"] = ", ".join([*config.tasks, *config.benchmarks, *config.sets])
    if not job_plan.missing:
        from biphasic.evaluation.tasks import plan_tasks

        try:
            tasks = plan_tasks(config)
        except UserError as error:
            job_plan.problems.append(str(error))
        else:
            lines["tasks"] = f"{len(tasks)}: {', '.join(task.name for task in tasks)}"
            lines["read from"] = config.mirror or "the hub, except for the local folders in sets"
    searched = {"full": "complete corpora", "judged": "judged documents"}
    lines["documents"] = " and ".join(searched[part] for part in config.documents)
    lines["baselines"] = ", ".join(config.baselines) or "none"
    lines["cache"] = f"{config.cache}: embeddings, at most {format_bytes(config.cache_limit)}"
    lines["writes"] = f"{config.run_folder}: scores.md, scores.json, results/, records/"
    return job_plan
