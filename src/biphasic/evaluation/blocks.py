"""Embed the documents of a corpus in blocks, which the ranks share and which are cached on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from composer.utils import dist
from tqdm import tqdm

from biphasic.checkpointing.fetch import local_checkpoint
from biphasic.evaluation.embedder import Embedder
from biphasic.evaluation.embedding_cache import corpus_folder, stored
from biphasic.ranks import is_first_rank
from biphasic.storage import is_remote

BLOCK, SMALL_BLOCK = 4096, 256
"""Number of documents in a file of embeddings. An interrupted job loses at most one file per rank."""
_SMALL_CORPUS = 1 << 16
"""A corpus with fewer documents is split into small blocks, so that every rank has some."""
Value = TypeVar("Value")


def embed_blocks(
    embedder: Embedder,
    texts: Callable[[int, int], Sequence[str]],
    count: int,
    key: Mapping[str, Any],
    title: str,
    cache: Path | None = None,
    limit: int = 0,
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the first document's position and the embeddings, fp32 [documents, width], of this rank's blocks.

    The size of a block doesn't depend on the number of ranks, so that the embeddings don't either. `texts` returns the
    texts from a first to an end position, of `count`, with their prompt; `key` is what they depend on, as JSON types. In
    the folder `cache`, if there is one, all embeddings have at most `limit` bytes.

    Raises:
        UserError: an embedding is not finite, or the cache's folder can't be written to.
    """
    rank, world = dist.get_global_rank(), dist.get_world_size()
    block = SMALL_BLOCK if count < _SMALL_CORPUS else BLOCK
    folder = None
    if cache is not None:
        key = {"revision": embedder.revision, "settings": dict(embedder.settings), **key, "block": block}
        folder = corpus_folder(cache, limit, key, 4 * count * embedder.width)
    with progress_bar(count, title) as bar:

        def embed(first: int, end: int) -> np.ndarray:
            return embedder.embed(texts(first, end), lambda done: bar.update(done * world))

        finished = 0
        for number in range(rank, -(-count // block), world):
            first, end = number * block, min((number + 1) * block, count)
            file = None if folder is None else folder / f"{number:06d}.npy"
            yield first, stored(file, (end - first, embedder.width), partial(embed, first, end))
            finished += end - first
            bar.update(finished * world - bar.n)  # stored embeddings, which `embed` doesn't count


def local_model(path: str, cache: Path) -> str:
    """Return the local path of a model for `load_encoder`; local rank 0 of each node downloads a bucket's checkpoint."""
    folder = cache / "models"
    if is_remote(path):
        folder /= hashlib.sha256(path.encode()).hexdigest()[:16]  # different runs have equal checkpoint names
    local = local_checkpoint(path, folder) if dist.get_local_rank() == 0 else ""
    dist.barrier()
    return from_first_rank(lambda: local)


def from_first_rank(make: Callable[[], Value]) -> Value:
    """Call `make` on rank 0 and return its result on all ranks."""
    values: list[Any] = [make() if is_first_rank() else None]
    dist.broadcast_object_list(values)
    return values[0]


def progress_bar(total: int, title: str) -> Any:
    """Return a bar of texts, which rank 0 shows after three seconds."""
    return tqdm(total=total, desc=title, unit="text", delay=3, disable=not is_first_rank())
