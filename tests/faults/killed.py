"""A run that is killed at a moment, for real: SIGKILL to both ranks and their launcher.

KILL=kind:batch composer -n 2 killed.py FILE.yaml [key=value ...]

Without KILL, or when the moment doesn't come, it is a run like any other.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from composer.core import Callback, State
from composer.loggers import Logger

from biphasic.checkpointing import saver, uploads
from biphasic.storage import S3Store
from biphasic.training import pretrain

KIND, _, BATCH = os.environ.get("KILL", ":-1").partition(":")
AT = int(BATCH)
saving = -1
"""Batch of the checkpoint that is being written or stored."""


def die() -> None:
    os.killpg(os.getpgid(0), signal.SIGKILL)


def die_if(kind: str, batch: int) -> None:
    if kind == KIND and batch >= AT:
        die()
        time.sleep(60)


class Moments(Callback):
    """Dies within a batch; and waits, after a save, as if a step took longer than storing a checkpoint does."""

    def __init__(self, ours: saver.Saver):
        self.ours = ours

    def batch_start(self, state: State, logger: Logger) -> None:
        batch, deadline = int(state.timestamp.batch), time.monotonic() + 20
        while self.ours._saved == batch and self.ours._uploads.completed < batch and time.monotonic() < deadline:
            time.sleep(0.01)
        die_if("start", batch)

    def after_backward(self, state: State, logger: Logger) -> None:
        die_if("backward", int(state.timestamp.batch))

    def batch_end(self, state: State, logger: Logger) -> None:
        die_if("end", int(state.timestamp.batch))


def patch() -> None:
    build, write = pretrain._saver, saver.Saver._write
    callbacks, put, forget, finish = pretrain.callbacks, S3Store.put, uploads.forget, uploads.finish
    made: list[saver.Saver] = []

    def building(*given: Any) -> Any:
        made.append(build(*given))
        return made[0]

    def writing(self: Any, how: Any, content: Any, mine: Any) -> None:
        global saving
        saving = mine.batch
        write(self, how, content, mine)

    class Writer(saver.ShardWriter):
        def write_data(self, *given: Any, **keys: Any) -> Any:
            die_if("write", saving)
            return super().write_data(*given, **keys)

        def finish(self, *given: Any, **keys: Any) -> None:
            die_if("index", saving)
            super().finish(*given, **keys)

    def putting(self: Any, file: Path, name: str) -> None:
        if file.suffix == ".distcp" and KIND == "upload" and saving >= AT:
            # What a store may show of an upload that was cut off.
            half = file.with_name(".half")
            half.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
            put(self, half, name)
            die_if("upload", saving)
        put(self, file, name)

    def finishing(whole: Any, place: Any) -> None:
        die_if("manifest", whole.batch)
        finish(whole, place)

    def forgetting(old: Any, place: Any) -> None:
        if KIND == "forget" and saving >= AT:
            place.remove([old.name])
            die_if("forget", saving)
        forget(old, place)

    pretrain._saver, saver.Saver._write = building, writing
    pretrain.callbacks = lambda *given: [Moments(made[0]), *callbacks(*given)]
    saver.ShardWriter = Writer  # pyright: ignore
    S3Store.put, uploads.finish, uploads.forget = putting, finishing, forgetting


if __name__ == "__main__":
    patch()
    import main

    sys.exit(main.main())
