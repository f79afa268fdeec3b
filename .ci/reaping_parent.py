"""Run a command whose orphaned descendants are reaped at once, as init does on most machines (systemd, `docker --init`).

The first process of some containers, such as CI's, does not reap orphans: they stay as zombies, which still take signals.

    python3 .ci/reaping_parent.py COMMAND [ARGUMENT ...]
"""

import ctypes
import os
import signal
import sys

_PR_SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    """Run the command and return its exit status, or 128 + the number of the signal that ended it."""
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("this kernel knows no PR_SET_CHILD_SUBREAPER")
    child = os.spawnvp(os.P_NOWAIT, command[0], command)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(child, number))
    while True:
        process, status = os.wait()
        if process == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
