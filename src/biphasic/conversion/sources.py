"""Find and inspect the files that a conversion reads, from folders, buckets or a hub dataset."""

import math
import os
import posixpath
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePosixPath
from typing import NoReturn

from tqdm import tqdm

from biphasic.config.convert import ConvertConfig, FilesSource, HubSource
from biphasic.conversion.reading import Document, Skipped, read_start, read_up_to_damage, require_columns
from biphasic.conversion.source_files import (
    COMPRESSIONS,
    KINDS,
    READ_BYTES,
    TEXT_KINDS,
    DamagedFileError,
    SourceFile,
    is_readable,
    kind_of,
    open_file,
    read_ahead,
    read_error,
)
from biphasic.data.packing import document_number, validation_end
from biphasic.errors import UserError, first_line
from biphasic.grouping import groups_up_to, mapped_ahead
from biphasic.storage import StoredFile, glob_pattern, is_hidden, is_remote, open_store, user_errors
from biphasic.storage.hub import hub_errors, is_local_path

_THREADS = 16
_EXAMINED = 256
"""Of more small text files than these, only these are read before the work begins, evenly spread over all."""
_PATHS_AT_ONCE = 500
"""Number of a hub dataset's paths in a request. The hub refuses more than 1,000."""


@dataclass(frozen=True)
class Sources:
    """A conversion's files, sorted by path, the commit of a hub dataset, and the number of files not read, by suffix."""

    files: list[SourceFile]
    commit: str | None = None
    unread: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FileLayout:
    """A file, with the number of rows and text bytes of each row group if it is a Parquet file.

    `fault` is the reason why the file can't be read at all.
    """

    file: SourceFile
    rows: tuple[int, ...] = ()
    text_bytes: tuple[int, ...] = ()
    fault: str | None = None


def find_files(source: FilesSource) -> Sources:
    """Return the files that a source names, each once.

    Raises a UserError if a path, folder or pattern matches no file of a supported kind, or can't be read.
    """
    suffixes = f".{', .'.join(KINDS)}; all but .parquet also with {' or '.join(COMPRESSIONS)}"
    files: dict[str, SourceFile] = {}
    unread: dict[str, str] = {}
    for path in source.paths:
        with user_errors(f"source {path}: can't be read", ValueError):  # of a pattern such as `a**`
            matches = _files_at(path.rstrip("/"))
        if list(matches) == [path.rstrip("/")] and not is_readable(path):
            raise UserError(f"source {path}: expected a file that ends in {suffixes}")
        hidden = {name for name in matches if is_hidden(name, path)}
        usable = {
            name: SourceFile(name, file.bytes, file.version)
            for name, file in matches.items()
            if is_readable(name) and name not in hidden
        }
        if not usable:
            message = f"there is no such file, and no folder or pattern with files in it ({suffixes})"
            hint = ", except hidden ones (. or _), which the path has to name" if hidden else ""
            raise UserError(f"source {path}: {message}{hint}")
        for name, file in usable.items():
            if (shown := _printable(name)) != name:
                raise UserError(f"source {shown}: its name is not UTF-8: rename it")
            if not file.bytes and os.path.islink(name) and not os.path.exists(name):
                raise UserError(f"source {name}: is a link to {os.readlink(name)}, which isn't there")
        files |= usable
        unread |= {name: "hidden" if name in hidden else _suffix(name) for name in matches.keys() - usable}
    real = cache(os.path.realpath)

    # A file may be found by several paths: through links, or as `texts/a.txt` and `./texts/a.txt`.
    def place(name: str) -> str:
        folder, base = os.path.split(name)
        return name if is_remote(name) else real(name) if os.path.islink(name) else f"{real(folder)}/{base}"

    by_place = {place(name): file for name, file in sorted(files.items(), reverse=True)}
    by_path = sorted(by_place.values(), key=lambda file: file.path)
    return Sources(by_path, None, dict(Counter(kind for name, kind in sorted(unread.items()) if name not in files)))


def _suffix(path: str) -> str:
    """Return what a file is counted by: its suffix with a compression's, or `no suffix`."""
    name = PurePosixPath(path)
    inner = PurePosixPath(name.stem).suffix if name.suffix in COMPRESSIONS else ""
    return _printable(inner + name.suffix) or "no suffix"


