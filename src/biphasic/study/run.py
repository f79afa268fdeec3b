"""Run the pretraining of a study. Its state is read from the checkpoints alone, so any machine can start it at any time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from biphasic.config.durations import Duration
from biphasic.config.load import dump
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.study import CommandExecutor, SlurmExecutor, StudyConfig
from biphasic.config.study_models import expand, overrides_of
from biphasic.errors import UserError
from biphasic.storage import open_store
from biphasic.study.executors import (
    filled_command,
    jobs_in_slurm,
    run_command,
    sbatch_command,
    submit_to_slurm,
    train_here,
)
from biphasic.study.state import RunState, is_ready, read_states, starting_run
from biphasic.study.tree import StudyRun, study_tree

Train = Callable[[Path], int]
"""Trains the run of a resolved YAML on this machine and returns its exit status."""
RUN_FILE = "run.yaml"
"""The resolved YAML of a run, in its local folder."""


def pretrain(study: StudyConfig, limit: int | None = None, train: Train | None = None) -> int:
    """Train or submit the runs that are not done, in the order of the tree.

    Args:
        study: the checked study.
        limit: maximum number of runs to start.
        train: trains a run instead of the local executor.

    Returns:
        The exit status. 0: what could be started was trained or submitted. Otherwise the status of the first run that was
        not trained to its end, or of the first command that failed.

    Raises:
        UserError: two models have the same history, the folder can't be read, or the executor can't be used.
    """
    configs = expand(study)
    tree = study_tree(configs, study.continues, study.stages.checkpoints)
    states = read_states(study)
    for name, config in configs.items():
        for line in states[name].drift(config):
            print(f"WARNING: {name} was trained with another configuration: {line}", flush=True)
    executor = study.executor
    if isinstance(executor, SlurmExecutor):
        return _submit_to_slurm(study, executor, tree, configs, states, limit)
    if isinstance(executor, CommandExecutor):
        return _submit_by_command(study, executor, tree, configs, states, limit)
    local = executor
    return _train_in_order(study, tree, configs, train or (lambda file: train_here(local, file)), limit)


def resolved(study: StudyConfig, run: StudyRun, config: PretrainConfig, start: str | None) -> PretrainConfig:
    """Return the configuration of a run that starts from the run `start`.

    It keeps the checkpoints from which others start, and those that are scored.
    """
    kept = [Duration(batch, "ba") for batch in (*run.kept, *run.scored)]
    keep_at = list(dict.fromkeys([*config.checkpoint.keep_at, *kept]))
    return config.model_copy(
        update={
            "checkpoint": config.checkpoint.model_copy(update={"keep_at": keep_at}),
            "start_from": None if start is None else study.checkpoints_of(start),
        }
    )


def _train_in_order(
    study: StudyConfig,
    tree: Mapping[str, StudyRun],
    configs: Mapping[str, PretrainConfig],
    train: Train,
    limit: int | None,
) -> int:
    started = 0
    for run in tree.values():
        # Read again, because another machine may have trained meanwhile.
        states = read_states(study)
        if states[run.name].is_done(configs[run.name]):
            continue
        if limit is not None and started == limit:
            break
        if not is_ready(run, configs, states):
            raise UserError(f"{run.name}: the checkpoints of {' and '.join(run.needs)} that it starts from are missing")
        config = resolved(study, run, configs[run.name], starting_run(run, tree, states))
        print(f"{run.name}: {_describe_start(run, config)}", flush=True)
        started += 1
        status = train(_write(config))
        if status != 0:
            print(f"{run.name}: ended with status {status}; start the study again to resume it", flush=True)
            return status
    return 0


def _submit_to_slurm(
    study: StudyConfig,
    executor: SlurmExecutor,
    tree: Mapping[str, StudyRun],
    configs: Mapping[str, PretrainConfig],
    states: Mapping[str, RunState],
    limit: int | None,
) -> int:
    jobs, submitted = jobs_in_slurm(), 0
    for run in _not_done(tree, configs, states):
        job = job_name(study, run.name)
        if job in jobs:
            print(f"{run.name}: job {jobs[job]} is in the queue", flush=True)
            continue
        if limit is not None and submitted == limit:
            break
        waits_for = [] if is_ready(run, configs, states) else [job_name(study, name) for name in run.needs]
        after = [jobs[name] for name in waits_for if name in jobs]
        start = run.parent if after else starting_run(run, tree, states)
        config = resolved(study, run, configs[run.name], start)
        jobs[job] = submit_to_slurm(sbatch_command(executor, job, _write(config), after))
        wait = f", after {', '.join(after)}" if after else ""
        print(f"{run.name}: job {jobs[job]}{wait}, {_describe_start(run, config)}", flush=True)
        submitted += 1
    return 0


def _submit_by_command(
    study: StudyConfig,
    executor: CommandExecutor,
    tree: Mapping[str, StudyRun],
    configs: Mapping[str, PretrainConfig],
    states: Mapping[str, RunState],
    limit: int | None,
) -> int:
    submitted = 0
    for run in _not_done(tree, configs, states):
        if not is_ready(run, configs, states):
            print(f"{run.name}: waits for {' and '.join(run.needs)}", flush=True)
            continue
        if limit is not None and submitted == limit:
            break
        config = resolved(study, run, configs[run.name], starting_run(run, tree, states))
        values = {"name": run.name, "file": str(_write(config))}
        if study.base_file is not None:
            values |= {"base": study.base_file, "overrides": " ".join(overrides_of(study, config))}
        print(f"{run.name}: submitted, {_describe_start(run, config)}", flush=True)
        status = run_command(filled_command(executor, values))
        if status != 0:
            return status
        submitted += 1
    return 0


def job_name(study: StudyConfig, name: str) -> str:
    """Return the name of a run's job in Slurm, by which a later start of the study recognizes it."""
    return f"{PurePosixPath(study.folder).name}.{name}"


def _not_done(
    tree: Mapping[str, StudyRun], configs: Mapping[str, PretrainConfig], states: Mapping[str, RunState]
) -> Iterator[StudyRun]:
    return (run for run in tree.values() if not states[run.name].is_done(configs[run.name]))


def _write(config: PretrainConfig) -> Path:
    """Write a run's resolved YAML to its local folder."""
    open_store(str(config.run_folder)).write(RUN_FILE, dump(config).encode())
    return config.run_folder / RUN_FILE


def _describe_start(run: StudyRun, config: PretrainConfig) -> str:
    if config.start_from is not None:
        return f"from {config.start_from}, batches {run.start:,} to {run.length:,}"
    return f"{run.length:,} batches" if run.continues is None else f"{run.length:,} batches after {run.continues}"
