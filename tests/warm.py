"""Ranks without the seconds of their imports: forked from a process that has made them once.

What `composer -n N src/main.py …` does, with real processes and gloo, for tests that are not about the launcher.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
_server: subprocess.Popen[str] | None = None


def run(arguments: list[str], ranks: int, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run main.py's ranks until they have ended; when one fails, the others are ended as the launcher does it."""
    global _server
    if _server is None or _server.poll() is not None:
        command = [sys.executable, __file__]
        alone = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        _server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=alone)
        atexit.register(_server.kill)
    assert _server.stdin is not None and _server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        request = {"arguments": arguments, "ranks": ranks, "environment": environment, "folder": folder}
        _server.stdin.write(json.dumps(request) + "\n")
        _server.stdin.flush()
        status = int(_server.stdout.readline())
        out, err = (
            "".join((Path(folder) / f"{rank}.{kind}").read_text() for rank in range(ranks)) for kind in ("out", "err")
        )
    return subprocess.CompletedProcess(arguments, status, out, err)


def _serve() -> None:
    sys.path.insert(0, str(ROOT / "src"))
    import biphasic.training.pretrain  # noqa: F401 - what takes long
    import main

    for line in sys.stdin:
        request = json.loads(line)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        ranks = {}
        for rank in range(request["ranks"]):
            pid = os.fork()
            if not pid:
                place = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": request["ranks"],
                         "LOCAL_WORLD_SIZE": request["ranks"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
                os.environ.clear()
                os.environ.update(request["environment"], **{name: str(value) for name, value in place.items()})
                for number, name in ((1, "out"), (2, "err")):
                    file = os.open(f"{request['folder']}/{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                    os.dup2(file, number)
                sys.argv = ["main.py", *request["arguments"]]
                sys.exit(main.main())
            ranks[pid] = rank
        print(_wait(ranks), flush=True)


def _wait(ranks: dict[int, int]) -> int:
    """Exit status of the first rank that failed; 0 when none did."""
    left, status, killed = set(ranks), 0, 0.0
    while left:
        pid, ended = os.waitpid(-1, os.WNOHANG)
        if not pid:
            if killed and time.monotonic() - killed > 30:
                for other in left:
                    os.kill(other, signal.SIGKILL)
            time.sleep(0.02)
            continue
        left.discard(pid)
        code = os.waitstatus_to_exitcode(ended)
        if code and not status:
            status, killed = code, time.monotonic()
            for other in left:
                os.kill(other, signal.SIGTERM)
    return status


if __name__ == "__main__":
    _serve()
