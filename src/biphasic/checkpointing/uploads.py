"""What happens to a checkpoint after it was written to this machine: stored, completed, tidied up; in the background."""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from pathlib import Path
from threading import Condition, Thread

from composer.utils import dist

from biphasic.amounts import in_bytes, in_time
from biphasic.checkpointing.manifest import (
    Manifest,
    batch_of,
    forget,
    newest_batch,
    orphans,
    outdated,
    part_name,
    part_of,
    rank_of,
)
from biphasic.storage import Store, StoredFile, is_remote, short, store

_LOOK_EVERY = 0.25
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 30.0
_CLOSING = 30.0
_log = logging.getLogger(__name__)


class Uploads:
    """Stores this rank's files of each checkpoint, the oldest first; the first rank then writes the manifest.

    No rank waits for another in training: each says what it has stored in a small file of its own, a part, and the first
    rank's thread waits for these. While the place can't be reached it is tried again and again, at growing intervals.

    Args:
        here: the folder on this machine.
        place: where the run saves: the same folder, or a bucket's prefix.
        keep: how many checkpoints stay in `place`, beside those that are marked as kept; negative: all.
        disk_limit: bytes that may wait here for the place; None: as many as the disk has.
    """

    def __init__(self, here: Path, place: str, keep: int, disk_limit: int | None):
        self._here, self._place, self._keep, self._limit = here, place, keep, disk_limit
        self._jobs: deque[Manifest] = deque()
        self._changed = Condition()
        self._closing = False
        self._away = False
        self.fault: str | None = None
        """What stops the run: a checkpoint can't be written, or too many wait to be stored."""
        self.completed = 0
        """Batch of the newest checkpoint that this rank has seen through."""
        self._thread = Thread(target=self._work, name="checkpoints", daemon=True)
        self._thread.start()

    def add(self, mine: Manifest) -> None:
        """This rank's part of a checkpoint, written and hashed."""
        with self._changed:
            self._jobs.append(mine)
            self._changed.notify_all()
        self._check_limit()

    def _check_limit(self) -> None:
        """Whether the next checkpoint would still fit, while the place is away."""
        with self._changed:
            if not self._away or self._limit is None or not self._jobs:
                return
            sizes = [sum(size for size, _ in one.files.values()) for one in self._jobs]
        if sum(sizes) + sizes[-1] > self._limit:
            self.fault = (
                f"checkpoint.disk_limit: {in_bytes(sum(sizes))} of checkpoints wait for {self._place} and another one would "
                f"not fit; they stay in {self._here}: start again on this machine when it can be reached, and they are "
                "stored first"
            )

    def drain(self, patience: float) -> bool:
        """Wait until all is stored; False when `patience` seconds were not enough."""
        end = time.monotonic() + patience
        with self._changed:
            while self._jobs:
                if (left := end - time.monotonic()) <= 0 or not self._thread.is_alive():
                    return False
                self._changed.wait(left)
        return True

    def waiting(self) -> list[str]:
        """Checkpoints that are not stored yet."""
        with self._changed:
            return [one.path for one in self._jobs]

    def close(self) -> None:
        """Finish what is being done, without waiting for ranks or places that may be gone."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_CLOSING)

    def _work(self) -> None:
        wait = since = 0.0
        while True:
            with self._changed:
                if wait:
                    self._changed.wait_for(lambda: self._closing, wait)
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs or (self._closing and wait):
                    return
                job = self._jobs[0]
            try:
                if not self._store(job):
                    return
            except Exception as error:
                # A store's SDK has errors of its own; whatever it is, training goes on and the files stay.
                if not wait:
                    _log.warning("checkpoint %s can't be stored in %s (%s); training goes on, and it is tried again until "
                                 "it can", job.path, self._place, short(error))  # fmt: skip
                    since = time.monotonic()
                self._away = True
                self._check_limit()
                wait = min(max(2 * wait, _FIRST_WAIT), _LONGEST_WAIT) * random.uniform(0.7, 1.0)
                continue
            if wait:
                _log.warning("checkpoint %s is stored in %s after %s", job.path, self._place,
                             in_time(time.monotonic() - since))  # fmt: skip
            wait, self._away = 0.0, False
            with self._changed:
                self._jobs.popleft()
                self.completed = job.batch
                self._changed.notify_all()

    def _store(self, mine: Manifest) -> bool:
        """False when the run ended before the other ranks had stored theirs."""
        place, rank = store(self._place), dist.get_global_rank()
        put(mine, self._here, place)
        if rank:
            place.write(part_name(mine.batch, rank), mine.as_bytes())
        elif not self._complete(mine, place):
            return False
        if rank and not is_remote(self._place):
            return True
        there = place.list()
        if not rank:
            self._tidy(place, there, mine.batch)
        if is_remote(self._place):
            self._clear_here(newest_batch(there))
        return True

    def _complete(self, mine: Manifest, place: Store) -> bool:
        files = dict(mine.files)
        for other in range(1, mine.run["parts"]):
            if (part := self._wait_for(place, part_name(mine.batch, other), mine)) is None:
                return False
            files |= part.files
        finish(Manifest(mine.batch, mine.path, files, mine.run), place)
        return True

    def _wait_for(self, place: Store, name: str, mine: Manifest) -> Manifest | None:
        """Another rank's part of this checkpoint; None when the run ends without it."""
        while True:
            try:
                part = Manifest.of(place.read(name))
                # What a dead attempt left has the same name.
                if part.run == mine.run:
                    return part
            except (FileNotFoundError, ValueError):
                pass
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, _LOOK_EVERY):
                    _log.warning(
                        "checkpoint %s without %s: the run ended before all ranks had stored theirs", mine.path, name
                    )
                    return None

    def _tidy(self, place: Store, there: dict[str, StoredFile], batch: int) -> None:
        """Of what is `there`, remove what is outdated or never finished."""
        for old in outdated(place, there, self._keep):
            forget(old, place)
            # What is left of its batch, say of a dead attempt with more ranks, has no manifest now.
            for name in (old.name, *old.files):
                del there[name]
        place.remove(orphans(there, batch))

    def _clear_here(self, stored: int) -> None:
        """Of the checkpoints that lie in a bucket, this machine keeps the newest.

        Each rank removes its own files; a machine's first one also what a start brought of ranks that aren't here.
        """
        here, rank, local = store(str(self._here)), dist.get_global_rank(), dist.get_local_rank()
        neighbours = range(rank - local, rank - local + dist.get_local_world_size())
        with self._changed:
            still = {name for one in self._jobs for name in one.files}
        gone = [name for name in here.list() if (batch := batch_of(name)) is not None and batch < stored
                and name not in still
                and ((owner := rank_of(name)) == rank or (local == 0 and owner not in neighbours))]  # fmt: skip
        here.remove([*gone, part_name(stored, rank)])