def _printable(name: str) -> str:
    """Return a file's name, which may not be UTF-8, with the bytes that are not as `\\xe9`."""
    return name.encode(errors="backslashreplace").decode()


def describe_unread(unread: Mapping[str, int]) -> str:
    """Return the number of files that are not read, and of each suffix: `8 files (5 .html, 3 .pdf)`."""
    kinds = ", ".join(f"{count:,} {suffix}" for suffix, count in Counter(unread).most_common())
    return f"{sum(unread.values()):,} file{'s' * (sum(unread.values()) > 1)} ({kinds})"


def _files_at(path: str) -> dict[str, StoredFile]:
    """Return the file at a path, the files of a folder and its subfolders, or those that match a pattern, by path.

    Of a folder named like a file, such as Spark's `texts.parquet`, a pattern that matches it takes the files below it.
    """
    from fsspec.utils import glob_translate

    pattern = path if is_remote(path) else glob_pattern(path)
    is_pattern = (is_remote(path) or not os.path.exists(path)) and any(each in pattern for each in "*?[")
    folder = posixpath.dirname(re.split(r"[*?\[]", pattern)[0]) if is_pattern else path
    if is_remote(path):
        names = open_store(folder).list()
    else:
        names = _local_files(folder, pattern.removeprefix(folder).strip("/") if is_pattern else "**/*")
    files = {posixpath.join(folder, name): file for name, file in names.items()}
    if is_pattern:
        below = {name: file for name, file in files.items() if f"{name}/".startswith(f"{path}/")}
        matches = re.compile(glob_translate(pattern)).fullmatch

        @cache
        def is_in_table(place: str) -> bool:
            is_table = is_readable(place) and matches(place) is not None
            return len(place) > len(folder) and (is_table or is_in_table(posixpath.dirname(place)))

        found = (name for name in files if matches(name) or is_in_table(posixpath.dirname(name)))
        return below or {name: files[name] for name in found}
    parent, name = posixpath.split(path)
    if not files and not parent.endswith(":/") and (file := open_store(parent or ".").stat(name)) is not None:
        return {path: file}
    return files


def _local_files(folder: str, pattern: str) -> dict[str, StoredFile]:
    """Return the files below a folder, except in folders that a pattern can't match.

    Links are followed. They may form cycles, so each folder is read once. Raises a UserError if a folder can't be read.
    """
    files, visited, root, parts = {}, set[str](), folder or ".", pattern.split("/")
    for place, folders, names in os.walk(root, onerror=_unreadable, followlinks=True) if Path(root).is_dir() else ():
        below = [] if place == root else posixpath.relpath(place, root).split("/")
        if (real := os.path.realpath(place)) in visited:
            folders.clear()
            continue
        visited.add(real)
        folders.sort()
        if "**" not in parts[: len(below) + 1] and len(below) < len(parts):
            expected, is_last = parts[len(below)], len(below) + 1 == len(parts)
            folders[:] = [name for name in folders if fnmatchcase(name, expected) and (is_readable(name) or not is_last)]
        # A hidden folder counts as one file, and a link in it doesn't claim a folder that is read by another path.
        hidden = {name for name in folders if is_hidden(name, pattern)}
        files |= {"/".join([*below, name]): StoredFile(0, "") for name in hidden}
        folders[:] = [name for name in folders if name not in hidden]
        store = open_store(place)
        for name in names:
            # A broken link has no size. It is refused if it would be read.
            if (file := store.stat(name)) is not None or os.path.islink(posixpath.join(place, name)):
                files["/".join([*below, name])] = file or StoredFile(0, "")
    return files


def _unreadable(error: OSError) -> NoReturn:
    raise UserError(f"source {error.filename}: can't be read ({first_line(error)})") from None


