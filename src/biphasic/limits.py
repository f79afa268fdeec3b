"""Raise limits of the operating system for this process and those that it starts."""

from __future__ import annotations

import resource

_MOST_FILES = 65_536
"""Some programs take longer to start the higher their limit is."""


def raise_file_limit() -> None:
    """Let this process open as many files and connections as its hard limit allows, up to 65,536.

    The usual soft limit is 1,024. A rank has three connections to each other rank, and a worker takes eight files of the
    process that starts it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _MOST_FILES)), hard))
