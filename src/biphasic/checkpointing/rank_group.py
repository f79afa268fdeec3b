"""Collectives of a run's ranks outside of training, and the check of the folders that its nodes share."""

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed
from composer.utils import dist

from biphasic.data.streams import RowStream, opened_streams
from biphasic.errors import UserError
from biphasic.storage import UNFINISHED_PREFIX, is_remote, user_errors

TIMEOUT = timedelta(minutes=30)
_SHARED_SECONDS, _OWN_SECONDS = 60.0, 2.0
"""How long nodes look for a file of rank 0, in a folder that has to be shared and in those that must not be."""
T = TypeVar("T")


class RankGroup:
    """A gloo process group of all ranks for collectives on CPU tensors, separate from the training's process group.

    A rank may wait for the others longer than in training (`timeout`), because one may be downloading a checkpoint.
    `is_first` says whether this is rank 0, and `local_ranks` are the ranks of this node.
    """

    def __init__(self, timeout: timedelta = TIMEOUT):
        self.rank, self.local_rank, self.size = dist.get_global_rank(), dist.get_local_rank(), dist.get_world_size()
        self.is_first, self.node, first = self.rank == 0, dist.get_node_rank(), self.rank - self.local_rank
        self.local_ranks = range(first, first + dist.get_local_world_size())
        self.group: Any = torch.distributed.new_group(backend="gloo", timeout=timeout) if self.size > 1 else None
        """None for a single process."""

    def maximum(self, value: int) -> int:
        if self.group is None:
            return value
        maximum = torch.tensor([value], dtype=torch.int32)
        torch.distributed.all_reduce(maximum, torch.distributed.ReduceOp.MAX, group=self.group)
        return int(maximum.item())

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on all ranks."""
        if self.group is None:
            return value
        # Not `all_gather`: a manifest lists a file for each rank, so memory would grow with the square of the ranks.
        values: list[Any] = [value if self.is_first else None]
        torch.distributed.broadcast_object_list(values, src=0, group=self.group, device=torch.device("cpu"))
        return values[0]

    def on_all_ranks(self, action: Callable[[], object]) -> None:
        """Run a function. The UserError of the lowest rank that has one is raised on all ranks."""
        fault = None
        try:
            action()
        except UserError as error:
            fault = error
        for first in filter(None, self.all_gather(fault)):
            raise first

    def once_per_machine(self, action: Callable[[], object]) -> None:
        """Run a function on local rank 0 of each node while all ranks wait. A UserError on any node is raised on all."""
        self.on_all_ranks(action if self.local_rank == 0 else lambda: None)

    def on_first_rank(self, action: Callable[[], T]) -> T:
        """Run a function on rank 0 while all ranks wait. Return its value, or raise its UserError, on all ranks."""
        values = list[T]()
        self.on_all_ranks(lambda: values.append(action()) if self.is_first else None)
        return self.broadcast(values[0] if values else None)

    def barrier(self) -> None:
        self.maximum(0)


def require_node_folders(destination: str, streams: Mapping[str, RowStream], ranks: RankGroup) -> None:
    """Check that all nodes see a local `checkpoint.folder`, and that none sees the caches of rank 0's node.

    Rank 0 would wait forever for files on other nodes' disks, and nodes would delete each other's shards. `streams`
    are those that the run reads, by key. Raises a UserError on all ranks.
    """
    if ranks.size == len(ranks.local_ranks):
        return
    shared = {} if is_remote(destination) else {"checkpoint.folder": Path(destination)}
    caches = {key: Path(each.local) for key, each in opened_streams(streams)[0].items() if each.remote is not None}
    name = ranks.broadcast(f"{UNFINISHED_PREFIX}{secrets.token_hex(8)}")  # a name that no node has looked for yet

    def write() -> None:
        for key, folder in (shared | caches).items():
            with user_errors(f"{key} {folder}: can't be written"):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).touch()

    ranks.on_first_rank(write)
    answer = None
    if ranks.local_rank == 0 and not ranks.is_first:
        seen = _seen(shared, name, _SHARED_SECONDS) | _seen(caches, name, _OWN_SECONDS)
        answer = f"node {ranks.node} ({socket.gethostname()})", seen
    answers = filter(None, ranks.all_gather(answer))
    for folder in (shared | caches).values() if ranks.is_first else ():
        with suppress(OSError):
            (folder / name).unlink()
    for node, seen in answers:
        if shared.keys() - seen:
            raise UserError(
                f"checkpoint.folder {destination}: {node} doesn't see the files of node 0 there: with several "
                "machines, give a bucket or a folder that all of them see"
            )
        for key in sorted(seen & caches.keys()):
            raise UserError(
                f"data.cache ({key}.local {caches[key]}): {node} shares this folder with node 0, and would delete "
                "shards that the other reads: give a path on each node's own disk, such as data.cache=/tmp/shards"
            )


def _seen(folders: Mapping[str, Path], name: str, seconds: float) -> set[str]:
    """Return the keys of the folders in which this node sees a file within some seconds."""
    seen, end = set[str](), time.monotonic() + seconds
    while len(seen) < len(folders) and time.monotonic() < end:
        for key, path in folders.items():
            file = (path / name).absolute()
            # NFS may hide new files for a minute, but asks the server for changes of a folder that is opened.
            for folder in reversed(file.parents):
                with suppress(OSError):  # such as one that may be entered but not read
                    os.close(os.open(folder, os.O_RDONLY))
            with suppress(OSError):
                if file.exists():
                    seen.add(key)
        time.sleep(0.2)
    return seen