def find_hub_files(source: HubSource) -> Sources:
    """Return the files of a hub dataset's configuration and split, at one commit (None if it is a local folder).

    Raises a UserError if the hub can't be reached, the dataset, configuration or split does not exist, or a file is of
    a kind that can't be read.
    """
    import datasets
    from datasets.exceptions import DatasetsError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.hf_api import RepoFile

    errors = (DatasetsError, HfHubHTTPError, ValueError, KeyError)
    name = source.path if source.name is None else f"{source.path}, {source.name}"
    with user_errors(f"source {name}: can't be read from the hub", *errors), hub_errors():
        is_folder = Path(source.path).is_dir()
        if is_local_path(source.path) and not is_folder:
            raise UserError(f"source {name}: there is no such folder")
        commit = hub_commit(source.path, source.revision)
        builder = datasets.load_dataset_builder(source.path, source.name, revision=commit)
        splits = dict(builder.config.data_files or {})
        if source.split not in splits:
            existing = ", ".join(str(split) for split in splits) or "none"
            raise UserError(f"source {name}: has no split {source.split!r} (it has: {existing}); set source.split")
        paths = sorted({str(path) for path in splits[source.split]})
        if others := [path for path in paths if not is_readable(path)]:
            raise UserError(f"source {name}: holds files of a kind that can't be read here (e.g. {others[0]})")
        if commit is None:
            return find_files(FilesSource(kind="files", paths=paths))
        prefix = f"hf://datasets/{source.path}@{commit}/"
        inside = [path.removeprefix(prefix) for path in paths]
        infos = [
            info
            for group in groups_up_to(_PATHS_AT_ONCE, inside)
            for info in HfApi().get_paths_info(source.path, group, revision=commit, repo_type="dataset")
        ]
        sizes = {info.path: info for info in infos if isinstance(info, RepoFile)}
        files = [SourceFile(prefix + path, sizes[path].size, sizes[path].blob_id) for path in inside]
    return Sources(files, commit)


def hub_commit(path: str, revision: str | None) -> str | None:
    """Return the commit of a hub dataset's revision, by default the newest commit; None if `path` is a local folder.

    Raises an OSError if the hub can't be reached or the dataset or revision does not exist, a ValueError if `path` is not
    a valid dataset name, and a UserError if a revision of a local folder is given.
    """
    from huggingface_hub import HfApi

    if os.path.isdir(path):
        if revision is not None:
            raise UserError(f"revision: {revision} has no effect, because {path} is a local folder: remove this key")
        return None
    with hub_errors():
        commit = HfApi().dataset_info(path, revision=revision).sha
    assert commit is not None
    return commit


def inspect_files(files: list[SourceFile], config: ConvertConfig) -> list[FileLayout]:
    """Inspect files before the work begins, and return their layouts.

    Empty files, incomplete Parquet files and files whose start can't be read get a `fault`. Raises a UserError that
    names the first file without one of the columns, or without text in the text column, or that can't be read for now,
    and if `source.text_files` is given without text files. Of many small files of text, JSON or CSV only some are read here;
    the conversion, which reads each once, finds the faults of the others.
    """
    unit = config.source.text_files if isinstance(config.source, FilesSource) else "file"
    if unit != "file" and not any(kind_of(file.path) in TEXT_KINDS for file in files):
        problem = f"{unit} has no effect, because the source has no plain text"
        raise UserError(f"source.text_files: {problem}: remove this key")
    small = [file for file in files if 0 < file.bytes <= READ_BYTES and kind_of(file.path) != "parquet"]
    layouts = {file: FileLayout(file) for file in files}
    examined = layouts.keys() - set(small) | set(small[:: math.ceil(len(small) / _EXAMINED) or 1])

    def inspect(file: SourceFile) -> FileLayout:
        try:
            return _layout(file, config)
        except DamagedFileError as error:
            return FileLayout(file, fault=str(error))

    found = mapped_ahead(inspect, filter(examined.__contains__, files), _THREADS)
    for layout in tqdm(found, "inspecting files", len(examined), unit="file", disable=len(examined) < 1000):
        layouts[layout.file] = layout
    return list(layouts.values())


