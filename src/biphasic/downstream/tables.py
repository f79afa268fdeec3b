"""Open a split of a dataset as a table of rows, from the hub, a dataset folder or files."""

from __future__ import annotations

import functools
import glob
import hashlib
import itertools
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from biphasic.config.tasks import DatasetConfig
from biphasic.conversion.sources import hub_commit
from biphasic.downstream.formats import COLUMN_FILES, column_rows, json_rows, open_text, table_rows
from biphasic.errors import UserError, first_line
from biphasic.grouping import groups_up_to
from biphasic.storage import glob_pattern, is_hidden, user_error
from biphasic.storage.hub import is_local_path

_BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "csv"}
_BUILDERS |= dict.fromkeys(COLUMN_FILES, "columns")
_UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, EOFError, zlib.error, pa.ArrowException)
"""Errors of the readers; EOFError and zlib's of archives that are incomplete or damaged."""
_BATCH_ROWS = 1000
_ONLY_SPLIT = "train"
"""Split name given to the `datasets` library, which reserves some names. A YAML's `files` may use any names."""

TableRow = dict[str, Any]


class InvalidRow(Exception):
    """A row that can't be used. Its arguments are the kind of fault (for counting) and the row's position."""


class UnusedRow(Exception):
    """A valid row that these splits don't use. Its first argument is the reason (for counting)."""


Rows = Iterable[TableRow | InvalidRow | UnusedRow]


def require_strings(name: str, *values: Any) -> None:
    """Raise `InvalidRow` if a value is not a string; `name` describes it, such as `text_column 'sentence'`."""
    for value in values:
        if not isinstance(value, str):
            raise InvalidRow(f"{name} {'is empty' if value is None else f'is not text but {type(value).__name__}'}")


@dataclass(frozen=True)
class Table:
    """One split of a dataset, with the columns that are used."""

    rows: Any
    """Dataset of the `datasets` library."""
    source: str
    columns: list[str]
    commit: str | None
    """Commit on the hub; None for local data."""
    is_drawn: bool = False
    """Whether the rows were drawn from the split, in another order than its own."""

    def __len__(self) -> int:
        return len(self.rows)

    def convert(self, make: Callable[..., Iterable[TableRow]]) -> Rows:
        """Yield the rows that `make` returns for each row's values of `columns`, or the exception that it raises.

        Errors that values of unexpected types cause in `make` become InvalidRows.
        """
        from tqdm import tqdm

        chosen = self.rows if _is_json(self.rows) else self.rows.select_columns(list(dict.fromkeys(self.columns)))
        batches = chosen.iter(_BATCH_ROWS)
        records = (row for batch in batches for row in zip(*(batch[name] for name in self.columns), strict=True))
        rows = tqdm(records, total=len(self), desc=self.source, unit="row", delay=5, disable=None)
        for number, values in enumerate(rows, start=1):
            try:
                yield from make(*values)
            except (InvalidRow, UnusedRow) as error:
                yield type(error)(error.args[0], self._place(number, values))
            except (TypeError, ValueError, LookupError, AttributeError) as error:
                problem = f"a value has an unexpected type ({type(error).__name__}: {first_line(error)})"
                yield InvalidRow(problem, self._place(number, values))

    def _place(self, number: int, values: tuple[Any, ...]) -> str:
        """Return where a row is found: by its number in one file, and otherwise by its content."""
        if not self.is_drawn and os.path.isfile(self.source):
            return f"{self.source}, row {number}"
        content = json.dumps(dict(zip(self.columns, values, strict=True)), ensure_ascii=False, default=str)
        return f"{self.source}, {'a row' if self.is_drawn else f'row {number}'}, {content:.100}"

    def label_names(self, column: str) -> list[str] | None:
        """Return the names of the label numbers in `column` (or in its lists), if the dataset has them."""
        feature = self.rows.features.get(column)
        return getattr(getattr(feature, "feature", feature), "names", None)

    def divide(self, first: float, seed: int) -> tuple[Table, Table]:
        """Divide the rows into the share `first` and the rest, with `datasets` as in the paper's evaluation.

        Raises a UserError if there are fewer than two rows.
        """
        if len(self) < 2:
            raise UserError(f"{self.source}: {len(self)} rows are too few to take a validation split from")
        split = self.rows.train_test_split(train_size=first, seed=seed)
        return tuple(replace(self, rows=split[part], is_drawn=True) for part in ("train", "test"))  # pyright: ignore


