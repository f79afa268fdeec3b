"""Sends a signal to a run at a chosen point: by default SIGKILL to all its ranks and their parent.

`patch("upload:12")` is called in each rank before the run starts: the signal is sent within the first upload of a checkpoint
from batch 12 on. If that point doesn't come, the run ends by itself.
"""

import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from biphasic.checkpointing import save, upload
from biphasic.storage.azure import AzureStore
from biphasic.storage.buckets import ArrowStore, S3Store
from helpers.tiny import add_callback

IN_TRAINING = ("start", "backward", "end")
IN_SAVE = ("upload", "write", "index", "manifest", "delete")


class SignalPoints(Callback):
    """Sends the signal; and waits after a save, as if a step took longer than an upload does."""

    def __init__(self, point: str, number: int):
        self.kind, _, batch = point.partition(":")
        self.batch, self.number = int(batch), number
        self.saving = -1
        """Batch of the checkpoint that is being written or uploaded."""

    def signal_if(self, kind: str, batch: int) -> None:
        if kind != self.kind or batch < self.batch:
            return
        if self.number == signal.SIGKILL:
            os.killpg(os.getpgid(0), signal.SIGKILL)
            time.sleep(60)
        self.kind = "sent"
        os.kill(os.getpid(), self.number)

    def batch_start(self, state: State, logger: Logger) -> None:
        batch, deadline = int(state.timestamp.batch), time.monotonic() + 20
        [saver] = (callback for callback in state.callbacks if isinstance(callback, save.Saver))
        uploads = state.fsdp_sharded_state_dict_enabled or dist.get_global_rank() == 0
        while (
            uploads
            and saver._saved_batch == batch
            and saver._writing is not None
            and not (saver._writing.done() and not saver._uploader.pending)
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        self.signal_if("start", batch)

    def after_backward(self, state: State, logger: Logger) -> None:
        self.signal_if("backward", int(state.timestamp.batch))

    def batch_end(self, state: State, logger: Logger) -> None:
        self.signal_if("end", int(state.timestamp.batch))

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        self.signal_if("validation", int(state.timestamp.batch))


def patch(point: str, number: int = signal.SIGKILL) -> None:
    points = SignalPoints(point, number)
    write, finish = save.Saver._write, upload.write_manifest

    def write_checkpoint(self: save.Saver, *arguments: Any) -> None:
        points.saving = arguments[-1].batch
        write(self, *arguments)

    class Writer(save.ShardWriter):
        def write_data(self, *arguments: Any, **keys: Any) -> Any:
            points.signal_if("write", points.saving)
            return super().write_data(*arguments, **keys)

        def finish(self, *arguments: Any, **keys: Any) -> None:
            points.signal_if("index", points.saving)
            super().finish(*arguments, **keys)

    def write_manifest(manifest: Any, destination: Any) -> None:
        points.signal_if("manifest", manifest.batch)
        finish(manifest, destination)

    def patch_store(store: Any) -> None:
        put, remove = store.upload, store.remove

        def upload_file(self: Any, file: Path, name: str) -> None:
            if file.suffix in (".distcp", ".pt") and points.kind == "upload" and points.saving >= points.batch:
                # A store may show an incomplete upload.
                half = file.with_name(".half")
                half.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
                put(self, half, name)
                points.signal_if("upload", points.saving)
            put(self, file, name)

        def remove_files(self: Any, names: Iterable[str]) -> None:
            names = list(names)
            remove(self, names)
            # The manifest of an outdated checkpoint is deleted before its files.
            if any(re.fullmatch(r"ba\d+\.json", name) for name in names) and points.saving >= points.batch:
                points.signal_if("delete", points.saving)

        store.upload, store.remove = upload_file, remove_files

    for store in (S3Store, AzureStore, ArrowStore):  # Azure's inherits `remove`
        patch_store(store)
    save.Saver._write = write_checkpoint
    save.ShardWriter = Writer  # pyright: ignore
    upload.write_manifest = write_manifest
    add_callback(points)