def _layout(file: SourceFile, config: ConvertConfig) -> FileLayout:
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = f"source {file.path}"
    if file.bytes == 0:
        raise DamagedFileError(f"{source}: is empty (0 bytes)")
    if kind_of(file.path) != "parquet":
        read_start(file, config)
        return FileLayout(file)
    try:
        with hub_errors(), open_file(file) as handle:
            reader = pq.ParquetFile(handle)
            schema, metadata = reader.schema_arrow, reader.metadata
    except (OSError, pa.ArrowException) as error:
        raise read_error(file, "is not a complete Parquet file", error) from error
    require_columns(file.path, schema.names, file.path, config)
    kind = schema.field(config.text_column).type
    values = kind.value_type if pa.types.is_dictionary(kind) else kind
    # Where all values of a file are null, writers give the column this type. Its rows are skipped, since they have no text.
    if str(values) not in ("string", "large_string", "string_view", "null"):
        raise UserError(f"{source}: column {config.text_column!r} holds {kind}, not text; set text_column")
    if config.filters:
        read_start(file, config)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    text = paths.index(config.text_column)
    return FileLayout(
        file,
        rows=tuple(group.num_rows for group in groups),
        text_bytes=tuple(group.column(text).total_uncompressed_size for group in groups),
    )


_COUNTED_ENTRIES, _COUNTED_BYTES = 10_000, 1 << 24
"""A text of at most this many entries and bytes is read to its end, to count its documents."""


def draw_validation(config: ConvertConfig, layouts: list[FileLayout]) -> tuple[int, str]:
    """Choose the validation documents of a text so that each split has a document, and say how many they are.

    They are those whose `document_number` is below the returned number, by default `validation_fraction` of all 64-bit
    numbers. If none is, the document with the smallest number is for validation; if all are, that with the largest is not.
    The text is read until each split has a document: about 1 / `validation_fraction` documents, or to its end if it is
    short and in few files. With `max_tokens`, documents count while their bytes, of which a token has at least one, are
    fewer. The result depends only on the configuration and the text. Raises a UserError if there is no document, only
    one, or all have the same id.
    """
    share, end = config.validation_fraction, validation_end(config.validation_fraction)
    if not share:
        return end, "no documents"
    numbers, chosen, size, limited = list[int](), 0, 0, ""
    first_skipped: Skipped | None = None
    files = read_ahead(layout.file for layout in layouts if layout.fault is None)
    lenient = config.model_copy(update={"on_bad_file": "skip"})  # the conversion reports damaged files
    for read, entry in enumerate(entry for file in files for entry in read_up_to_damage(file, lenient, [])):
        is_long = len(layouts) > _EXAMINED or read >= _COUNTED_ENTRIES or size >= _COUNTED_BYTES
        if 0 < chosen < len(numbers) and is_long:
            rows = sum(sum(layout.rows) for layout in layouts)
            is_counted = not config.filters and all(layout.rows or layout.fault for layout in layouts)
            count = f"{share * rows:,.0f} of {rows:,}" if is_counted else f"{100 * share:g}% of the"
            return end, f"about {count} documents"
        if config.max_tokens is not None and size >= config.max_tokens and len(numbers) > 1 and not chosen:
            limited = " up to max_tokens"
            break
        if isinstance(entry, Document):
            numbers.append(document_number(entry.id))
            chosen, size = chosen + (numbers[-1] < end), size + len(entry.text.encode())
        else:
            first_skipped = first_skipped or entry
    if first_skipped and not numbers:
        reason = f"{first_skipped.where} {first_skipped.reason or 'is left out by filters'}"
        raise UserError(f"source: nothing in it is a document: {reason}, and so on; set text_column or filters")
    if not numbers:  # all files are damaged, which the conversion reports
        return end, "no documents"
    if min(numbers) == max(numbers):
        problem, advice = f"all {len(numbers):,} documents have the same id or text", "add documents"
        if len(numbers) == 1:
            problem = "the text is one document"
            if any(kind_of(layout.file.path) in TEXT_KINDS for layout in layouts):
                advice = "set source.text_files=paragraph (or line) to make each a document"
        problem = f"{problem}, which can't be in train/ and validation/"
        raise UserError(f"source: {problem}: {advice}, or set validation_fraction=0")
    end = min(max(end, min(numbers) + 1), max(numbers))
    return end, f"{sum(number < end for number in numbers):,} of {len(numbers):,} documents{limited}"