def open_table(config: DatasetConfig, split: str, columns: Sequence[str], keys: Mapping[str, str] | None = None) -> Table:
    """Open one split of a dataset. Data from the hub stays in the hub library's own cache.

    `keys` are the keys that name the columns, for messages. Raises a UserError if the dataset, configuration, split, file
    or a column does not exist or can't be read.
    """
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    files, commit = None if config.files is None else config.files[split], None
    source = ", ".join(filter(None, [config.path, config.name, split])) if config.path else ", ".join(files or [])
    try:
        if config.path is None:
            rows = _read_files(config, source, files or [], columns)
        else:
            if is_local_path(config.path) and not Path(config.path).is_dir():
                raise UserError(f"{source}: there is no such folder")
            commit = hub_commit(config.path, config.revision)
            options: dict[str, Any] = {"name": config.name, "revision": commit}
            if files is not None:
                split, options["data_files"] = _ONLY_SPLIT, {_ONLY_SPLIT: files}
            if commit is None:
                options["cache_dir"] = _cache_folder(Path(config.path))
            rows = _load(config.path, source, columns, split=split, **options)
    except (DatasetsError, HfHubHTTPError, HFValidationError, *_UNREADABLE) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # `datasets` wraps the error in one without details
            cause = cause.__cause__
        is_script = "Dataset scripts are no longer supported" in str(cause)
        advice = ": give `revision: refs/convert/parquet` and its `files` there, as for record in tasks.yaml"
        raise user_error(f"{source}: can't be read ({first_line(cause)}){advice * is_script}", error) from error
    names = list(_parsed(source, [], rows.with_format()[:_BATCH_ROWS])) if _is_json(rows) else rows.column_names
    if missing := [column for column in columns if column not in names]:
        has, key = ", ".join(names), (keys or {}).get(missing[0])
        advice = f"set {key}" if key else f"expected {', '.join(columns)}"
        raise UserError(f"{source}: has no column {missing[0]!r} (it has: {has}); {advice}")
    return Table(rows, source, list(columns), commit)


def _load(path: str, source: str, columns: Sequence[str], split: str, **options: Any) -> Any:
    import datasets
    from datasets.packaged_modules.json.json import Json

    with tempfile.TemporaryDirectory() as empty:  # a cache has the types that the library read before as declared ones
        builder = datasets.load_dataset_builder(path, **{**options, "cache_dir": empty})
    config: Any = builder.config
    by_split: dict[str, list[str]] = config.data_files or {}
    files = by_split.get(split, [])
    declared = {name: kind for name, kind in (builder.info.features or {}).items() if name in columns}
    # Of declared types only names of labels matter: every reader of a column takes numbers as text.
    named = {name: kind for name, kind in declared.items() if "ClassLabel(" in repr(kind)}
    is_json = bool(files) and isinstance(builder, Json) and config.field is None
    if is_json and (not named or {_BUILDERS.get(_suffix(file)) for file in files} == {"json"}):
        rows = _json_table(files, source, columns)
        if not named:
            return rows
        features = datasets.Features(declared)
        parts = ({name: part[name] for name in declared} for part in rows.iter(_BATCH_ROWS))
        return datasets.concatenate_datasets([datasets.Dataset.from_dict(part, features) for part in parts])
    if files and _is_plain_csv(config, files):
        local = files if options["revision"] is None else datasets.DownloadManager().download(files)
        read = functools.partial(table_rows, separator=config.sep, columns=None, used=columns)
        rows = _from_rows(local, read, source, columns)
        for name in named.keys() & set(rows.column_names):
            numbers = _label_numbers(rows[name], named[name].names)
            rows = rows.remove_columns(name).add_column(name, numbers, feature=named[name])
        return rows
    is_saved = bool(files) and Path(files[0]).with_name("state.json").is_file()  # by save_to_disk
    if files and options["revision"] is None and (is_saved or _suffix(files[0]) == ".parquet"):
        # The library casts all splits to the types of the first split's first file.
        _require_one_type([*next(iter(by_split.values()))[:1], *files], columns)
    return datasets.load_dataset(path, split=split, **options)


