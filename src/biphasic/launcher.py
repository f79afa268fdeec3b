"""Run Composer's launcher without its reactions to signals, which the ranks handle.

Slurm and other schedulers send a preemption signal to every process of a job. On SIGTERM, Composer's launcher kills ranks
that still run after 30 seconds, which may interrupt an upload. SIGUSR1 ends the launcher while its ranks still run. Here the
launcher waits until its ranks have ended. Its handlers do nothing; SIG_IGN would be inherited by the ranks.
"""

import os
import signal
import sys

from composer.cli.launcher import main

if __name__ == "__main__":
    # In a process group of its own, so that Ctrl-C reaches only node.sh, which signals the ranks to save.
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    sys.exit(main())
