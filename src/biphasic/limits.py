"""What this machine lets a process use: cores, open files, and sockets in the temporary folder."""

from __future__ import annotations

import os
import resource
import tempfile
from multiprocessing import util

from biphasic.errors import UserError

_MOST_FILES = 65_536
"""Some programs take longer to start the higher their limit is."""
_TEMPORARY_BYTES = 75
"""Longest path of a temporary folder: a socket's has at most 107 bytes, 32 of which are `/pymp-…/listener-…`."""


def raise_file_limit() -> None:
    """Let this process open as many files and connections as its hard limit allows, up to 65,536.

    The usual soft limit is 1,024. A rank has three connections to each other rank, and a worker takes eight files of the
    process that starts it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _MOST_FILES)), hard))


def available_cores() -> int:
    """Return the number of cores that this process may use, by its affinity and its container's quota."""
    from joblib import cpu_count

    return cpu_count()


def require_short_temporary_folder() -> None:
    """Raise a UserError if processes can't make sockets in the temporary folder, because its path is too long.

    A loader's process would show the error, and its rank would wait for it forever.
    """
    folder = tempfile.gettempdir()
    length = len(os.fsencode(folder))
    # Newer Pythons choose another folder by themselves.
    if length > _TEMPORARY_BYTES and util.get_temp_dir().startswith(folder):
        raise UserError(
            f"TMPDIR: {folder} has a path of {length} bytes, in which processes can't make sockets: expected at most "
            f"{_TEMPORARY_BYTES}, as TMPDIR=/tmp"
        )
