"""Find and inspect the files that a conversion reads, from folders, buckets or a hub dataset."""

from __future__ import annotations

import glob
import os
import posixpath
import re
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NoReturn

from biphasic.config.convert import FilesSource, HubSource
from biphasic.conversion.reading import (
    COMPRESSIONS,
    TEXT_KINDS,
    ReadOptions,
    SourceFile,
    missing_column_message,
    start_fault,
)
from biphasic.errors import UserError
from biphasic.storage import UNFINISHED_PREFIX, filesystem, first_line, is_remote, open_store
from biphasic.storage.hub import hub_errors, is_local_path

_LINE_SUFFIXES = tuple(f".{kind}" for kind in ("jsonl", "csv", "tsv", *TEXT_KINDS))
_SUFFIXES = (".parquet", *(suffix + packed for suffix in _LINE_SUFFIXES for packed in ("", *COMPRESSIONS)))
_THREADS = 16
_NAMED_SUFFIXES = 8


@dataclass(frozen=True)
class Sources:
    """The files that a conversion reads, sorted by path; the commit of a hub dataset; and the number of files of its
    folders and patterns that are not read, by suffix."""

    files: list[SourceFile]
    commit: str | None = None
    unread: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FileLayout:
    """Number of rows and text bytes of each row group of a Parquet file; empty for other files.

    `fault` is the reason why the file can't be read at all.
    """

    rows: tuple[int, ...] = ()
    text_bytes: tuple[int, ...] = ()
    fault: str | None = None


def find_files(source: FilesSource) -> Sources:
    """Return the files that a source names, each once.

    Raises:
        UserError: a path, folder or pattern matches no file of a supported kind, or can't be read.
    """
    suffixes = f".parquet, {', '.join(_LINE_SUFFIXES)}; all but .parquet also with {' or '.join(COMPRESSIONS)}"
    files: dict[str, SourceFile] = {}
    unread = set[str]()
    for path in source.paths:
        try:
            matches = _bucket_files(path) if is_remote(path) else _local_files(path)
        except OSError as error:
            raise UserError(f"source {path}: can't be read ({first_line(error)})") from None
        hidden = {file.path for file in matches if Path(file.path).name.startswith(".")}
        unread |= hidden
        matches = [file for file in matches if file.path not in hidden]
        if len(matches) == 1 and matches[0].path == path.rstrip("/") and not path.endswith(_SUFFIXES):
            raise UserError(f"source {path}: expected a file that ends in {suffixes}")
        usable = {file.path: file for file in matches if file.path.endswith(_SUFFIXES)}
        if not usable:
            message = f"there is no such file, and no folder or pattern with files in it ({suffixes})"
            raise UserError(f"source {path}: {message}")
        files |= usable
        unread |= {file.path for file in matches if file.path not in usable}
    return Sources([file for _, file in sorted(files.items())], unread=dict(Counter(map(_suffix, sorted(unread)))))


def _suffix(path: str) -> str:
    """Return what a file is counted by: its suffix with a compression's, `no suffix`, or `hidden`."""
    name = PurePosixPath(path)
    inner = PurePosixPath(name.stem).suffix if name.suffix in COMPRESSIONS else ""
    return "hidden" if name.name.startswith(".") else inner + name.suffix or "no suffix"


def describe_unread(unread: Mapping[str, int]) -> str:
    """Return the number of files that are not read and their most frequent suffixes: `8 files (5 .html, 3 .pdf)`."""
    names = [f"{count:,} {suffix}" for suffix, count in Counter(unread).most_common()]
    named = [*names[:_NAMED_SUFFIXES], *(["others"] if names[_NAMED_SUFFIXES:] else [])]
    return f"{sum(unread.values()):,} file{'s' * (sum(unread.values()) > 1)} ({', '.join(named)})"


def _local_files(path: str) -> list[SourceFile]:
    if _is_pattern(path):
        _require_readable_folders(path)
        names = sorted(glob.glob(path, recursive=True))
    elif Path(path).is_dir():
        return _files_below(path.rstrip("/"))
    else:
        names = [path.rstrip("/")]
    files = []
    for name in names:
        if (file := open_store(posixpath.dirname(name) or ".").stat(posixpath.basename(name))) is not None:
            files.append(SourceFile(name, file.bytes, file.version))
    return files


def _require_readable_folders(pattern: str) -> None:
    """Check each folder whose names a pattern is compared with: `glob` leaves out what it can't read.

    Raises:
        UserError: a folder can't be read.
    """
    parts = pattern.split("/")
    for level in range(1, len(parts)):
        for folder in glob.glob("/".join([*parts[:level], ""]), recursive=True) if _is_pattern(parts[level]) else []:
            try:
                os.scandir(folder).close()
            except OSError as error:
                _unreadable(error)


def _unreadable(error: OSError) -> NoReturn:
    raise UserError(f"source {error.filename}: can't be read ({first_line(error)})") from None


def _files_below(folder: str) -> list[SourceFile]:
    """Return the files of a folder and its subfolders, each folder once. Links are followed, which may form cycles.

    Raises:
        UserError: a folder can't be read.
    """
    files, visited = [], set[str]()
    for place, folders, names in os.walk(folder, onerror=_unreadable, followlinks=True):
        if (real := os.path.realpath(place)) in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith(UNFINISHED_PREFIX))
        store = open_store(place)
        for name in names:
            if (file := store.stat(name)) is not None:
                files.append(SourceFile(posixpath.join(place, name), file.bytes, file.version))
    return files


