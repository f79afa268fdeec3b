"""Which checkpoint a run goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from composer.utils import dist

from biphasic.checkpointing.fetched import fetch_named
from biphasic.checkpointing.manifest import Manifest, bring, newest
from biphasic.checkpointing.together import Together
from biphasic.checkpointing.uploads import catch_up, complete_parts
from biphasic.config.errors import UserError
from biphasic.config.same_run import differences
from biphasic.storage import is_remote, short, store


def resume_point(place: str, folder: Path, run: dict[str, Any], ranks: Together) -> Manifest | None:
    """The newest complete checkpoint, the same one for all ranks, on every machine's disk.

    Args:
        place: where the run saves: a folder, or a bucket's prefix.
        folder: where a machine keeps what it brings from there.
        run: the run's `name`, and what `decides` its weights. A manifest of another run is passed over.
        ranks: all of them.

    Returns:
        Its manifest; `folder / manifest.path` is what Composer loads. None when there is nothing to go on from.

    Raises:
        UserError: the place can't be read, or not from every machine, or it holds another run's checkpoints alone.
    """
    _store_what_is_left(place, folder, ranks)
    found, fault, others = None, None, _Others(run)
    if dist.get_global_rank() == 0:
        try:
            complete_parts(store(place))
            found = newest(store(place), folder, others.append_if_foreign)
            if found is None and others.names:
                fault = (
                    f"checkpoint.folder {place}: holds the checkpoints of another run, {others.names[0]}: choose another "
                    "folder, or set run_name to that one's and let what differs be compared"
                )
        except OSError as error:
            fault = f"checkpoint.folder {place}: can't be read ({short(error)})"
    manifest: Manifest | None = ranks.first(found)
    if manifest is not None and dist.get_local_rank() == 0 and dist.get_global_rank():
        fault = bring(manifest, store(place), folder)
        if fault is not None:
            fault = (
                f"checkpoint.folder {place}: rank {dist.get_global_rank()} can't get {manifest.path} ({fault}); with "
                "several machines it has to be a bucket, or a folder that all of them see"
            )
    ranks.raise_first(fault)
    return manifest


class _Others:
    """Manifests of other runs: of another name, and with other weights."""

    def __init__(self, run: dict[str, Any]):
        self.run, self.names = run, list[str]()

    def append_if_foreign(self, manifest: Manifest) -> str | None:
        """Why it is another run's."""
        theirs = manifest.run
        if theirs["name"] == self.run["name"]:
            return None
        # The data's hashes aren't known before the data is opened.
        early = {key: value for key, value in theirs["decides"].items() if not key.endswith(".index")}
        if not differences(early, self.run["decides"], []):
            return None
        self.names.append(theirs["name"])
        return f"it is of another run, {theirs['name']}"


def local_copy(path: str | None, folder: Path, ranks: Together) -> str | None:
    """A named checkpoint on this machine: itself, or what is brought from a bucket to `folder/from`; all ranks wait.

    Raises:
        UserError: it isn't there, is not complete, or is damaged.
    """
    if path is None or not is_remote(path):
        return path
    fault = None
    if dist.get_local_rank() == 0:
        try:
            fetch_named(path, folder / "from")
        except UserError as error:
            fault = str(error)
    ranks.raise_first(fault)
    return str(folder / "from" / path.rstrip("/").rpartition("/")[2])


def _store_what_is_left(place: str, folder: Path, ranks: Together) -> None:
    """What an earlier attempt has written to this machine and could not store; all ranks wait for it."""
    if not is_remote(place):
        return
    fault = None
    if dist.get_local_rank() == 0:
        try:
            catch_up(folder, store(place))
        except OSError as error:
            fault = f"checkpoint.folder {place}: can't be reached ({short(error)})"
    ranks.raise_first(fault)
