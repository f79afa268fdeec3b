"""Run the pretraining of a study: on this machine, through Slurm, or with a command.

The study's state is read from the checkpoints alone, so any machine can start it.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

import psutil

from biphasic.config.load import dump
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.study import CommandExecutor, LocalExecutor, SlurmExecutor, StudyConfig, overrides_of
from biphasic.durations import Duration
from biphasic.errors import PREEMPTED, UserError
from biphasic.processes import noted_signals
from biphasic.storage import is_remote, open_store
from biphasic.study.stages import check_stages
from biphasic.study.state import RUN_FILE, is_ready, read_states, starting_run
from biphasic.study.tree import StudyRun, study_runs

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def pretrain(study: StudyConfig, limit: int | None = None, train: Callable[[Path], int] | None = None) -> int:
    """Train or submit the runs that are not done, in the order of the tree. Return the exit status.

    The status is that of the first run or command that fails, else 0. `limit` is the maximum number of runs to start.
    `train` replaces the local executor: it gets a run's resolved YAML and returns its exit status. Raises a UserError
    if two models have the same history, the folder can't be read, or the executor can't be used, and a ConfigError if a
    YAML of a stage is invalid.
    """
    check_stages(study)
    configs, tree = study_runs(study)
    executor = study.executor
    # Before the states: a job that ends meanwhile is done then.
    jobs = jobs_in_slurm() if isinstance(executor, SlurmExecutor) else {}
    states = read_states(study)
    for name, config in configs.items():
        for line in states[name].past_differences(config):
            print(f"WARNING: {name} was trained with another configuration: {line}", flush=True)
    started = 0
    for run in tree.values():
        if started and isinstance(executor, LocalExecutor):
            states = read_states(study)  # another machine may have trained meanwhile
        if states[run.name].is_done(configs[run.name]):
            continue
        job = _job_name(study, run.name)
        waits_for = () if is_ready(run, configs, states) else run.needs
        after = [jobs[job] for job in (_job_name(study, name) for name in waits_for) if job in jobs]
        config = resolved(study, run, configs[run.name], run.parent if after else starting_run(run, tree, states))
        if job in jobs:
            # A job that waits reads the file when it starts, and other runs may need more of it now.
            open_store(str(config.run_folder)).write(RUN_FILE, dump(config).encode())
            print(f"{run.name}: job {jobs[job]} is in the queue", flush=True)
            continue
        if waits_for and isinstance(executor, CommandExecutor):
            print(f"{run.name}: waits for {' and '.join(waits_for)}", flush=True)
            continue
        if started == limit:
            break
        if waits_for and isinstance(executor, LocalExecutor):
            raise UserError(f"{run.name}: the checkpoints of {' and '.join(waits_for)} that it starts from are missing")
        open_store(str(config.run_folder)).write(RUN_FILE, dump(config).encode())
        file, start, status = config.run_folder / RUN_FILE, _describe_start(run, config), 0
        if isinstance(executor, SlurmExecutor):
            jobs[job] = submit_to_slurm(executor, job, file, after)
            print(f"{run.name}: job {jobs[job]}{', after ' * bool(after)}{', '.join(after)}, {start}", flush=True)
        elif isinstance(executor, CommandExecutor):
            values = {"name": run.name, "file": str(file)}
            if study.base_file is not None:
                values |= {"base": study.base_file, "overrides": " ".join(overrides_of(study, config))}
            status = run_command(executor, values)
            if status == 0:
                print(f"{run.name}: submitted, {start}", flush=True)
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
    """Return the name of a run's Slurm job, by which later starts of the study recognize it.

    The hash is that of the study's place: other studies may have a folder and a model of the same names.
    """
    place = study.folder.rstrip("/") if is_remote(study.folder) else os.path.abspath(study.folder)
    return f"{PurePosixPath(study.folder).name}.{name}.{hashlib.sha256(place.encode()).hexdigest()[:6]}"


def _describe_start(run: StudyRun, config: PretrainConfig) -> str:
    if config.start_from is not None:
        return f"from {config.start_from}, batches {run.start:,} to {run.length:,}"
    return f"{run.length:,} batches" if run.continues is None else f"{run.length:,} batches after {run.continues}"


def train_here(executor: LocalExecutor, file: Path) -> int:
    """Train a run on this machine and return its exit status.

    A signal to this process is forwarded to the ranks, which save and stop; the status is then `PREEMPTED`.
    """
    processes = [] if executor.processes is None else ["-n", str(executor.processes)]
    # It wraps Composer's launcher, which would kill its ranks 30 s after a signal.
    scripts = ["-m", "biphasic.launcher", *processes, "-m", "biphasic.main"]
    with noted_signals(_SIGNALS) as received:
        launcher = subprocess.Popen([sys.executable, *scripts, str(file)])
        passed_on = 0
        while launcher.poll() is None:
            # The ranks then save and stop. If the launcher has not started them yet, this is tried again.
            if passed_on < len(received):
                with suppress(psutil.NoSuchProcess):
                    ranks = psutil.Process(launcher.pid).children()
                    for rank in ranks:
                        rank.send_signal(signal.SIGUSR1)
                    passed_on = len(received) if ranks else passed_on
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(timeout=0.5)
    # Also if the run has just finished: the study has to stop.
    return PREEMPTED if received else launcher.returncode


def submit_to_slurm(executor: SlurmExecutor, job: str, file: Path, after: Sequence[str]) -> str:
    """Submit a run as a job that starts after the jobs with ids in `after` have succeeded. Return its id.

    Raises a UserError if Slurm is not installed or refuses the job.
    """
    # Slurm then removes a job whose dependency failed, so that the study's next start can submit it again.
    dependency = [f"--dependency=afterok:{':'.join(after)}", "--kill-on-invalid-dep=yes"] if after else []
    options = ["--parsable", f"--job-name={job}", *dependency, *executor.options]
    return _output(["sbatch", *options, executor.script, str(file)]).strip().partition(";")[0]


def jobs_in_slurm() -> dict[str, str]:
    """Return the ids of this user's waiting and running jobs by name, except jobs whose dependency has failed.

    Raises a UserError if Slurm is not installed or doesn't answer.
    """
    lines = _output(["squeue", "--me", "--noheader", "--format=%i|%r|%j"]).splitlines()
    jobs = [line.strip().split("|", 2) for line in lines if line.count("|") >= 2]
    # Slurm removes such a job soon, because of --kill-on-invalid-dep.
    return {name: job for job, reason, name in jobs if reason != "DependencyNeverSatisfied"}


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"executor: {command[0]} can't be run ({error.strerror}): is Slurm installed here?") from None
    if done.returncode:
        raise UserError(f"executor: {shlex.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def run_command(executor: CommandExecutor, values: dict[str, str]) -> int:
    """Run the command that submits a run, with its placeholders replaced by `values`, and return its exit status.

    Raises a UserError if the program is missing.
    """
    # The command is split first, so that a value with spaces stays one argument.
    command = [word.format(**values) for word in shlex.split(executor.command)]
    try:
        return subprocess.run(command, check=False).returncode
    except OSError as error:
        raise UserError(f"executor.command: {command[0]} can't be run ({error.strerror})") from None
