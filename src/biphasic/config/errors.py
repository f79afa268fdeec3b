"""What is wrong with a configuration, said to the person who wrote it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Problem:
    """One thing that is wrong: the key, where it was written (`file:line` or `command line`), and what was expected."""

    where: str
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.key}: {self.message}" if self.key else f"{self.where}: {self.message}"


class ConfigError(Exception):
    """A configuration can't be used. Holds every problem that was found, not only the first."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


class UserError(Exception):
    """Something that the person who started the program can mend; its message is all they need to read."""


class Preempted(Exception):
    """The run was asked to stop and has saved; the same command continues it."""


PREEMPTED = 75
"""Exit status of a run that was preempted. (sysexits' EX_TEMPFAIL)"""


def is_lost_rank(error: BaseException) -> bool:
    """Whether the error means that another rank has ended: a collective's, of gloo or NCCL."""
    return isinstance(error, RuntimeError) and any(part in str(error) for part in ("by peer", "ncclRemoteError"))
