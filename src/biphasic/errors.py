"""Errors that are shown without a traceback, and the exit status of a preempted run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Problem:
    """An error in a configuration: its place (`file:line` or `command line`), the key, and what was expected."""

    where: str
    key: str
    message: str

    def __str__(self) -> str:
        text = f"{self.where}: {self.key}: {self.message}" if self.key else f"{self.where}: {self.message}"
        return text.encode(errors="backslashreplace").decode()  # a YAML key may not be valid Unicode


class ConfigError(Exception):
    """A configuration is invalid. `problems` contains all problems, not only the first."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[Problem]]]:
        # Otherwise a copy in another process is made from the message.
        return ConfigError, (self.problems,)


class UserError(Exception):
    """An error that the user can correct. The message says how, and no traceback is shown."""


class Unavailable(UserError):
    """Something that the job needs can't be reached for now, such as a bucket. Starting again later may help."""


class Missing(UserError):
    """Something that another command makes, such as a dataset or a checkpoint, is not there yet."""


class Preempted(Exception):
    """The run saved a checkpoint and stopped on request. The same command resumes it."""


PREEMPTED = 75
"""Exit status of a preempted run (EX_TEMPFAIL in sysexits.h)."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    text = getattr(error, "strerror", None) or str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def is_lost_rank(error: BaseException) -> bool:
    """Return whether an error of a collective means that another rank disconnected.

    Gloo's collectives raise it. NCCL raises it for a collective that starts after the fault; during a collective, NCCL's
    watchdog aborts the process instead (`CrashFile` in checkpointing/open_run.py).
    """
    return isinstance(error, RuntimeError) and any(part in str(error) for part in ("by peer", "ncclRemoteError"))
