"""Composer's launcher, deaf to the signals that are meant for its ranks.

Slurm and others send a preemption to every process there is. Composer's launcher takes SIGTERM as the order to kill its
ranks after 30 seconds, which may cut an upload off, and SIGUSR1 ends it and leaves the ranks behind. Here it waits for
its ranks, which know what to do. (Handlers that do nothing, since ignored signals would be inherited by the ranks.)
"""

from __future__ import annotations

import os
import signal
import sys

from composer.cli.launcher import main

if __name__ == "__main__":
    # Out of the terminal's group: Ctrl-C is node.sh's, which lets the ranks save.
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    sys.exit(main())
