"""Run the pretraining of a study. Its state is read from the checkpoints alone, so any machine can start it."""

from collections.abc import Callable
from pathlib import Path

from biphasic.config.load import dump
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.study import StudyConfig
from biphasic.durations import Duration
from biphasic.storage import open_store
from biphasic.study.executors import make_executor
from biphasic.study.stages import check_stages
from biphasic.study.state import RUN_FILE, is_ready, read_states, starting_run
from biphasic.study.tree import StudyRun, study_runs


def pretrain(study: StudyConfig, limit: int | None = None, train: Callable[[Path], int] | None = None) -> int:
    """Train or submit the runs that are not done, in the order of the tree. Return the exit status.

    The status is that of the first run or command that fails, else 0. `limit` is the maximum number of runs to start.
    `train` replaces the training on this machine: it gets a run's resolved YAML and returns its exit status. Raises a
    UserError if two models have the same history, the folder can't be read, or the executor can't be used, and a
    ConfigError if a YAML of a stage is invalid.
    """
    check_stages(study)
    configs, tree = study_runs(study)
    # Before the states: a job that ends meanwhile is done then.
    executor = make_executor(study, train)
    states = read_states(study)
    for name, config in configs.items():
        for line in states[name].past_differences(config):
            print(f"WARNING: {name} was trained with another configuration: {line}", flush=True)
    started = 0
    for run in tree.values():
        if started and executor.trains_here:
            states = read_states(study)
        if states[run.name].is_done(configs[run.name]):
            continue
        waits_for = () if is_ready(run, configs, states) else run.needs
        follows_job = any(executor.job(name) is not None for name in waits_for)
        start = run.parent if follows_job else starting_run(run, tree, states)
        config = resolved(study, run, configs[run.name], start)
        job = executor.job(run.name)
        if job is not None:
            print(f"{run.name}: job {job} is in the queue", flush=True)
        elif started == limit:
            break
        elif waits_for and not executor.may_start(run.name, waits_for):
            continue
        # A job that waits reads the file when it starts, and other runs may need more of it now.
        open_store(str(config.run_folder)).write(RUN_FILE, dump(config).encode())
        if job is None:
            description = _describe_start(run, config)
            if status := executor.start(run.name, config.run_folder / RUN_FILE, description, waits_for):
                return status
            started += 1
    return 0


def is_trained(study: StudyConfig) -> bool:
    """Return whether all runs are done: those that an executor has submitted may wait, or train elsewhere."""
    states = read_states(study)
    return all(states[name].is_done(config) for name, config in study_runs(study)[0].items())


def resolved(study: StudyConfig, run: StudyRun, config: PretrainConfig, start: str | None) -> PretrainConfig:
    """Return the configuration of a run that starts from `start`, and keeps the checkpoints that others need."""
    kept = [Duration(batch, "ba") for batch in (*run.kept, *run.scored)]
    keep_at = list(dict.fromkeys([*config.checkpoint.keep_at, *kept]))
    checkpoint = config.checkpoint.model_copy(update={"keep_at": keep_at})
    start_from = None if start is None else study.checkpoints_of(start)
    return config.model_copy(update={"checkpoint": checkpoint, "start_from": start_from})


def _describe_start(run: StudyRun, config: PretrainConfig) -> str:
    if config.start_from is not None:
        return f"from {config.start_from}, batches {run.start:,} to {run.length:,}"
    return f"{run.length:,} batches" if run.continues is None else f"{run.length:,} batches after {run.continues}"
