"""A dataset of the hub, through the hub's own client, from a server that answers as the hub does."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from biphasic.config.conversion import ConvertConfig
from biphasic.config.load import dump
from texts import sentences, write_parquet
from tiny import ROOT

Make = Callable[..., ConvertConfig]
NAME = "HuggingFaceFW/fineweb-edu"
COMMIT, NEWER = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9", "0" * 39 + "1"
CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
---
"""
REVISIONS = {COMMIT: COMMIT, "v1": COMMIT, "main": NEWER, NEWER: NEWER}


def records(count: int, seed: int) -> list[dict[str, Any]]:
    """With FineWeb-Edu's columns."""
    return [
        {
            "text": record["text"],
            "id": f"<urn:uuid:{record['id']}>",
            "dump": "CC-MAIN-2013-20",
            "url": "http://example.org/",
            "file_path": "s3://commoncrawl/x.warc.gz",
            "language": "en",
            "language_score": 0.9,
            "token_count": 10,
            "score": 2.6 + number % 3,
            "int_score": 3 + number % 3,
        }
        for number, record in enumerate(sentences(count, seed=seed))
    ]


class Hub(BaseHTTPRequestHandler):
    """What of the hub's interface reading a dataset needs. `folders` has a repository's content for each commit."""

    folders: dict[str, Path]
    asked: list[str]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"])).decode()
        wanted = json.loads(content) if content.startswith("{") else parse_qs(content)
        commit = REVISIONS[self.path.rpartition("/")[2]]
        self._json([self._entry(commit, path) for path in wanted["paths"] if (self.folders[commit] / path).exists()])

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        self.asked.append(path)
        start, resolve = f"/api/datasets/{NAME}", f"/datasets/{NAME}/resolve/"
        if path == start or path.startswith(f"{start}/revision/"):
            revision = path.rpartition("/")[2] if path != start else "main"
            if revision not in REVISIONS:
                self._none("RevisionNotFound")
                return
            commit = REVISIONS[revision]
            names = [{"rfilename": name} for name in self._names(commit)]
            self._json({"id": NAME, "sha": commit, "siblings": names, "tags": [], "private": False, "downloads": 0})
        elif path.startswith(f"{start}/tree/"):
            revision, _, below = path.removeprefix(f"{start}/tree/").partition("/")
            self._tree(
                REVISIONS[revision], below, "recursive" in parts.query and "ecursive=true" in parts.query.lower()
            )
        elif path.startswith(resolve):
            revision, _, name = path.removeprefix(resolve).partition("/")
            self._file(REVISIONS[revision], name)
        else:
            self._none("RepoNotFound")

    def _names(self, commit: str) -> list[str]:
        folder = self.folders[commit]
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())

    def _entry(self, commit: str, name: str) -> dict[str, Any]:
        path = self.folders[commit] / name
        if path.is_dir():
            return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
        content = path.read_bytes()
        return {"type": "file", "oid": hashlib.sha1(content).hexdigest(), "size": len(content), "path": name}

    def _tree(self, commit: str, below: str, recursive: bool) -> None:
        folder = self.folders[commit] / below
        if not folder.exists():
            self._none("EntryNotFound")
            return
        found = sorted(folder.rglob("*") if recursive else folder.iterdir())
        self._json([self._entry(commit, path.relative_to(self.folders[commit]).as_posix()) for path in found])

    def _file(self, commit: str, name: str) -> None:
        path = self.folders[commit] / name
        if not path.is_file():
            self._none("EntryNotFound")
            return
        content = path.read_bytes()
        about = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range")
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            end = min(int(last or len(content) - 1), len(content) - 1)
            about["Content-Range"] = f"bytes {first}-{end}/{len(content)}"
            content = content[int(first) : end + 1]
        self._send(206 if wanted else 200, content, {**about, "Content-Type": "application/octet-stream"})

    def _json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _none(self, code: str) -> None:
        self._send(404, b"{}", {"X-Error-Code": code, "Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, about: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**about, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[type[Hub]]:
    Hub.folders = {COMMIT: tmp_path / "pinned", NEWER: tmp_path / "newer"}
    Hub.asked = []
    for commit, folder in Hub.folders.items():
        for name in ("sample/10BT", "data/CC-MAIN-2013-20"):
            (folder / name).mkdir(parents=True)
        (folder / "README.md").write_text(CARD)
        for number in range(2):
            write_parquet(folder / "sample" / "10BT" / f"{number:03d}_00000.parquet", records(300, seed=number))
        write_parquet(folder / "data" / "CC-MAIN-2013-20" / "train-0.parquet", records(50, seed=len(commit)))
    write_parquet(tmp_path / "newer" / "sample" / "10BT" / "002_00000.parquet", records(300, seed=9))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield type("Running", (Hub,), {"port": server.server_port})
    server.shutdown()


def run(hub: Any, tmp_path: Path, config: ConvertConfig, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "convert.yaml"
    path.write_text(dump(config))
    # In a process of its own: the hub's client reads its address when it is imported.
    environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{hub.port}", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, str(ROOT / "data_prep" / "convert.py"), str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_a_pinned_dataset_of_the_hub(hub: Any, config_for: Make, tmp_path: Path) -> None:
    source = {"kind": "hub", "path": NAME, "name": "sample-10BT", "revision": COMMIT}
    config = config_for([], source=source, cluster={"workers": 1}, filters=[{"column": "int_score", "min": 4}])
    planned = run(hub, tmp_path, config, "--plan")
    assert planned.returncode == 0, planned.stderr
    assert "2 files, " in planned.stdout
    assert "600 documents" in planned.stdout
    found = run(hub, tmp_path, config)
    assert found.returncode == 0, found.stdout + found.stderr
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["source"]["commit"] == COMMIT
    prefix = f"hf://datasets/{NAME}@{COMMIT}/sample/10BT"
    assert [file["path"] for file in record["source"]["files"]] == [
        f"{prefix}/{at:03d}_00000.parquet" for at in range(2)
    ]
    assert record["documents"] == {"read": 600, "filtered": 200, "skipped": {}, "repeated": 0}
    again = run(hub, tmp_path, config)
    assert "nothing to do" in again.stdout, again.stdout + again.stderr


def test_the_newest_commit_is_looked_up_and_recorded(hub: Any, config_for: Make, tmp_path: Path) -> None:
    source = {"kind": "hub", "path": NAME, "name": "sample-10BT"}
    found = run(hub, tmp_path, config_for([], source=source, cluster={"workers": 1}))
    assert found.returncode == 0, found.stdout + found.stderr
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["source"]["commit"] == NEWER
    assert record["documents"]["read"] == 900
    assert f"source.revision: {NEWER}" in found.stdout
    # Unfinished, and the dataset has moved on since: what was begun is not mixed with other text.
    (tmp_path / "out" / "conversion.json").unlink()
    started = {"config": record["config"], "tokenizer": record["tokenizer"]["sha256"], "commit": COMMIT, "tasks": {}}
    (tmp_path / "out" / "conversion.started").write_text(json.dumps(started))
    moved = run(hub, tmp_path, config_for([], source=source, cluster={"workers": 1}))
    assert moved.returncode == 2
    assert f"now it is {NEWER}: set source.revision: {COMMIT} to finish it" in moved.stderr


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"path": NAME, "name": "sample-7BT"}, f"source {NAME}, sample-7BT: can't be read from the hub ("),
        ({"path": NAME, "name": "sample-10BT", "split": "test"}, "has no split 'test' (it has: train)"),
        ({"path": NAME, "name": "sample-10BT", "revision": "v9"}, "can't be read from the hub ("),
        ({"path": "nobody/nothing"}, "source nobody/nothing: can't be read from the hub ("),
    ],
)
def test_what_the_hub_does_not_have(
    hub: Any, config_for: Make, tmp_path: Path, source: dict[str, str], message: str
) -> None:
    found = run(hub, tmp_path, config_for([], source={"kind": "hub", **source}))
    assert found.returncode == 2
    assert message in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1, found.stderr
    assert not (tmp_path / "out").exists()