def _bucket_files(path: str) -> list[SourceFile]:
    folder, pattern = path.rstrip("/"), re.compile(".*")
    if _is_pattern(path):
        folder, pattern = re.split(r"[*?\[]", path)[0].rpartition("/")[0], re.compile(_regex(path))
    files = {posixpath.join(folder, name): file for name, file in open_store(folder).list().items()}
    if not files and not _is_pattern(path):
        parent, _, name = folder.rpartition("/")
        file = None if parent.endswith("/") else open_store(parent).stat(name)
        files = {} if file is None else {folder: file}
    return [SourceFile(name, file.bytes, file.version) for name, file in files.items() if pattern.fullmatch(name)]


def _is_pattern(path: str) -> bool:
    return any(character in path for character in "*?[")


def _regex(pattern: str) -> str:
    """Return a glob pattern as a regular expression. `**/` matches any folders; `*` and `?` match within one folder."""
    parts = re.split(r"(\*\*/|\*|\?|\[[^\]]*\])", pattern)
    wildcards = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
    return "".join(wildcards.get(part) or (_set(part) if part.startswith("[") else re.escape(part)) for part in parts)


def _set(part: str) -> str:
    """Return a glob pattern's set of characters as a regular expression: `[!a-c]` gives `[^/a-c]`."""
    characters = part[1:-1].replace("\\", r"\\").replace("^", r"\^")
    return f"[^/{characters[1:]}]" if characters.startswith("!") else f"[{characters}]"


def find_hub_files(source: HubSource) -> Sources:
    """Return the files of a hub dataset's configuration and split, at one commit (None if it is a local folder).

    Raises:
        UserError: the hub can't be reached, the dataset, configuration or split does not exist, or a file is of a kind
            that can't be read.
    """
    import datasets
    from datasets.exceptions import DatasetsError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.hf_api import RepoFile

    name = source.path if source.name is None else f"{source.path}, {source.name}"
    try:
        if is_local_path(source.path) and not Path(source.path).is_dir():
            raise UserError(f"source {name}: there is no such folder")
        commit = None if Path(source.path).is_dir() else hub_commit(source.path, source.revision)
        builder = datasets.load_dataset_builder(source.path, source.name, revision=commit)
        splits = dict(builder.config.data_files or {})
        if source.split not in splits:
            existing = ", ".join(str(split) for split in splits) or "none"
            raise UserError(f"source {name}: has no split {source.split!r} (it has: {existing}); set source.split")
        paths = sorted({str(path) for path in splits[source.split]})
        if others := [path for path in paths if not path.endswith(_SUFFIXES)]:
            raise UserError(f"source {name}: holds files of a kind that can't be read here (e.g. {others[0]})")
        if commit is None:
            return find_files(FilesSource(kind="files", paths=paths))
        prefix = f"hf://datasets/{source.path}@{commit}/"
        inside = [path.removeprefix(prefix) for path in paths]
        with hub_errors():
            infos = HfApi().get_paths_info(source.path, inside, revision=commit, repo_type="dataset")
        sizes = {info.path: info for info in infos if isinstance(info, RepoFile)}
        files = [SourceFile(prefix + path, sizes[path].size, sizes[path].blob_id) for path in inside]
    except (DatasetsError, HfHubHTTPError, OSError, ValueError, KeyError) as error:
        raise UserError(f"source {name}: can't be read from the hub ({first_line(error)})") from None
    return Sources(files, commit)


def hub_commit(path: str, revision: str | None) -> str:
    """Return the commit of a hub dataset's revision, by default the newest commit.

    Raises:
        OSError: the hub can't be reached, or the dataset or revision does not exist.
        ValueError: `path` is not a valid dataset name.
    """
    from huggingface_hub import HfApi

    with hub_errors():
        commit = HfApi().dataset_info(path, revision=revision).sha
    assert commit is not None
    return commit


def inspect_files(files: list[SourceFile], options: ReadOptions, progress: bool = True) -> list[FileLayout]:
    """Inspect files before the work begins, and return their layouts.

    Empty files, incomplete Parquet files and files whose start can't be read get a `fault`.

    Raises:
        UserError: names the first file that lacks a column, or whose text column does not hold text.
    """
    from tqdm import tqdm

    with ThreadPoolExecutor(_THREADS) as pool:
        layouts = pool.map(lambda file: _inspect(file, options), files)
        return list(
            tqdm(layouts, "inspecting files", len(files), unit="file", disable=not progress or len(files) < 100)
        )


def _inspect(file: SourceFile, options: ReadOptions) -> FileLayout:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if file.bytes == 0:
        return FileLayout(fault="is empty (0 bytes)")
    if not file.path.endswith(".parquet"):
        return FileLayout(fault=start_fault(file, options))
    try:
        system, name = filesystem(file.path)
        with system.open_input_file(name) as handle:
            reader = pq.ParquetFile(handle)
            schema, metadata = reader.schema_arrow, reader.metadata
    except (OSError, pa.ArrowException) as error:
        return FileLayout(fault=f"is no complete Parquet file ({first_line(error)})")
    for column in options.columns:
        if column not in schema.names:
            raise UserError(f"source {file.path}: {missing_column_message(column, schema.names, file.path, options)}")
    kind = schema.field(options.text_column).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise UserError(f"source {file.path}: column {options.text_column!r} holds {kind}, not text; set text_column")
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    text = paths.index(options.text_column)
    return FileLayout(
        rows=tuple(group.num_rows for group in groups),
        text_bytes=tuple(group.column(text).total_uncompressed_size for group in groups),
    )
