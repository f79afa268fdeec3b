"""Splits of datasets as tables of rows: from the hub, from folders laid out as datasets, from files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from biphasic.config.errors import UserError
from biphasic.config.tasks import DatasetConfig
from biphasic.data.sources import hub_commit
from biphasic.storage import short

_BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv"}
_PACKED = (".gz", ".zst")
_BATCH = 1000
_ANY = "train"
"""The library reserves some names of splits; those of a YAML's `files` are free."""


Row = dict[str, Any]


class BadRow(Exception):
    """A row that can't be used: the kind of fault, for counting, and where it lies."""


class Table:
    """One split: its columns, its rows in order, and where they came from.

    Args:
        rows: of the `datasets` library.
        where: for messages.
        commit: of the hub; None for what lies on this machine.
    """

    def __init__(self, rows: Any, where: str, commit: str | None):
        self.rows, self.where, self.commit = rows, where, commit

    def __len__(self) -> int:
        return len(self.rows)

    def require(self, columns: list[str]) -> None:
        """Refuse a table without these columns.

        Raises:
            UserError: naming the first one that lacks, and those that there are.
        """
        there = self.rows.column_names
        for column in columns:
            if column not in there:
                raise UserError(f"{self.where}: has no column {column!r} (it has: {', '.join(there)})")

    def batches(self, columns: list[str]) -> Iterator[dict[str, list[Any]]]:
        """Some of the columns, a thousand rows at a time, with a bar where it takes long.

        Raises:
            UserError: a column isn't there.
        """
        from tqdm import tqdm

        self.require(columns)
        rows = self.rows.select_columns(columns)
        with tqdm(total=len(rows), desc=self.where, unit="row", delay=5, disable=None) as bar:
            for batch in rows.iter(_BATCH):
                yield batch
                bar.update(len(batch[columns[0]]))

    def label_names(self, column: str) -> list[str] | None:
        """What the numbers in `column` (or in its lists) mean, if the dataset says so."""
        self.require([column])
        feature = self.rows.features[column]
        return getattr(getattr(feature, "feature", feature), "names", None)

    def halves(self, first: float, seed: int) -> tuple[Table, Table]:
        """Part of the rows and the rest, drawn by the `datasets` library's own split, as the paper's evaluation does."""
        if len(self) < 2:
            raise UserError(f"{self.where}: {len(self)} rows are too few to take a validation split from")
        split = self.rows.train_test_split(train_size=first, seed=seed)
        return tuple(Table(split[name], self.where, self.commit) for name in ("train", "test"))  # pyright: ignore


def open_table(config: DatasetConfig, split: str) -> Table:
    """One split of a dataset. What comes from the hub stays in the hub library's own cache.

    Raises:
        UserError: there is no such dataset, configuration, split or file, or it can't be read.
    """
    import datasets
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    where = ", ".join(filter(None, [config.path, config.name, split]))
    commit = None
    try:
        if config.path is None:
            assert config.files is not None
            files, builder = _local_files(config.files[split])
            where = ", ".join(config.files[split])
            more: dict[str, Any] = {"sep": "\t"} if _kind(files[0]) == ".tsv" else {}
            rows = datasets.load_dataset(builder, data_files={_ANY: files}, split=_ANY, **more)
        else:
            commit = None if Path(config.path).is_dir() else hub_commit(config.path, config.revision)
            given = None if config.files is None else {_ANY: config.files[split]}
            name = split if given is None else _ANY
            cache = _cache_of(Path(config.path)) if commit is None else None
            rows = datasets.load_dataset(
                config.path, config.name, revision=commit, data_files=given, split=name, cache_dir=cache
            )
    except (DatasetsError, HfHubHTTPError, HFValidationError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"{where}: can't be read ({short(_cause(error))})") from error
    return Table(rows, where, commit)


def _cache_of(folder: Path) -> str:
    """Where the library keeps what it makes of a folder.

    It knows a folder by its last name and its card alone, and so would give what another one of that name held, or what
    this one held before it was changed.
    """
    from datasets import config

    files = sorted(file for file in folder.rglob("*") if file.is_file())
    about = [(file.relative_to(folder).as_posix(), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    mark = hashlib.sha256(repr((str(folder.resolve()), about)).encode()).hexdigest()[:24]
    return str(Path(config.HF_DATASETS_CACHE) / "folders" / mark)


def _cause(error: BaseException) -> BaseException:
    """`datasets` wraps what went wrong in an error that says only that."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _local_files(patterns: list[str]) -> tuple[list[str], str]:
    import glob

    files = [file for pattern in patterns for file in sorted(glob.glob(os.path.expanduser(pattern), recursive=True))]
    if not files:
        raise UserError(f"{', '.join(patterns)}: there is no such file")
    kinds = {_BUILDERS.get(_kind(file)) for file in files}
    builder = kinds.pop()
    if kinds or builder is None:
        raise UserError(
            f"{', '.join(patterns)}: expected files of one kind: {', '.join(_BUILDERS)}, with .gz or .zst too"
        )
    return files, builder


def _kind(file: str) -> str:
    name = Path(file)
    return name.with_suffix("").suffix if name.suffix in _PACKED else name.suffix
