"""Whether a store keeps the promises that checkpoints, locks and shards rely on."""

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from biphasic.storage import Store, filesystem, join, open_store
from biphasic.storage.buckets import S3Store
from biphasic.storage.files import UnreachableError

_PARTS_BYTES = 9 << 20
"""More than the 8 MiB from which boto3 uploads a file in parts."""


def broken_promises(root: str, name: str) -> list[str]:
    """Write, overwrite, list, upload, read in part and delete files in a store, and say what it did wrong and what is lost.

    The files `name` and `name`-parts (9 MiB), which nothing else may write, are made and deleted in `root`, a folder or a
    bucket's URL. Returns a line for each broken promise of docs/checkpoints.md. Raises an OSError if a request failed, and
    a UserError if the URL can't be used.
    """
    place, parts = open_store(root), f"{name}-parts"
    try:
        return _broken(place, name, parts)
    finally:
        with suppress(OSError):
            place.remove([name, parts])


def _broken(place: Store, name: str, parts: str) -> list[str]:
    first, second, large = os.urandom(1 << 10), os.urandom(1 << 10), os.urandom(_PARTS_BYTES)
    broken = []
    place.write(name, first)
    before, listed = place.stat(name), place.list().get(name)
    if listed is None or before is None or listed.bytes != len(first):
        lost = "two starts at once could both train, and checkpoints be missed"
        broken.append(f"a file isn't listed once it is written: {lost}")
    place.write(name, second)
    if place.read(name) != second:
        broken.append("a file that was overwritten is read as it was: heartbeats of a lock could be missed")
    contents, is_torn = (first, large[: 1 << 20]), False
    with ThreadPoolExecutor(1) as pool:
        writes = pool.submit(lambda: [place.write(name, content) for content in contents * 3])
        while not writes.done():
            with suppress(UnreachableError):
                is_torn |= place.read(name) not in (second, *contents)
    writes.result()
    if is_torn:
        broken.append("a reader sees a part of a file that is being written: it could take a held lock for damaged")
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder, "file")).write_bytes(large)
        place.upload(file, parts)
        place.download(parts, copy := Path(folder, "copy"))
        if copy.read_bytes() != large:
            broken.append("a file of 9 MiB is read otherwise than it was uploaded: checkpoints would be damaged")
    system, path = filesystem(join(place.root, parts))
    with system.open_input_file(path) as file:
        if file.read_at(1000, _PARTS_BYTES // 2) != large[_PARTS_BYTES // 2 :][:1000]:
            broken.append("a part of a file is read wrongly: Parquet files there can't be converted")
    if isinstance(place, S3Store):
        if place.stat(name) == before:
            broken.append("a file that was overwritten keeps its ETag: `biphasic watch` would not see the change")
        try:
            pages = len(place.list(keys_per_page=1))
        except OSError:
            pages = 0
        if pages < 2:
            broken.append("listings that have a second page fail: folders of over 1,000 files can't be read")
    place.remove([name, parts])
    place.remove([name])
    if place.stat(name) is not None or {name, parts} & place.list().keys():
        broken.append("a file that was deleted is still there: locks and outdated checkpoints would stay")
    return broken
