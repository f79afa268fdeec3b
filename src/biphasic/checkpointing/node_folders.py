"""Check that a run's nodes share the folder of checkpoints, and don't share those of downloaded shards."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from biphasic.checkpointing.stopping import RankGroup
from biphasic.data.streams import RowStream, opened_streams
from biphasic.errors import UserError
from biphasic.storage import UNFINISHED_PREFIX, is_remote, user_errors

_SHARED_SECONDS, _OWN_SECONDS = 60.0, 2.0
"""How long nodes look for a file of rank 0, in a folder that has to be shared and in those that must not be."""


def require_node_folders(destination: str, streams: Mapping[str, RowStream], ranks: RankGroup) -> None:
    """Check that all nodes see a local `checkpoint.folder`, and that none sees the caches of rank 0's node.

    Rank 0 would wait forever for files on other nodes' disks, and nodes would delete each other's shards. `streams`
    are those that the run reads, by key. Raises a UserError on all ranks.
    """
    if ranks.size == len(ranks.local_ranks):
        return
    if not is_remote(destination):
        folders = {"checkpoint.folder": Path(destination)}
        for node, seen in _seen_by_nodes(folders, ranks, _SHARED_SECONDS).items():
            if not seen:
                raise UserError(
                    f"checkpoint.folder {destination}: {node} doesn't see the files of node 0 there: with several "
                    "machines, give a bucket or a folder that all of them see"
                )
    caches = {key: Path(each.local) for key, each in opened_streams(streams)[0].items() if each.remote is not None}
    for node, seen in _seen_by_nodes(caches, ranks, _OWN_SECONDS).items():
        if seen:
            raise UserError(
                f"data.cache ({seen[0]}.local {caches[seen[0]]}): {node} shares this folder with node 0, and would delete "
                "shards that the other reads: give a path on each node's own disk, such as data.cache=/tmp/shards"
            )


def _seen_by_nodes(folders: Mapping[str, Path], ranks: RankGroup, seconds: float) -> dict[str, list[str]]:
    """Return the keys of the folders, by the name of each other node, in which it sees a file that rank 0 writes there."""
    if not folders:
        return {}
    # A name that no node has looked for yet.
    name = ranks.broadcast(f"{UNFINISHED_PREFIX}{secrets.token_hex(8)}")

    def write() -> None:
        for key, folder in folders.items():
            with user_errors(f"{key} {folder}: can't be written"):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).touch()

    ranks.on_first_rank(write)
    answer = None
    if ranks.local_rank == 0 and not ranks.is_first:
        end = time.monotonic() + seconds
        seen = [key for key, folder in folders.items() if _appears((folder / name).absolute(), end)]
        answer = f"node {ranks.node} ({socket.gethostname()})", seen
    answers = ranks.all_gather(answer)
    if ranks.is_first:
        for folder in folders.values():
            with suppress(OSError):
                (folder / name).unlink()
    return dict(answer for answer in answers if answer is not None)


def _appears(file: Path, end: float) -> bool:
    while True:
        # NFS may hide new files for a minute, but asks the server for changes of a folder that is opened.
        for folder in reversed(file.parents):
            with suppress(OSError):  # such as one that may be entered but not read
                os.close(os.open(folder, os.O_RDONLY))
        with suppress(OSError):
            if file.exists():
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
