"""Jobs without the seconds of their imports: ranks are forked from a process that has imported Composer once.

A job is what `composer -n N src/main.py …` starts, with real processes and gloo, for tests that don't test the launcher.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Server:
    """A process that has made the imports, started with an environment; by default those of every run, else `modules`."""

    def __init__(self, environment: dict[str, str], *modules: str):
        self.process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        atexit.register(self.process.kill)

    def start(
        self,
        arguments: list[str],
        ranks: int,
        environment: dict[str, str],
        *,
        module: str = "main",
        code: str = "",
        setup: str = "",
        place: dict[str, str] | None = None,
    ) -> Job:
        """Start a job.

        Args:
            arguments: of the command line.
            ranks: processes.
            environment: of each process, besides the variables that Composer's launcher sets.
            module: what runs as `__main__`; `main` is src/main.py.
            code: Python that each rank runs first.
            setup: Python that runs once, in the ranks' parent process.
            place: replaces variables that Composer's launcher sets, such as NODE_RANK.
        """
        folder = tempfile.TemporaryDirectory()
        request = {"arguments": arguments, "ranks": ranks, "environment": environment, "folder": folder.name,
                   "module": module, "code": code, "setup": setup, "place": place or {}}  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        pids = json.loads(self.process.stdout.readline())
        return Job(folder, arguments, pids[0], pids[1:])


class Job:
    """A running job: its ranks, and their parent, in a process group whose id is `pid`."""

    def __init__(self, folder: Any, arguments: list[str], pid: int, ranks: list[int]):
        self._folder, self._arguments, self.pid, self.ranks = folder, arguments, pid, ranks

    def poll(self) -> int | None:
        """The exit status of the first rank that failed, or 0; -9 if the process group was killed; None while it runs."""
        alive, status = Path(f"/proc/{self.pid}").exists(), Path(self._folder.name) / "status"
        if status.exists():
            return int(status.read_text())
        return None if alive else -signal.SIGKILL

    def wait(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Wait for the end."""
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                self.kill()
                raise TimeoutError(f"{self._arguments}: still runs after {timeout:.0f} s\n{self._read('out', 'err')}")
            time.sleep(0.01)
        return subprocess.CompletedProcess(self._arguments, status, self._read("out"), self._read("err"))

    def kill(self) -> None:
        """Kill the ranks and their parent at once."""
        os.killpg(self.pid, signal.SIGKILL)

    def _read(self, *kinds: str) -> str:
        files = (Path(self._folder.name) / f"{rank}.{kind}" for kind in kinds for rank in range(len(self.ranks)))
        return "".join(file.read_text() for file in files if file.exists())


_server: Server | None = None


def start(arguments: list[str], ranks: int, environment: dict[str, str], **options: Any) -> Job:
    """Start a job in this process's server; see `Server.start`."""
    global _server
    if _server is None or _server.process.poll() is not None:
        _server = Server({**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    return _server.start(arguments, ranks, environment, **options)


def run(arguments: list[str], ranks: int, environment: dict[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a job until its ranks have ended; if one fails, the others are ended as Composer's launcher does."""
    return start(arguments, ranks, environment, **options).wait(600)


def _serve() -> None:
    sys.path[:1] = [str(ROOT / "src"), str(ROOT / "tests")]
    for name in sys.argv[1:]:
        importlib.import_module(name)
    if not sys.argv[1:]:
        _make_imports()
    gc.freeze()
    # Nobody waits for the jobs' parents.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        request = json.loads(line)
        read, write = os.pipe()
        if not os.fork():
            os.close(read)
            _supervise(request, write)
        os.close(write)
        with os.fdopen(read) as pids:
            print(pids.read(), flush=True)


def _make_imports() -> None:
    """Import what every run needs, also what it imports only when it uses it."""
    import boto3  # noqa: F401
    import composer.algorithms  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401
    from composer.utils import collect_env

    import biphasic.training.recipe  # noqa: F401
    import main  # noqa: F401
    from biphasic.devices import describe_machine_once

    describe_machine_once()
    collect_env.get_composer_env_dict()  # for all forks


def _supervise(request: dict[str, Any], pipe: int) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (*STOP_SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    exec(request["setup"], {})
    from helpers.ports import free_port

    port, pids = free_port(), []
    # A signal in this moment waits for the rank, which would otherwise ignore it as this process does.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    for rank in range(request["ranks"]):
        pid = os.fork()
        if not pid:
            os.close(pipe)
            place = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": request["ranks"],
                     "LOCAL_WORLD_SIZE": request["ranks"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
            _run_rank(request, rank, {name: str(value) for name, value in place.items()})
        pids.append(pid)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.write(pipe, json.dumps([os.getpid(), *pids]).encode())
    os.close(pipe)
    partial = Path(request["folder"]) / "partial"
    partial.write_text(str(_wait(pids)))
    partial.rename(partial.with_name("status"))
    os._exit(0)


def _run_rank(request: dict[str, Any], rank: int, place: dict[str, str]) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.environ.clear()
    os.environ.update({**request["environment"], **place, **request["place"]})
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{request['folder']}/{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    sys.argv = [f"{request['module']}.py", *request["arguments"]]
    from biphasic.processes import run_command

    status = 0
    try:
        exec(request["code"], {})
        if request["module"] == "main":
            run_command(sys.modules["main"].main)
        else:
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    _end(status)


def _end(status: Any) -> None:
    """End this process as Python does, except that modules aren't freed one by one, which takes half a second."""
    if isinstance(status, str):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def _wait(pids: list[int]) -> int:
    """Exit status of the first rank that failed; 0 if none did."""
    running, status, terminated = set(pids), 0, 0.0
    while running:
        pid, ended = os.waitpid(-1, os.WNOHANG)
        if not pid:
            if terminated and time.monotonic() - terminated > 30:
                for other in running:
                    os.kill(other, signal.SIGKILL)
            time.sleep(0.02)
            continue
        running.discard(pid)
        code = os.waitstatus_to_exitcode(ended)
        if code and not status:
            status, terminated = code, time.monotonic()
            for other in running:
                os.kill(other, signal.SIGTERM)
    return status


if __name__ == "__main__":
    _serve()
