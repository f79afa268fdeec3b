"""Record that a signal such as SIGABRT ended a rank, in a file that the next start of the run reads.

NCCL's watchdog aborts the process after a collective's timeout, and about a minute after a rank on another node has ended.
No exception is raised in Python, and rank 0, which records why an attempt ended, is aborted with the others.
"""

from __future__ import annotations

import faulthandler
from contextlib import suppress
from pathlib import Path
from typing import TextIO


class CrashFile:
    """File to which Python writes the stacks of this rank's threads if SIGABRT, SIGSEGV or SIGBUS ends the process.

    Nothing is written if Python's `faulthandler` is enabled already, such as by PYTHONFAULTHANDLER=1.
    """

    def __init__(self, folder: Path, attempt: str, rank: int):
        self._path, self._attempt = folder / f"{attempt}-rank{rank}.txt", attempt
        self._file: TextIO | None = None
        with suppress(OSError):  # such as a full disk, on which a run may still resume
            if not faulthandler.is_enabled():
                folder.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("w")
                faulthandler.enable(self._file)

    def remove(self) -> list[str]:
        """Remove the file at the end of the attempt, and return the other ranks' crashes (`read_crashes`)."""
        if self._file is not None:
            faulthandler.disable()
            self._file.close()
            with suppress(OSError):
                self._path.unlink()
                self._path.parent.rmdir()  # if it is empty
        return read_crashes(self._path.parent, self._attempt)


def read_crashes(folder: Path, attempt: str) -> list[str]:
    """Return a line for each rank of an attempt that a signal ended, such as `rank 1: Aborted (FILE)`."""
    lines = []
    for path in _files(folder, f"{attempt}-rank*.txt"):
        with suppress(OSError):
            if message := path.read_text(errors="replace").partition("\n")[0]:
                rank = path.stem.rpartition("-rank")[2]
                lines.append(f"rank {rank}: {message.removeprefix('Fatal Python error: ')} ({path})")
    return lines


def remove_empty_files(folder: Path) -> None:
    """Remove the files of earlier attempts' ranks that ended in another way, such as by SIGKILL."""
    for path in _files(folder, "*-rank*.txt"):
        with suppress(OSError):
            if not path.stat().st_size:
                path.unlink()


def _files(folder: Path, pattern: str) -> list[Path]:
    with suppress(FileNotFoundError):  # another rank may remove the folder, once it is empty, while it is listed
        return sorted(folder.glob(pattern))
    return []
