"""A server that answers as the hub does for datasets and for the files of models, for the hub's own client."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Repository:
    """A dataset or model: a folder for each commit, and the commit of each revision (`main`, `refs/convert/parquet`)."""

    folders: dict[str, Path]
    revisions: dict[str, str] = field(default_factory=dict)

    def commit(self, revision: str) -> str | None:
        return revision if revision in self.folders else self.revisions.get(revision)


class _Hub(BaseHTTPRequestHandler):
    """What of the hub's interface reading a dataset needs."""

    repositories: dict[str, Repository]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"])).decode()
        wanted = json.loads(content) if content.startswith("{") else parse_qs(content)
        _, _, owner, name, _, revision = (unquote(part) for part in self.path.strip("/").split("/"))
        folder = self._folder(f"{owner}/{name}", revision)
        assert folder is not None
        self._json([_entry(folder, path) for path in wanted["paths"] if (folder / path).exists()])

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        words = [unquote(part) for part in parts.path.strip("/").split("/")]
        if words[0] == "api" and words[1:2] in (["datasets"], ["models"]):
            name, what, rest = "/".join(words[2:4]), words[4:5], words[5:]
            revision = rest[0] if rest else "main"
            folder = self._folder(name, revision)
            if name not in self.repositories:
                self._none("RepoNotFound")
            elif folder is None:
                self._none("RevisionNotFound")
            elif what == ["tree"]:
                self._tree(folder, "/".join(rest[1:]), "ecursive=true" in parts.query.lower())
            elif what in ([], ["revision"]):
                commit = self.repositories[name].commit(revision)
                names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
                files = [{"rfilename": file} for file in names]
                self._json({"id": name, "sha": commit, "siblings": files, "tags": [], "private": False, "downloads": 0})
            else:
                self._none("EntryNotFound")
        elif words[0] == "datasets" and words[3:4] == ["resolve"]:
            self._file("/".join(words[1:3]), words[4], "/".join(words[5:]))
        elif words[2:3] == ["resolve"]:
            self._file("/".join(words[:2]), words[3], "/".join(words[4:]))
        else:
            self._none("RepoNotFound")

    def _folder(self, name: str, revision: str) -> Path | None:
        repository = self.repositories.get(name)
        commit = None if repository is None else repository.commit(revision)
        return None if repository is None or commit is None else repository.folders[commit]

    def _tree(self, folder: Path, below: str, recursive: bool) -> None:
        if not (folder / below).exists():
            self._none("EntryNotFound")
            return
        found = sorted((folder / below).rglob("*") if recursive else (folder / below).iterdir())
        self._json([_entry(folder, path.relative_to(folder).as_posix()) for path in found])

    def _file(self, name: str, revision: str, file: str) -> None:
        folder = self._folder(name, revision)
        if folder is None:
            self._none("RevisionNotFound" if name in self.repositories else "RepoNotFound")
            return
        commit = self.repositories[name].commit(revision) or ""
        if not (folder / file).is_file():
            self._none("EntryNotFound", commit)
            return
        content = (folder / file).read_bytes()
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

    def _none(self, code: str, commit: str = "") -> None:
        self._send(404, b"{}", {"X-Error-Code": code, "X-Repo-Commit": commit, "Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, about: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**about, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _entry(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    if path.is_dir():
        return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
    content = path.read_bytes()
    return {"type": "file", "oid": hashlib.sha1(content).hexdigest(), "size": len(content), "path": name}


@contextmanager
def serve_hub(repositories: dict[str, Repository], home: Path) -> Iterator[dict[str, str]]:
    """Answer for these datasets and models; gives the environment of a process that shall ask here.

    The hub's client reads its address when it is imported, so it has to be another process.
    """
    handler = type("Running", (_Hub,), {"repositories": repositories})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(home)}
        yield {**os.environ, **address, "HF_UPDATE_DOWNLOAD_COUNTS": "0"}
    finally:
        server.shutdown()
        server.server_close()
