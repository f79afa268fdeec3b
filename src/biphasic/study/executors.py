"""Start the runs of a study: on this machine, through Slurm, or with a command."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from biphasic.config.study import CommandExecutor, LocalExecutor, SlurmExecutor
from biphasic.errors import PREEMPTED, UserError
from biphasic.signals import noted_signals

_ROOT = Path(__file__).parents[3]
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def train_here(executor: LocalExecutor, file: Path) -> int:
    """Train a run on this machine and return its exit status.

    A signal to this process is forwarded to the ranks, which save and stop; the status is then `PREEMPTED`.
    """
    processes = [] if executor.processes is None else ["-n", str(executor.processes)]
    # launcher.py wraps Composer's launcher, which would kill its ranks 30 s after a signal.
    scripts = [str(_ROOT / "recipes/launch/launcher.py"), *processes, str(_ROOT / "src/main.py")]
    with noted_signals(_SIGNALS) as received:
        launcher = subprocess.Popen([sys.executable, *scripts, str(file)])
        passed_on = 0
        while launcher.poll() is None:
            # The ranks then save and stop. If the launcher has not started them yet, this fails and is tried again.
            command = ["pkill", "-USR1", "-P", str(launcher.pid)]
            if passed_on < len(received) and subprocess.run(command, check=False).returncode == 0:
                passed_on = len(received)
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
