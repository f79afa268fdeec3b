"""Plan and write downstream datasets in the schemas of `writer.py`, one folder for each task.

Texts are stored unchanged; fine-tuning adds the prompts (`Premise: …`). `task.json` is written last, so a folder without
it is incomplete; until then, `task.started` marks the tables as written by Biphasic.
"""

import glob
import itertools
import json
import os
import shutil
from typing import Any

from biphasic.config.plan import JobPlan
from biphasic.config.tasks import RetrievalSet, TasksConfig, source_datasets
from biphasic.downstream.beir import write_retrieval
from biphasic.downstream.supervised import SUPERVISED_WRITERS
from biphasic.downstream.writer import STARTED, TASK_RECORD, TaskWriter
from biphasic.errors import UserError
from biphasic.storage import glob_pattern, join, json_bytes, open_store, user_errors
from biphasic.storage.hub import is_local_path, is_made_by_jobs


def prepare_task(name: str, config: TasksConfig) -> dict[str, Any]:
    """Write one task's tables, unless the task is already finished, and return the content of its `task.json`.

    Raises a UserError if a source can't be read or doesn't match the YAML, or the folder holds something else.
    """
    task, path = config.tasks[name], join(config.output, name)
    with user_errors(f"{name}: {path} can't be written"):
        if (record := finished_record(name, config)) is not None:
            return record
        writer = TaskWriter(name, config)
        try:
            writer.store.remove(file for file in writer.store.list() if file.endswith(".parquet"))
            if isinstance(task, RetrievalSet):
                write_retrieval(writer, task)
            else:
                SUPERVISED_WRITERS[task.kind](writer, task)
            about = {"task": name, **task.model_dump(include={"kind", "license", "homepage"})}
            names = {"label_names": writer.label_names, "notes": writer.notes}
            record = {**about, **names, **writer.record, "settings": _settings(config, name)}
            writer.store.write(TASK_RECORD, json_bytes(record))
            writer.store.remove([STARTED])
        finally:
            shutil.rmtree(writer.scratch, ignore_errors=True)
    return record


def finished_record(name: str, config: TasksConfig) -> dict[str, Any] | None:
    """Return the record of a task, or None if the task is not finished.

    Raises a UserError if the folder holds something else, or the task was made with other settings.
    """
    path, settings = join(config.output, name), _settings(config, name)
    with user_errors(f"{path}: can't be read"):
        store = open_store(path)
        files = store.list()
        content = store.read(TASK_RECORD) if TASK_RECORD in files else None
    if content is None:
        # An interrupted run leaves tables beside its marker; any other file means that the folder is not a task's.
        tables = [name for name in files if STARTED in files and name.endswith(".parquet")]
        if others := files.keys() - {STARTED, *tables}:
            raise UserError(f"{path} holds something else ({min(others)}); choose another output")
        return None
    try:
        record = json.loads(content)
        recorded = record["settings"]
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{path}/{TASK_RECORD} is not a task's record; choose another output") from None
    if recorded != settings:
        keys = ", ".join(sorted(key for key in {*recorded, *settings} if recorded.get(key) != settings.get(key)))
        notes = "; ".join(record.get("notes", [])) if "label_names" in keys else ""
        differ = f"{keys} differ; it has {notes}" if notes else f"{keys} differ"
        raise UserError(f"{path} was made with other settings ({differ}): remove it, or choose another output")
    return record


def _settings(config: TasksConfig, name: str) -> dict[str, Any]:
    shared = config.model_dump(mode="json", exclude={"output", "tasks"})
    return {**config.tasks[name].model_dump(mode="json"), **shared}


def chosen_tasks(config: TasksConfig, names: list[str]) -> list[str]:
    """Return the named tasks, or all tasks if none is named; a UserError for a task that is not in the YAML."""
    if unknown := [name for name in names if name not in config.tasks]:
        raise UserError(f"no task {unknown[0]!r} (there are: {', '.join(config.tasks)})")
    return names or list(config.tasks)


def plan_tasks(config: TasksConfig, names: list[str]) -> JobPlan:
    """Return the plan: sources, splits and licences, and which local files are missing. No data is read."""
    job_plan = JobPlan(config.output, f"{config.job}, {len(names)} task{'s' * (len(names) > 1)}")
    for name in names:
        task = config.tasks[name]
        if isinstance(task, RetrievalSet):
            splits = [*(["train"] if task.train else []), *(f"qrels/{split}" for split in task.qrels)]
        else:
            splits = list(task.splits)
            if "train" in splits and "validation" not in splits:
                splits.append(f"validation ({config.validation_fraction:.0%} of train)")
        sources, done = dict[str, None](), finished_record(name, config) is not None
        for _, dataset, _ in source_datasets("", task):
            files = itertools.chain.from_iterable((dataset.files or {}).values())
            paths = [dataset.path] if dataset.path else list(files)
            sources[" ".join(filter(None, [", ".join(paths), dataset.name, dataset.revision]))] = None
            for path in paths if not done else ():
                is_local = dataset.path is None or is_local_path(path) or is_made_by_jobs(path)
                if is_local and not glob.glob(glob_pattern(os.path.expanduser(path)), recursive=True):
                    messages = job_plan.missing if is_made_by_jobs(path) else job_plan.problems
                    messages.append(f"{name}: {path}: there is no such file or folder")
        state = f"{', finished already' if done else ''} [{task.license}]"
        job_plan.lines[name] = f"{task.kind}, from {', '.join(sources)}: {', '.join(splits)}{state}"
    return job_plan


def describe_record(name: str, path: str, record: dict[str, Any]) -> str:
    """Return one line that describes a finished task."""
    rows = ", ".join(f"{file} {count:,}" for file, count in record["rows"].items())
    remarks = ""
    for key, words in (("left_out", "left out"), ("not_used", "not used")):
        counts = [f"{count:,} of {file} ({reason})"
                  for file, reasons in record[key].items() for reason, count in reasons.items()]  # fmt: skip
        remarks += f"; {words}: {', '.join(counts)}" if counts else ""
    remarks += "".join(f"; {note}" for note in record.get("notes", []) if note.startswith("labels"))
    warnings = [f"\n  WARNING: {warning}" for warning in record["warnings"]]
    return f"{name}: {rows} rows{remarks}; {path} [{record['license']}]{''.join(warnings)}"
