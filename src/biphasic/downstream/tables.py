"""Open a split of a dataset as a table of rows, from the hub, a dataset folder or files."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from biphasic.config.tasks import DatasetConfig
from biphasic.conversion.sources import hub_commit
from biphasic.errors import UserError
from biphasic.storage import first_line
from biphasic.storage.hub import is_local_path

_BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv"}
_COMPRESSED = (".gz", ".zst")
_BATCH_ROWS = 1000
_ONLY_SPLIT = "train"
"""Split name given to the `datasets` library, which reserves some names. A YAML's `files` may use any names."""

TableRow = dict[str, Any]


class InvalidRow(Exception):
    """A row that can't be used. Its arguments are the kind of fault (for counting) and the row's position."""


class Table:
    """One split of a dataset: its columns, and its rows in order.

    Args:
        rows: dataset of the `datasets` library.
        source: name of the source in messages.
        commit: commit on the hub; None for local data.
    """

    def __init__(self, rows: Any, source: str, commit: str | None):
        self.rows, self.source, self.commit = rows, source, commit

    def __len__(self) -> int:
        return len(self.rows)

    def require(self, columns: list[str]) -> None:
        """Refuse a table without these columns.

        Raises:
            UserError: names the first missing column and the existing ones.
        """
        existing = self.rows.column_names
        for column in columns:
            if column not in existing:
                raise UserError(f"{self.source}: has no column {column!r} (it has: {', '.join(existing)})")

    def batches(self, columns: list[str]) -> Iterator[dict[str, list[Any]]]:
        """Yield these columns, a thousand rows at a time. Shows a progress bar if it takes long.

        Raises:
            UserError: a column is missing.
        """
        from tqdm import tqdm

        self.require(columns)
        rows = self.rows.select_columns(columns)
        with tqdm(total=len(rows), desc=self.source, unit="row", delay=5, disable=None) as bar:
            for batch in rows.iter(_BATCH_ROWS):
                yield batch
                bar.update(len(batch[columns[0]]))

    def label_names(self, column: str) -> list[str] | None:
        """Return the names of the label numbers in `column` (or in its lists), if the dataset has them."""
        self.require([column])
        feature = self.rows.features[column]
        return getattr(getattr(feature, "feature", feature), "names", None)

    def divide(self, first: float, seed: int) -> tuple[Table, Table]:
        """Divide the rows into a share and the rest with the `datasets` library, as the paper's evaluation does."""
        if len(self) < 2:
            raise UserError(f"{self.source}: {len(self)} rows are too few to take a validation split from")
        split = self.rows.train_test_split(train_size=first, seed=seed)
        return tuple(Table(split[name], self.source, self.commit) for name in ("train", "test"))  # pyright: ignore


def open_table(config: DatasetConfig, split: str) -> Table:
    """Open one split of a dataset. Data from the hub stays in the hub library's own cache.

    Raises:
        UserError: the dataset, configuration, split or file does not exist or can't be read.
    """
    import datasets
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    source = ", ".join(filter(None, [config.path, config.name, split]))
    commit = None
    try:
        if config.path is None:
            assert config.files is not None
            source = ", ".join(config.files[split])
            files, builder = _local_files(config.files[split])
            # pandas would read the texts `null` and `NA` as no text.
            options: dict[str, Any] = {"keep_default_na": False, "na_values": [""]} if builder == "csv" else {}
            options |= {"sep": "\t"} if _suffix(files[0]) == ".tsv" else {}
            rows = datasets.load_dataset(builder, data_files={_ONLY_SPLIT: files}, split=_ONLY_SPLIT, **options)
        else:
            if is_local_path(config.path) and not Path(config.path).is_dir():
                raise UserError(f"{source}: there is no such folder")
            commit = None if Path(config.path).is_dir() else hub_commit(config.path, config.revision)
            files = None if config.files is None else {_ONLY_SPLIT: config.files[split]}
            name = split if files is None else _ONLY_SPLIT
            cache = _cache_folder(Path(config.path)) if commit is None else None
            rows = datasets.load_dataset(
                config.path, config.name, revision=commit, data_files=files, split=name, cache_dir=cache
            )
    except (DatasetsError, HfHubHTTPError, HFValidationError, OSError, ValueError, KeyError, RuntimeError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # `datasets` wraps the error in one without details
            cause = cause.__cause__
        raise UserError(f"{source}: can't be read ({first_line(cause)})") from error
    return Table(rows, source, commit)


def _cache_folder(folder: Path) -> str:
    """Return the `datasets` library's cache folder for a dataset folder in its current state.

    The library identifies a folder only by its last name and its card. In its default cache it would read another
    folder of the same name, or this folder's earlier content.
    """
    from datasets import config

    files = sorted(file for file in folder.rglob("*") if file.is_file())
    state = [(file.relative_to(folder).as_posix(), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(repr((str(folder.resolve()), state)).encode()).hexdigest()[:24]
    return str(Path(config.HF_DATASETS_CACHE) / "folders" / digest)


def _local_files(patterns: list[str]) -> tuple[list[str], str]:
    files = [file for pattern in patterns for file in sorted(glob.glob(os.path.expanduser(pattern), recursive=True))]
    if not files:
        raise UserError(f"{', '.join(patterns)}: there is no such file")
    builders = {_BUILDERS.get(_suffix(file)) for file in files}
    builder = builders.pop()
    if builders or builder is None:
        expected = f"expected files of one kind: {', '.join(_BUILDERS)}, with .gz or .zst too"
        raise UserError(f"{', '.join(patterns)}: {expected}")
    return files, builder


def _suffix(file: str) -> str:
    path = Path(file)
    return path.with_suffix("").suffix if path.suffix in _COMPRESSED else path.suffix