def _label_numbers(texts: Iterable[str | None], names: list[str]) -> list[int | None]:
    """Return the numbers of labels that are given as names or numbers; -1, which is no label, for another text."""
    known = {str(number): number for number in range(len(names))} | {name: number for number, name in enumerate(names)}
    return [None if text is None else known.get(text, known.get(text.removesuffix(".0"), -1)) for text in texts]


def _is_plain_csv(config: Any, files: list[str]) -> bool:
    """Return whether files are CSV or TSV, about which the dataset's card says no more than the separator."""
    from datasets.packaged_modules.csv.csv import CsvConfig

    if not isinstance(config, CsvConfig) or {_BUILDERS.get(_suffix(file)) for file in files} != {"csv"}:
        return False
    read_otherwise = vars(CsvConfig(config.name, config.version, config.data_dir, config.data_files, config.description))
    return len(config.sep) == 1 and vars(config) == {**read_otherwise, "sep": config.sep, "delimiter": config.delimiter}


def _require_one_type(files: list[str], columns: Sequence[str]) -> None:
    """Raise a UserError if the first file has a column with another type or other label names than a later one.

    The library casts columns to the types of the first file: a label's number would stand for another name, and 2 be true.
    """
    from datasets import Dataset, Features

    expected: dict[str, str] = {}
    for file in files:
        is_parquet = _suffix(file) == ".parquet"
        features = Features.from_arrow_schema(parquet.read_schema(file)) if is_parquet else Dataset.from_file(file).features
        for name in columns:
            kind = features.get(name, "missing")
            found = repr(dict(sorted(kind.items())) if isinstance(kind, dict) else kind).replace("LargeList(", "List(")
            found = re.sub(r"Value\('(large_)?string(_view)?'\)", "text", found)
            found = re.sub(r"Value\('(u?int\d+|float\d+|decimal\d+\([\d, ]+\))'\)", "number", found)
            if found != expected.setdefault(name, found) and "Value('null')" not in found:
                problem = f"column {name!r} is {found}, but in {files[0]} it is {expected[name]}"
                raise UserError(f"{file}: {problem}: expected the same in all files")


def _json_table(files: list[str], source: str, columns: Sequence[str]) -> Any:
    """Return a dataset of lines of JSON, which are parsed when they are used.

    The library's JSON reader infers types, and texts that look like dates would become dates.
    """
    import datasets

    parsed = [json_rows(file) for file in files] if _suffix(files[0]) == ".json" else [None]
    if any(rows is None for rows in parsed):
        for file in files:
            if file.endswith(".zst"):  # the library takes one that is cut short for a shorter file
                with open_text(file) as text:
                    for _ in text:
                        pass
        lines = _from_files("text", files)
    else:
        lines = datasets.Dataset.from_dict({"text": [json.dumps(row) for rows in parsed for row in rows or []]})
    return lines.with_transform(functools.partial(_parsed, source, columns))


def _from_files(kind: str, files: list[str]) -> Any:
    """Return the rows of `text` or `parquet` files as a dataset.

    `load_dataset(kind, …)` would report the use of the reader to a server, and wait where there is no network.
    """
    import datasets

    return getattr(datasets.Dataset, f"from_{kind}")(list(map(glob.escape, files)))


def _read_files(config: DatasetConfig, source: str, patterns: list[str], columns: Sequence[str]) -> Any:
    """Return the rows of local files as a dataset of the `datasets` library."""
    files, builder = _local_files(patterns)
    if builder in ("json", "parquet"):
        if config.columns is not None:
            raise UserError(f"{source}: columns has no effect on files of this kind")
        if builder == "json":
            return _json_table(files, source, columns)
        # The library's reader refuses a file without rows.
        if not (files := [file for file in files if parquet.read_metadata(file).num_rows]):
            raise UserError(f"{source}: has no rows")
        _require_one_type(files, columns)
        return _from_files("parquet", files)
    if builder == "csv":
        separator = "\t" if _suffix(files[0]) == ".tsv" else ","
        read = functools.partial(table_rows, separator=separator, columns=config.columns, used=columns)
    else:
        read = functools.partial(column_rows, names=config.columns, columns=columns)
    return _from_rows(files, read, source, columns)


