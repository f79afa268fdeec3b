"""Run this repository's commands as forks of a process that has made the imports, which take seconds for each command.

A forked command reads the same arguments, writes the same files and has the same exit status as the command that a person
types. Its output goes to a log.
"""

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
import types
from collections.abc import Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path

from biphasic.composer_import import composer_imported
from biphasic.processes import die_with_parent

CORES = len(os.sched_getaffinity(0))
AT_ONCE = min(2, CORES)
"""Number of commands that run side by side. A tiny model gains little from a second thread."""
THREADS = max(1, min(4, CORES // AT_ONCE))
"""Threads of each of them."""


def import_libraries() -> None:
    """Import what most commands need. No tensor is computed here, since a fork can't use its parent's threads."""
    os.environ["OMP_NUM_THREADS"] = "1"  # of this process; each fork sets its own number
    with composer_imported():  # which keeps this process's handlers of signals
        import biphasic.export.write
        import biphasic.finetuning.run
        import biphasic.training.recipe  # noqa: F401

    # Otherwise each fork's garbage collections would copy the memory of all imported modules.
    gc.collect()
    gc.freeze()


def start(command: Sequence[str], log: Path) -> ForkProcess:
    """Start `biphasic …`, `python FILE …` or `composer FILE …` (one rank), with its output appended to `log`.

    The command is killed when this process ends.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(list(command), log, os.getpid()))
    process.start()
    return process


def _run(command: list[str], log: Path, parent: int) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    die_with_parent(parent)
    os.environ["OMP_NUM_THREADS"] = str(THREADS)  # for a command that imports torch itself
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(THREADS)
    status: object = 1
    try:
        if command[0] == "biphasic":
            sys.argv = command
            runpy.run_module("biphasic", run_name="__main__", alter_sys=True)
        else:
            sys.argv = command[1:]
            _run_script(Path(command[1]).resolve())
        status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    # A forked process of Python 3.11 doesn't call these, and Streaming removes its shared memory in one.
    atexit._run_exitfuncs()
    if isinstance(status, str):
        print(status, file=sys.stderr)
    sys.exit(status if isinstance(status, int) else int(status is not None))


def _run_script(path: Path) -> None:
    """Run a script as `__main__`. Not by runpy, because processes that it spawns call the module `__mp_main__`."""
    sys.path.insert(0, str(path.parent))
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
