"""Ways to start a study's runs: on this machine, through Slurm, or with a command."""

import hashlib
import os
import shlex
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

import psutil

from biphasic.config.study import LocalExecutor, SlurmExecutor, StudyConfig
from biphasic.errors import PREEMPTED, UserError
from biphasic.processes import STOP_SIGNALS, noted_signals
from biphasic.ranks import REFUSED
from biphasic.storage import is_remote


class Executor(ABC):
    """Starts a study's runs."""

    trains_here = False
    """Whether `start` returns after the training, so that another machine may have trained meanwhile."""

    def job(self, name: str) -> str | None:
        """Return the id of a run's job that waits or runs; None if there is none."""
        return None

    @abstractmethod
    def may_start(self, name: str, waits_for: Sequence[str]) -> bool:
        """Return whether a run may start now that these runs' checkpoints, which it starts from, don't exist yet."""

    @abstractmethod
    def start(self, name: str, file: Path, description: str, waits_for: Sequence[str]) -> int:
        """Train or submit a run, print what it starts from (`description`), and return the exit status.

        `file` is the run's YAML, and `waits_for` are the runs whose checkpoints don't exist yet. Raises a UserError if it
        can't be submitted.
        """


def make_executor(study: StudyConfig, train: Callable[[Path], int] | None) -> Executor:
    """Return the study's executor. `train` replaces the training on this machine."""
    if isinstance(study.executor, LocalExecutor):
        return ThisMachine(study.executor.processes, train)
    return Slurm(study, study.executor) if isinstance(study.executor, SlurmExecutor) else Command(study.executor.command)


class ThisMachine(Executor):
    """Trains one run after another with Composer's launcher."""

    trains_here = True

    def __init__(self, processes: int | None, train: Callable[[Path], int] | None = None):
        self._processes, self._train = processes, train or self.train

    def may_start(self, name: str, waits_for: Sequence[str]) -> bool:
        raise UserError(f"{name}: the checkpoints of {' and '.join(waits_for)} that it starts from are missing")

    def start(self, name: str, file: Path, description: str, waits_for: Sequence[str]) -> int:
        print(f"{name}: {description}", flush=True)
        status = self._train(file)
        if status:
            advice = "see above, change what it says, and" if status == REFUSED else "to resume it,"
            print(f"{name}: ended with status {status}; {advice} start the study again", flush=True)
        return status

    def train(self, file: Path) -> int:
        """Train a run and return its exit status.

        A signal to this process is forwarded to the ranks, which save and stop; the status is then `PREEMPTED`.
        """
        processes = [] if self._processes is None else ["-n", str(self._processes)]
        # It wraps Composer's launcher, which would kill its ranks 30 s after a signal.
        scripts = ["-m", "biphasic.launcher", *processes, "-m", "biphasic.main"]
        with noted_signals((signal.SIGINT, *STOP_SIGNALS)) as received:
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


class Slurm(Executor):
    """Submits runs with `sbatch`, each after the jobs that train what it starts from."""

    def __init__(self, study: StudyConfig, executor: SlurmExecutor):
        self._study, self._executor = study, executor
        lines = _output(["squeue", "--me", "--noheader", "--format=%i|%r|%j"]).splitlines()
        jobs = [line.strip().split("|", 2) for line in lines if line.count("|") >= 2]
        # Slurm removes jobs whose dependency has failed soon, because of --kill-on-invalid-dep.
        self._jobs = {name: job for job, reason, name in jobs if reason != "DependencyNeverSatisfied"}

    def job(self, name: str) -> str | None:
        return self._jobs.get(self._job_name(name))

    def may_start(self, name: str, waits_for: Sequence[str]) -> bool:
        return True

    def start(self, name: str, file: Path, description: str, waits_for: Sequence[str]) -> int:
        after = [job for each in waits_for if (job := self.job(each)) is not None]
        # Slurm then removes a job whose dependency failed, so that the study's next start can submit it again.
        dependency = [f"--dependency=afterok:{':'.join(after)}", "--kill-on-invalid-dep=yes"] if after else []
        options = ["--parsable", f"--job-name={self._job_name(name)}", *dependency, *self._executor.options]
        output = _output(["sbatch", *options, self._executor.script, str(file)])
        job = self._jobs[self._job_name(name)] = output.strip().partition(";")[0]
        print(f"{name}: job {job}{', after ' * bool(after)}{', '.join(after)}, {description}", flush=True)
        return 0

    def _job_name(self, name: str) -> str:
        """Return the name of a run's job, by which later starts of the study recognize it.

        The hash is that of the study's place: other studies may have a folder and a model of the same names.
        """
        folder = self._study.folder
        place = folder.rstrip("/") if is_remote(folder) else os.path.abspath(folder)
        return f"{PurePosixPath(place).name}.{name}.{hashlib.sha256(place.encode()).hexdigest()[:6]}"


class Command(Executor):
    """Runs a command that submits a run."""

    def __init__(self, command: str):
        self._command = command

    def may_start(self, name: str, waits_for: Sequence[str]) -> bool:
        print(f"{name}: waits for {' and '.join(waits_for)}", flush=True)
        return False

    def start(self, name: str, file: Path, description: str, waits_for: Sequence[str]) -> int:
        # The command is split first, so that a value with spaces stays one argument.
        command = [word.format(name=name, file=file) for word in shlex.split(self._command)]
        try:
            status = subprocess.run(command, check=False).returncode
        except OSError as error:
            raise UserError(f"executor.command: {command[0]} can't be run ({error.strerror})") from None
        failed = f"not submitted: {shlex.join(command)} ended with status {status}"
        print(f"{name}: {failed if status else f'submitted, {description}'}", flush=True)
        return status


def _output(command: Sequence[str]) -> str:
    """Return what a command of Slurm prints. Raises a UserError if it is not installed or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"executor: {command[0]} can't be run ({error.strerror}): is Slurm installed here?") from None
    if done.returncode:
        raise UserError(f"executor: {shlex.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
