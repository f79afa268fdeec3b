"""Kills a run at a chosen point: SIGKILL to its process group, that is to all its ranks and their parent.

`patch("upload:12")` is called in each rank before the run starts: the run is killed within the first upload of a checkpoint
from batch 12 on. If that point doesn't come, the run ends by itself.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger

from biphasic.checkpointing import save, store
from biphasic.storage import S3Store
from biphasic.training import pretrain
from tiny import add_callback


class KillPoints(Callback):
    """Kills within a batch; and waits after a save, as if a step took longer than an upload does."""

    def __init__(self, point: str):
        self.kind, _, batch = point.partition(":")
        self.batch = int(batch)
        self.saver: save.Saver | None = None
        self.saving = -1
        """Batch of the checkpoint that is being written or uploaded."""

    def kill_if(self, kind: str, batch: int) -> None:
        if kind == self.kind and batch >= self.batch:
            os.killpg(os.getpgid(0), signal.SIGKILL)
            time.sleep(60)

    def batch_start(self, state: State, logger: Logger) -> None:
        batch, deadline = int(state.timestamp.batch), time.monotonic() + 20
        saver = self.saver
        assert saver is not None
        while saver._saved_batch == batch and saver._uploader.completed < batch and time.monotonic() < deadline:
            time.sleep(0.01)
        self.kill_if("start", batch)

    def after_backward(self, state: State, logger: Logger) -> None:
        self.kill_if("backward", int(state.timestamp.batch))

    def batch_end(self, state: State, logger: Logger) -> None:
        self.kill_if("end", int(state.timestamp.batch))


def patch(point: str) -> None:
    points = KillPoints(point)
    build_saver, write = pretrain._saver, save.Saver._write
    upload, delete, finish = S3Store.upload, store.delete_checkpoint, store.write_manifest

    def build(*arguments: Any) -> save.Saver:
        points.saver = build_saver(*arguments)
        return points.saver

    def write_checkpoint(self: save.Saver, *arguments: Any) -> None:
        points.saving = arguments[-1].batch
        write(self, *arguments)

    class Writer(save.ShardWriter):
        def write_data(self, *arguments: Any, **keys: Any) -> Any:
            points.kill_if("write", points.saving)
            return super().write_data(*arguments, **keys)

        def finish(self, *arguments: Any, **keys: Any) -> None:
            points.kill_if("index", points.saving)
            super().finish(*arguments, **keys)

    def upload_file(self: Any, file: Path, name: str) -> None:
        if file.suffix == ".distcp" and points.kind == "upload" and points.saving >= points.batch:
            # A store may show an incomplete upload.
            half = file.with_name(".half")
            half.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
            upload(self, half, name)
            points.kill_if("upload", points.saving)
        upload(self, file, name)

    def write_manifest(manifest: Any, destination: Any) -> None:
        points.kill_if("manifest", manifest.batch)
        finish(manifest, destination)

    def delete_checkpoint(old: Any, destination: Any) -> None:
        if points.kind == "delete" and points.saving >= points.batch:
            destination.remove([old.name])
            points.kill_if("delete", points.saving)
        delete(old, destination)

    pretrain._saver, save.Saver._write = build, write_checkpoint
    save.ShardWriter = Writer  # pyright: ignore
    S3Store.upload, store.write_manifest, store.delete_checkpoint = upload_file, write_manifest, delete_checkpoint
    add_callback(points)