def put(mine: Manifest, here: Path, place: Store) -> None:
    """Store a rank's files, and see that they arrived whole.

    Raises:
        OSError: they did not.
    """
    for name, (size, _) in mine.files.items():
        place.put(here / name, name)
        found = place.stat(name)
        if found is None or found.bytes != size:
            raise OSError(f"{name} arrived with {found.bytes if found else 0:,} bytes instead of {size:,}")


def finish(whole: Manifest, place: Store) -> None:
    """Write the manifest, and remove the parts that it was put together from."""
    files = dict(sorted(whole.files.items()))
    place.write(whole.name, Manifest(whole.batch, whole.path, files, whole.run).as_bytes())
    place.remove(part_name(whole.batch, other) for other in range(whole.run["parts"]))


def catch_up(here: Path, place: Store) -> None:
    """Store what an earlier attempt on this machine had written and could not store.

    Raises:
        OSError: the place can't be reached.
    """
    local, stored = store(str(here)), newest_batch(place.list())
    for name in local.list():
        batch = part_of(name)
        if batch is None or batch <= stored:
            continue
        try:
            mine = Manifest.of(local.read(name))
        except ValueError:
            continue
        if all(
            (here / file).is_file() and (here / file).stat().st_size == size for file, (size, _) in mine.files.items()
        ):
            _log.warning(
                "checkpoint %s was not stored in %s before the last attempt ended; it is now", mine.path, place.root
            )
            put(mine, here, place)
            place.write(name, mine.as_bytes())


def complete_parts(place: Store) -> None:
    """Write the manifests of checkpoints whose parts are all there.

    Raises:
        OSError: the place can't be reached.
    """
    there = place.list()
    batches = {batch for name in there if (batch := part_of(name)) is not None}
    for batch in sorted(batches):
        if f"ba{batch}.json" in there:
            continue
        parts = []
        for name in (name for name in there if part_of(name) == batch):
            try:
                parts.append(Manifest.of(place.read(name)))
            except ValueError:
                continue
        for run in [part.run for part in parts]:
            same = [part for part in parts if part.run == run]
            files = {name: known for part in same for name, known in part.files.items()}
            if len(same) == run["parts"] and all(
                name in there and there[name].bytes == size for name, (size, _) in files.items()
            ):
                finish(Manifest(batch, same[0].path, files, run), place)
                break


def write_part(mine: Manifest, here: Path) -> None:
    """Remember on this machine what a rank has written."""
    store(str(here)).write(part_name(mine.batch, dist.get_global_rank()), mine.as_bytes())
