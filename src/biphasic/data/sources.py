"""Which files a conversion reads: in folders, in buckets, of a dataset of the hub."""

from __future__ import annotations

import glob
import posixpath
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from biphasic.config.conversion import FilesSource, HubSource
from biphasic.config.errors import UserError
from biphasic.data.reading import Columns, Piece, missing_column
from biphasic.storage import filesystem, is_remote, short, store

_KINDS = (".parquet", *(kind + packed for kind in (".jsonl", ".txt") for packed in ("", ".gz", ".zst")))
_AT_ONCE = 16


@dataclass(frozen=True)
class SourceFile:
    """A file to read: path, size in bytes, and what changes with its content (an ETag, or the time of its last change)."""

    path: str
    bytes: int
    version: str

    def piece(self, row_groups: tuple[int, int] | None = None) -> Piece:
        """The whole file, or some row groups of it, for `read_documents`."""
        return Piece(self.path, self.bytes, self.version, row_groups)


@dataclass(frozen=True)
class Looked:
    """What a look at a file's end told: rows and text bytes of each row group of a Parquet file; else nothing.

    `fault` says why the file can't be read at all.
    """

    rows: tuple[int, ...] = ()
    text_bytes: tuple[int, ...] = ()
    fault: str | None = None


def find_files(source: FilesSource) -> list[SourceFile]:
    """The files that a source names, each once, sorted by path.

    Raises:
        UserError: a path, folder or pattern gives no file, or one of a kind that can't be read.
    """
    found: dict[str, SourceFile] = {}
    for path in source.paths:
        try:
            files = _in_bucket(path) if is_remote(path) else _in_folder(path)
        except OSError as error:
            raise UserError(f"source {path}: can't be read ({short(error)})") from None
        files = [file for file in files if not Path(file.path).name.startswith(".")]
        if len(files) == 1 and files[0].path == path.rstrip("/") and not path.endswith(_KINDS):
            raise UserError(f"source {path}: expected a file that ends in {', '.join(_KINDS)}")
        usable = [file for file in files if file.path.endswith(_KINDS)]
        if not usable:
            kinds = ", ".join(_KINDS)
            raise UserError(
                f"source {path}: there is no such file, and no folder or pattern with files in it ({kinds})"
            )
        found.update({file.path: file for file in usable})
    return [file for _, file in sorted(found.items())]


def _in_folder(path: str) -> list[SourceFile]:
    names = sorted(glob.glob(path, recursive=True)) if _is_pattern(path) else [path.rstrip("/")]
    found = []
    for name in names:
        inside = store(name).list() if Path(name).is_dir() and name == path.rstrip("/") else {}
        found += [SourceFile(posixpath.join(name, below), file.bytes, file.version) for below, file in inside.items()]
        if (file := store(posixpath.dirname(name) or ".").stat(posixpath.basename(name))) is not None:
            found.append(SourceFile(name, file.bytes, file.version))
    return found


def _in_bucket(path: str) -> list[SourceFile]:
    folder, pattern = path.rstrip("/"), re.compile(".*")
    if _is_pattern(path):
        folder, pattern = re.split(r"[*?\[]", path)[0].rpartition("/")[0], re.compile(_regex(path))
    found = {posixpath.join(folder, name): file for name, file in store(folder).list().items()}
    if not found and not _is_pattern(path):
        above, _, name = folder.rpartition("/")
        file = None if above.endswith("/") else store(above).stat(name)
        found = {} if file is None else {folder: file}
    return [SourceFile(name, file.bytes, file.version) for name, file in found.items() if pattern.fullmatch(name)]


def _is_pattern(path: str) -> bool:
    return any(sign in path for sign in "*?[")


def _regex(pattern: str) -> str:
    """A glob pattern as a regular expression: `**/` is any folders, `*` and `?` stay within one."""
    parts = re.split(r"(\*\*/|\*|\?|\[[^\]]*\])", pattern)
    signs = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
    return "".join(signs.get(part) or (part if part.startswith("[") else re.escape(part)) for part in parts)


