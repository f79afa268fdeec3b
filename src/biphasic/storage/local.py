"""Files in folders of this machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from biphasic.storage.place import UNFINISHED, StoredFile


class LocalStore:
    """A folder of this machine (or one that many machines share)."""

    def __init__(self, root: str):
        self.root = root
        self._folder = Path(root)

    def list(self, below: str = "") -> dict[str, StoredFile]:
        """See `Store`."""
        found = {}
        for folder, folders, files in os.walk(self._folder / below):
            folders[:] = sorted(name for name in folders if not name.startswith(UNFINISHED))
            for name in sorted(files):
                path = Path(folder) / name
                if not name.startswith(UNFINISHED) and path.is_file():
                    found[path.relative_to(self._folder).as_posix()] = _local(path)
        return dict(sorted(found.items()))

    def stat(self, name: str) -> StoredFile | None:
        """See `Store`."""
        path = self._folder / name
        return _local(path) if path.is_file() else None

    def read(self, name: str) -> bytes:
        """See `Store`."""
        return (self._folder / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        """See `Store`."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=UNFINISHED, delete=False) as file:
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                # A temporary file is its owner's alone; this one is as open as any other that is made here.
                os.chmod(file.name, 0o666 & ~_umask())
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise

    def take(self, file: Path, name: str) -> None:
        """See `Store`."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with file.open("rb") as content:
            os.fsync(content.fileno())
        os.replace(file, path)

    def put(self, file: Path, name: str) -> None:
        """See `Store`. A file that is here already is left as it is."""
        if (self._folder / name).resolve() != file.resolve():
            _copied(file, self._folder / name)

    def fetch(self, name: str, file: Path) -> None:
        """See `Store`."""
        _copied(self._folder / name, file)

    def remove(self, names: Iterable[str]) -> None:
        """See `Store`. Folders that this empties go too."""
        for name in names:
            path = self._folder / name
            path.unlink(missing_ok=True)
            for folder in path.parents:
                if folder == self._folder or not folder.is_dir() or any(folder.iterdir()):
                    break
                folder.rmdir()

    def scratch(self) -> Path:
        """See `Store`. It lies in the folder itself, so that `take` is a rename."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=self._folder))

    def clear_unfinished(self) -> None:
        """Remove what killed processes left behind anywhere below."""
        for path in sorted(self._folder.rglob(f"{UNFINISHED}*")):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


@contextmanager
def unfinished(file: Path) -> Iterator[Path]:
    """A name beside `file` to write to; it becomes `file` when all went well, and goes otherwise."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{UNFINISHED}{file.name}")
    try:
        yield partial
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def _copied(source: Path, target: Path) -> None:
    with unfinished(target) as partial:
        shutil.copyfile(source, partial)
        with partial.open("rb") as content:
            os.fsync(content.fileno())


def hash_of(file: Path) -> str:
    """A file's xxh64, hexadecimal."""
    import xxhash

    found = xxhash.xxh64()
    with file.open("rb") as content:
        while block := content.read(1 << 24):
            found.update(block)
    return found.hexdigest()


def _local(path: Path) -> StoredFile:
    found = path.stat()
    return StoredFile(found.st_size, f"mtime:{found.st_mtime_ns}")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
