import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import zstandard

from biphasic.config.convert import ConvertConfig, FilesSource
from biphasic.conversion.reading import Document, Skipped, read_documents
from biphasic.conversion.sources import find_files, inspect_files
from helpers.texts import Records, write_parquet


def options(text_files: str = "file", **keys: Any) -> ConvertConfig:
    source = {"kind": "files", "paths": ["x"], "text_files": text_files}
    return ConvertConfig.model_validate({"job": "convert", "source": source, "output": "x", "tokenizer": "x", **keys})


OPTIONS = options()


def source(*paths: Path | str) -> FilesSource:
    return FilesSource(kind="files", paths=[str(path) for path in paths])


def read(*paths: Path | str, text: str = "text", id: str | None = "id", **keys: Any) -> list[Document | Skipped]:
    files, config = find_files(source(*paths)).files, options(text_column=text, id_column=id, **keys)
    assert not [layout.fault for layout in inspect_files(files, config) if layout.fault]
    return [entry for file in files for entry in read_documents(file, config)]


def texts(entries: list[Document | Skipped]) -> list[str]:
    return [entry.text for entry in entries if isinstance(entry, Document)]


def skipped(entries: list[Document | Skipped]) -> list[tuple[str, str]]:
    return [(f"{Path(entry.where).name}: {entry.reason}", entry.kind) for entry in entries if isinstance(entry, Skipped)]


def documents(records: Records) -> list[Document]:
    return [Document(record["id"], record["text"]) for record in records]


def lines(records: Records) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def csv_lines(records: Records) -> bytes:
    content = io.StringIO()
    writer = csv.DictWriter(content, list(records[0]))
    writer.writeheader()
    writer.writerows(records)
    return content.getvalue().encode()


def write(path: Path, records: Records) -> Path:
    if path.suffix == ".parquet":
        return write_parquet(path, records)
    content = csv_lines(records) if ".csv" in path.name.lower() else lines(records)
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = zstandard.compress(content)
    path.write_bytes(content)
    return path
