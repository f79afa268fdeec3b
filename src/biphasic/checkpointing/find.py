"""Which checkpoint a run goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from composer.utils import dist

from biphasic.checkpointing.manifest import Manifest, bring, newest
from biphasic.config.errors import UserError
from biphasic.storage import short, store


def resume_point(place: str, folder: Path) -> Path | None:
    """The newest complete checkpoint, the same one for all ranks, on every machine's disk.

    Args:
        place: where the run saves: a folder, or a bucket's prefix.
        folder: where a machine keeps what it brings from there.

    Raises:
        UserError: the place can't be read, or not from every machine.
    """
    told: list[Any] = [None, None]
    if dist.get_global_rank() == 0:
        try:
            found = newest(store(place), folder)
            told = [None if found is None else found.relative_to(folder).as_posix(), None]
        except OSError as error:
            told = [None, f"checkpoint.folder {place}: can't be read ({short(error)})"]
    dist.broadcast_object_list(told, src=0)
    name, fault = told
    if fault is None and name is not None and dist.get_local_rank() == 0 and dist.get_global_rank():
        fault = _bring_too(place, folder, name)
    faults = dist.all_gather_object(fault)
    if any(faults):
        raise UserError(next(fault for fault in faults if fault))
    return None if name is None else folder / name


def _bring_too(place: str, folder: Path, name: str) -> str | None:
    """On another machine than the first rank's."""
    batch = name.partition("ba")[2].split("-")[0]
    try:
        files = store(place)
        fault = bring(Manifest.of(files.read(f"ba{batch}.json")), files, folder)
    except (OSError, ValueError) as error:
        fault = short(error)
    return None if fault is None else (
        f"checkpoint.folder {place}: rank {dist.get_global_rank()} can't get {name} ({fault}); with several machines it "
        "has to be a bucket, or a folder that all of them see"
    )  # fmt: skip
