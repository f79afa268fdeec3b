"""The text of the recipe for a language of one's own, from message catalogues written here."""

import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest

from biphasic.data.packing import document_number, validation_end
from biphasic.downstream.task_folder import TaskFolder
from biphasic.errors import UserError
from helpers.tiny import ROOT

FRACTION = 0.3


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gather_messages", ROOT / "recipes" / "your_language" / "gather.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_catalogue(file: Path, translations: dict[str, str]) -> None:
    """GNU's format: a header, tables of lengths and offsets, the texts."""
    entries = sorted({"": "Content-Type: text/plain; charset=UTF-8\n", **translations}.items())
    texts = [text.encode() for column in zip(*entries, strict=True) for text in column]
    offset, table = 28 + 8 * len(texts), b""
    for text in texts:
        table += struct.pack("<II", len(text), offset)
        offset += len(text) + 1
    header = struct.pack("<7I", 0x950412DE, 0, len(entries), 28, 28 + 8 * len(entries), 0, 0)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(header + table + b"".join(text + b"\0" for text in texts))


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, ...]:
    folder = tmp_path / "share" / "locale"
    two = "Erklärt den Schalter Nummer {n}. Er wird mit dem Wert {n} gesetzt, und gilt dann immer."
    long = {f"long {n}": two.format(n=n) for n in range(60)}
    write_catalogue(folder / "xx" / "LC_MESSAGES" / "a.mo", {**long, "same": "same", "file": "Datei"})
    short = {f"short {n}": f"Kurze Meldung {n} " + "wörtlich " * 9 for n in range(40)}
    write_catalogue(folder / "xx" / "LC_MESSAGES" / "b.mo", {**short, "file 2": "datei!"})
    write_catalogue(folder / "yy" / "LC_MESSAGES" / "a.mo", {"file": "fichier"})
    (folder / "xx" / "LC_MESSAGES" / "broken.mo").write_bytes(b"no catalogue")
    return (tmp_path / "share",)


def test_documents_pairs_and_a_test_set(
    recipe: ModuleType, places: tuple[Path, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "_MIN_CHARACTERS", 1000)
    counts = recipe.gather("xx", tmp_path / "text", FRACTION, places)
    documents = pq.read_table(tmp_path / "text" / "documents.parquet").to_pylist()
    texts = "\n".join(row["text"] for row in documents)
    # Each message once; the untranslated one, the other language and the repeated one are left out.
    assert texts.count("Datei") == 1 and "datei!" not in texts and "same" not in texts and "fichier" not in texts
    assert texts.count("Kurze Meldung 7 ") == 1
    assert counts["documents"] == len(documents) and counts["train_pairs"] + counts["test_pairs"] == 60
    # Scored pairs come from documents that conversion holds out.
    pairs = TaskFolder(str(tmp_path / "text" / "pairs"), str(tmp_path / "cache"), "retrieval").read("train", "pairs")
    assert len(pairs["query"]) == counts["train_pairs"]
    train_ids = pq.read_table(tmp_path / "text" / "pairs" / "train.parquet")["id"].to_pylist()
    assert not any(document_number(identity) < validation_end(FRACTION) for identity in train_ids)
    queries = [json.loads(line) for line in (tmp_path / "text" / "sentences" / "queries.jsonl").read_text().splitlines()]
    assert len(queries) == counts["test_pairs"] > 0
    assert all(document_number(query["_id"]) < validation_end(FRACTION) for query in queries)
    assert all(query["text"].startswith("Erklärt den Schalter") and query["text"].endswith(".") for query in queries)


def test_a_language_with_little_text_is_refused(recipe: ModuleType, places: tuple[Path, ...], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="language yy: the message catalogues on this machine have 7 characters"):
        recipe.gather("yy", tmp_path, FRACTION, places)


def test_a_mistyped_language_is_not_kept(tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "recipes" / "your_language", tmp_path / "recipes" / "your_language")
    (tmp_path / "yamls").symlink_to(ROOT / "yamls")
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([folder / "run.sh", "xx"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("language xx: "), done.stderr
    assert not (tmp_path / "runs").exists()
