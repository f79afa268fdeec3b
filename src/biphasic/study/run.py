"""Run the pretraining of a study. Its state is read from the checkpoints alone, so any machine can start it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath

from biphasic.config.durations import Duration
from biphasic.config.load import dump
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.study import CommandExecutor, LocalExecutor, SlurmExecutor, StudyConfig, overrides_of
from biphasic.errors import UserError
from biphasic.storage import open_store
from biphasic.study.executors import jobs_in_slurm, run_command, submit_to_slurm, train_here
from biphasic.study.state import is_ready, read_states, starting_run
from biphasic.study.tree import StudyRun, study_runs

RUN_FILE = "run.yaml"
"""The resolved YAML of a run, in its local folder."""


def pretrain(study: StudyConfig, limit: int | None = None, train: Callable[[Path], int] | None = None) -> int:
    """Train or submit the runs that are not done, in the order of the tree. Return the exit status.

    The status is that of the first run or command that fails, else 0. `limit` is the maximum number of runs to start.
    `train` replaces the local executor: it gets a run's resolved YAML and returns its exit status. Raises a UserError
    if two models have the same history, the folder can't be read, or the executor can't be used.
    """
    configs, tree = study_runs(study)
    states, executor = read_states(study), study.executor
    for name, config in configs.items():
        for line in states[name].drift(config):
            print(f"WARNING: {name} was trained with another configuration: {line}", flush=True)
    jobs = jobs_in_slurm() if isinstance(executor, SlurmExecutor) else {}
    started = 0
    for run in tree.values():
        if started and isinstance(executor, LocalExecutor):
            states = read_states(study)  # another machine may have trained meanwhile
        if states[run.name].is_done(configs[run.name]):
            continue
        job = _job_name(study, run.name)
        if job in jobs:
            print(f"{run.name}: job {jobs[job]} is in the queue", flush=True)
            continue
        waits_for = () if is_ready(run, configs, states) else run.needs
        if waits_for and isinstance(executor, CommandExecutor):
            print(f"{run.name}: waits for {' and '.join(waits_for)}", flush=True)
            continue
        if started == limit:
            break
        if waits_for and isinstance(executor, LocalExecutor):
            raise UserError(f"{run.name}: the checkpoints of {' and '.join(waits_for)} that it starts from are missing")
        after = [jobs[job] for job in (_job_name(study, name) for name in waits_for) if job in jobs]
        config = resolved(study, run, configs[run.name], run.parent if after else starting_run(run, tree, states))
        open_store(str(config.run_folder)).write(RUN_FILE, dump(config).encode())
        file, start, status = config.run_folder / RUN_FILE, _describe_start(run, config), 0
        if isinstance(executor, SlurmExecutor):
            jobs[job] = submit_to_slurm(executor, job, file, after)
            print(f"{run.name}: job {jobs[job]}{', after ' * bool(after)}{', '.join(after)}, {start}", flush=True)
        elif isinstance(executor, CommandExecutor):
            values = {"name": run.name, "file": str(file)}
            if study.base_file is not None:
                values |= {"base": study.base_file, "overrides": " ".join(overrides_of(study, config))}
            print(f"{run.name}: submitted, {start}", flush=True)
            status = run_command(executor, values)
        else:
            print(f"{run.name}: {start}", flush=True)
            status = train(file) if train is not None else train_here(executor, file)
            if status:
                print(f"{run.name}: ended with status {status}; start the study again to resume it", flush=True)
        if status:
            return status
        started += 1
    return 0


def resolved(study: StudyConfig, run: StudyRun, config: PretrainConfig, start: str | None) -> PretrainConfig:
    """Return the configuration of a run that starts from `start`, and keeps the checkpoints that others need."""
    kept = [Duration(batch, "ba") for batch in (*run.kept, *run.scored)]
    keep_at = list(dict.fromkeys([*config.checkpoint.keep_at, *kept]))
    checkpoint = config.checkpoint.model_copy(update={"keep_at": keep_at})
    start_from = None if start is None else study.checkpoints_of(start)
    return config.model_copy(update={"checkpoint": checkpoint, "start_from": start_from})


def _job_name(study: StudyConfig, name: str) -> str:
    """Return the name of a run's Slurm job, by which later starts of the study recognize it."""
    return f"{PurePosixPath(study.folder).name}.{name}"


def _describe_start(run: StudyRun, config: PretrainConfig) -> str:
    if config.start_from is not None:
        return f"from {config.start_from}, batches {run.start:,} to {run.length:,}"
    return f"{run.length:,} batches" if run.continues is None else f"{run.length:,} batches after {run.continues}"