def _from_rows(files: list[str], read: Callable[[str], Iterator[TableRow]], source: str, columns: Sequence[str]) -> Any:
    """Return the rows that `read` yields from each file as a dataset; a UserError if some files lack one of `columns`."""
    import datasets

    tables: list[pa.Table] = []
    for file in files:
        for group in groups_up_to(_BATCH_ROWS, read(file)):
            tables.append(pa.Table.from_pylist(group))
            expected, found = set(columns) & set(tables[0].column_names), set(columns) & set(tables[-1].column_names)
            if found != expected:
                name = min(found ^ expected)
                problem = f"has {'a' if name in found else 'no'} column {name!r}, unlike {files[0]}"
                raise UserError(f"{file}: {problem}: expected the same columns in all files")
    if not tables:
        raise UserError(f"{source}: has no rows")
    return datasets.Dataset(pa.concat_tables(tables, promote_options="default"))


def _is_json(rows: Any) -> bool:
    """Return whether the rows are lines of JSON, which `_parsed` converts when they are used."""
    return rows.format["type"] == "custom"


def _parsed(source: str, columns: Sequence[str], lines: dict[str, list[str]]) -> dict[str, list[Any]]:
    """Return the values in lines of JSON by column; `columns` are returned even if no line has them."""
    rows: list[TableRow] = []
    for line in filter(str.strip, lines["text"]):
        try:
            row = json.loads(line.removeprefix("\ufeff"))  # a byte order mark
            if "\\ud" in line.lower():
                # JSON can contain half of a surrogate pair, which UTF-8 can't encode.
                row = json.loads(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace"))
        except ValueError as error:
            row = error
        if not isinstance(row, dict):
            problem = row if isinstance(row, ValueError) else "not an object"
            raise UserError(f"{source}: can't be read: expected a JSON object in each line ({problem}): {line[:60]}")
        rows.append(row)
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys([*columns, *itertools.chain(*rows)])}


def _cache_folder(folder: Path) -> str:
    """Return the `datasets` library's cache folder for a dataset folder in its current state.

    The library identifies a folder only by its last name and its card. From its default cache, it would read another
    folder of the same name, or earlier content of this folder.
    """
    from datasets import config

    files = sorted(file for file in folder.rglob("*") if file.is_file())
    state = [(file.relative_to(folder).as_posix(), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(repr((str(folder.resolve()), state)).encode()).hexdigest()[:24]
    return str(Path(config.HF_DATASETS_CACHE) / "folders" / digest)


def _local_files(patterns: list[str]) -> tuple[list[str], str]:
    by_place: dict[str, str] = {}
    for pattern in map(os.path.expanduser, patterns):
        for file in sorted(glob.glob(glob_pattern(pattern), recursive=True)):
            if not is_hidden(file, pattern):
                by_place.setdefault(os.path.realpath(file), file)
    if not (files := list(by_place.values())):
        raise UserError(f"{', '.join(patterns)}: there is no such file, or only hidden ones (. or _)")
    if empty := [file for file in files if not os.path.getsize(file)]:
        raise UserError(f"{empty[0]}: is empty (0 bytes)")
    builder, *others = {_BUILDERS.get(_suffix(file)) for file in files}
    if others or builder is None:
        expected = f"expected files of one kind: {', '.join(_BUILDERS)}; all but .parquet also with .gz or .zst"
        raise UserError(f"{', '.join(patterns)}: {expected}")
    return files, builder


def _suffix(file: str) -> str:
    name = next((file.removesuffix(packed) for packed in (".gz", ".zst") if file.endswith(packed)), file)
    return Path(file if name.endswith(".parquet") else name).suffix.lower()
