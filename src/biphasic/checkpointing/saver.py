"""Composer's saver, and after it, in the background: hashes, uploads, the manifest, and what is kept."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

from composer.callbacks import CheckpointSaver
from composer.core import State
from composer.loggers import Logger
from composer.utils import dist

from biphasic.checkpointing.manifest import Manifest, batch_of, forget, outdated
from biphasic.config.errors import UserError
from biphasic.storage import Store, hash_of, is_remote, short, store

FILENAME = "ba{batch}-rank{rank}.pt"
"""Name of a monolithic checkpoint; a sharded one is a folder that Composer names `ep…-ba…`."""
_LOOK_EVERY = 0.5
_log = logging.getLogger(__name__)


class Saver(CheckpointSaver):
    """Saves to a folder of this machine, and completes each checkpoint in `place`, which may be a bucket.

    Training waits for Composer to write the state to the disk, and for nothing else. A checkpoint is complete with its
    manifest, which the first rank writes when every rank's files are stored; see `biphasic.checkpointing.manifest`. When
    the place can't be reached, training goes on: what could not be stored is tried again with the next checkpoint and at
    the end of the training, and stays on this machine.

    Args:
        folder: on this machine.
        place: where the run saves: the same folder, or a bucket's prefix.
        interval: a Composer duration.
        keep: how many checkpoints stay in `place`; negative: all. In a bucket's case this machine keeps the newest.
        run: says what the checkpoints are of, as the manifest tells it.
    """

    def __init__(self, folder: Path, place: str, interval: str, keep: int, run: dict[str, Any]):
        super().__init__(
            folder=str(folder),
            filename=FILENAME,
            remote_file_name=None,
            latest_filename=None,
            latest_remote_file_name=None,
            save_interval=interval,
            # What a dead attempt left behind must not stop the next one hours later.
            overwrite=True,
        )
        self._here, self._place, self._keep_newest, self._run = folder, place, keep, run
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._closing = Event()
        self._last: Future[None] | None = None
        self._waiting: list[tuple[Manifest, int]] = []
        """Of this rank's files, and how many ranks have some."""

    def _save_checkpoint(self, state: State, logger: Logger) -> None:
        super()._save_checkpoint(state, logger)
        timestamp = state.timestamp
        batch, rank = int(timestamp.batch), dist.get_global_rank()
        if state.fsdp_sharded_state_dict_enabled:
            path = f"ep{int(timestamp.epoch)}-ba{batch}"
            names = [f"{path}/__{rank}_0.distcp", *([f"{path}/.metadata"] if rank == 0 else [])]
        else:
            path = FILENAME.format(batch=batch, rank=0)
            names = [path] if rank == 0 else []
        about = {
            **self._run,
            "tokens": int(timestamp.token),
            "rows": int(timestamp.sample),
            "ranks": dist.get_world_size(),
        }
        ranks = dist.get_world_size() if state.fsdp_sharded_state_dict_enabled else 1
        if rank < ranks:
            self._last = self._pool.submit(
                self._complete, Manifest(batch, path, dict.fromkeys(names, (0, "")), about), ranks
            )

    def fit_end(self, state: State, logger: Logger) -> None:
        """Wait until the last checkpoint is complete.

        Raises:
            UserError: it can't be stored; it stays on this machine.
        """
        super().fit_end(state, logger)
        if self._last is not None:
            self._last.result()
        self._pool.submit(self._again).result()
        if self._waiting:
            names = ", ".join(one.path for one, _ in self._waiting)
            raise UserError(f"checkpoint.folder {self._place}: can't be written; {names} stayed in {self._here}")

    def close(self, state: State, logger: Logger) -> None:
        """Store what is at hand, without waiting for ranks that may be gone."""
        self._closing.set()
        self._pool.shutdown(wait=True)

    def _complete(self, mine: Manifest, ranks: int) -> None:
        """In the background: store this rank's files, and on the first rank the manifest."""
        files = {name: ((self._here / name).stat().st_size, hash_of(self._here / name)) for name in mine.files}
        self._waiting.append((replace(mine, files=files), ranks))
        self._again()

    def _again(self) -> None:
        """Try all that waits, the oldest first, until one fails."""
        while self._waiting:
            try:
                self._store(*self._waiting[0])
            except OSError as error:
                later = "training goes on, and it is tried again later"
                _log.warning("checkpoint %s can't be stored in %s (%s); %s",
                             self._waiting[0][0].path, self._place, short(error), later)  # fmt: skip
                return
            self._waiting.pop(0)

    def _store(self, mine: Manifest, ranks: int) -> None:
        place, rank = store(self._place), dist.get_global_rank()
        for name in mine.files:
            place.put(self._here / name, name)
        if rank:
            place.write(_part(mine.batch, rank), mine.as_bytes())
            return
        files = dict(mine.files)
        for other in range(1, ranks):
            if (part := self._wait_for(place, _part(mine.batch, other), mine.run)) is None:
                return
            files |= part.files
        whole = replace(mine, files=dict(sorted(files.items())))
        place.write(whole.name, whole.as_bytes())
        place.remove(_part(mine.batch, other) for other in range(1, ranks))
        for old in outdated(place, self._keep_newest):
            forget(old, place)
        if is_remote(self._place):
            self._clear_here(whole)

    def _wait_for(self, place: Store, name: str, about: dict[str, Any]) -> Manifest | None:
        """Another rank's part of this checkpoint; None when the run ends without it."""
        while True:
            try:
                part = Manifest.of(place.read(name))
                # What a dead attempt left has the same name.
                if part.run == about:
                    return part
            except (FileNotFoundError, ValueError):
                pass
            if self._closing.is_set():
                _log.warning("checkpoint without %s: the run ended before all ranks had stored their part", name)
                return None
            time.sleep(_LOOK_EVERY)

    def _clear_here(self, newest: Manifest) -> None:
        """Of the checkpoints that lie in a bucket, this machine keeps the newest."""
        here = store(str(self._here))
        still = {name for one, _ in self._waiting for name in one.files} | newest.files.keys()
        here.remove(
            [name for name in here.list() if name not in still and (batch_of(name) or newest.batch) < newest.batch]
        )


def _part(batch: int, rank: int) -> str:
    return f"ba{batch}.rank{rank}.json"