def find_hub_files(source: HubSource) -> tuple[list[SourceFile], str | None]:
    """The files of a hub dataset's configuration and split, at one commit.

    Returns:
        The files, as the dataset's card orders them by path, and the commit; None for a folder in place of a hub id.

    Raises:
        UserError: the hub can't be reached, there is no such dataset, configuration or split, or its files are of a
            kind that can't be read.
    """
    import datasets
    from datasets.exceptions import DatasetsError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.hf_api import RepoFile

    name = source.path if source.name is None else f"{source.path}, {source.name}"
    try:
        commit = None if Path(source.path).is_dir() else hub_commit(source.path, source.revision)
        builder = datasets.load_dataset_builder(source.path, source.name, revision=commit)
        lists = dict(builder.config.data_files or {})
        if source.split not in lists:
            there = ", ".join(str(split) for split in lists) or "none"
            raise UserError(f"source {name}: has no split {source.split!r} (it has: {there}); set source.split")
        paths = sorted({str(path) for path in lists[source.split]})
        if others := [path for path in paths if not path.endswith(_KINDS)]:
            raise UserError(f"source {name}: holds files of a kind that can't be read here (e.g. {others[0]})")
        if commit is None:
            return find_files(FilesSource(kind="files", paths=paths)), None
        prefix = f"hf://datasets/{source.path}@{commit}/"
        inside = [path.removeprefix(prefix) for path in paths]
        infos = HfApi().get_paths_info(source.path, inside, revision=commit, repo_type="dataset")
        sizes = {info.path: info for info in infos if isinstance(info, RepoFile)}
        files = [SourceFile(prefix + path, sizes[path].size, sizes[path].blob_id) for path in inside]
    except (DatasetsError, HfHubHTTPError, OSError, ValueError, KeyError) as error:
        raise UserError(f"source {name}: can't be read from the hub ({short(error)})") from None
    return files, commit


def hub_commit(path: str, revision: str | None) -> str:
    """The commit that a revision of a hub dataset is at this moment; without a revision, its newest.

    Raises:
        OSError: the hub can't be reached, or there is no such dataset or revision.
        ValueError: `path` can't be a dataset's name.
    """
    from huggingface_hub import HfApi

    commit = HfApi().dataset_info(path, revision=revision).sha
    assert commit is not None
    return commit


def look_at(files: list[SourceFile], columns: Columns, progress: bool = True) -> list[Looked]:
    """Look at each file before the work begins: is it whole at both ends, and has it the columns?

    Raises:
        UserError: naming the first file that lacks a column, or whose text is no text: the YAML is wrong, not the file.
    """
    from tqdm import tqdm

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        looks = pool.map(lambda file: _look_at(file, columns), files)
        return list(tqdm(looks, "files looked at", len(files), unit="file", disable=not progress or len(files) < 100))


def _look_at(file: SourceFile, columns: Columns) -> Looked:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if file.bytes == 0:
        return Looked(fault="is empty (0 bytes)")
    if not file.path.endswith(".parquet"):
        return Looked()
    try:
        system, name = filesystem(file.path)
        with system.open_input_file(name) as handle:
            reader = pq.ParquetFile(handle)
            schema, metadata = reader.schema_arrow, reader.metadata
    except (OSError, pa.ArrowException) as error:
        return Looked(fault=f"is no whole Parquet file ({short(error)})")
    for column in columns.names():
        if column not in schema.names:
            raise UserError(f"source {file.path}: {missing_column(column, schema.names)}")
    kind = schema.field(columns.text).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise UserError(f"source {file.path}: column {columns.text!r} holds {kind}, not text; set text_column")
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    text = next(at for at in range(metadata.num_columns) if metadata.schema.column(at).path == columns.text)
    return Looked(
        rows=tuple(group.num_rows for group in groups),
        text_bytes=tuple(group.column(text).total_uncompressed_size for group in groups),
    )
