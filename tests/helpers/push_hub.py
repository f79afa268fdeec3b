"""A server that accepts models as the hub does, for the hub's own client."""

import base64
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
from urllib.parse import unquote, urlsplit

WRITES, READS = "hf_writes", "hf_reads"
"""Tokens with and without write access."""


@dataclass
class Model:
    """A repository: files by branch, and each commit's branch, message and number of operations."""

    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {".gitattributes": b""}})
    commits: list[tuple[str, str, int]] = field(default_factory=list)


@dataclass
class Hub:
    """The server's models and objects, and all requests (method and path) in order."""

    models: dict[str, Model] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    card_errors: list[str] = field(default_factory=list)
    """Errors that it reports for every card."""


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def do_PUT(self) -> None:
        content = self._content()
        self.hub.requests.append("PUT object")
        self.hub.objects[hashlib.sha256(content).hexdigest()] = content
        self._send(200, {})

    def do_GET(self) -> None:
        words = self._words("GET")
        if self._refused() or words[:2] != ["api", "models"]:
            return
        model = self.hub.models.get("/".join(words[2:4]))
        branch = words[5] if words[4:5] in (["revision"], ["tree"]) else "main"
        if model is None or branch not in model.branches:
            self._send(404, {}, {"X-Error-Code": "RepoNotFound" if model is None else "RevisionNotFound"})
            return
        files = model.branches[branch]
        if words[4:5] == ["tree"]:
            entry = {"type": "file", "oid": "0" * 40}
            self._send(200, [{**entry, "size": len(content), "path": name} for name, content in files.items()])
            return
        siblings = [{"rfilename": name} for name in files]
        self._send(200, {"id": "/".join(words[2:4]), "sha": "0" * 40, "siblings": siblings, "tags": [], "private": False})

    def do_POST(self) -> None:
        words, content = self._words("POST"), self._content()
        if self._refused():
            return
        if words == ["api", "repos", "create"]:
            self._create(json.loads(content))
        elif words == ["api", "validate-yaml"]:
            errors = [{"message": error} for error in self.hub.card_errors]
            self._send(400 if errors else 200, {"errors": errors, "warnings": []})
        elif words[2:] == ["info", "lfs", "objects", "batch"]:
            host = self.headers["Host"]
            objects = json.loads(content)["objects"]
            upload = [{**o, "actions": {"upload": {"href": f"http://{host}/object/{o['oid']}"}}} for o in objects]
            self._send(200, {"transfer": "basic", "objects": upload})
        else:
            name, action, branch = "/".join(words[2:4]), words[4], words[5]
            getattr(self, f"_{action}")(self.hub.models[name], branch, content)

    def _create(self, request: dict[str, Any]) -> None:
        name = f"{request['organization']}/{request['name']}"
        url = {"url": f"http://{self.headers['Host']}/{name}"}
        if name in self.hub.models:
            self._send(409, {**url, "error": "You already created this model repo"})
            return
        self.hub.models[name] = Model(request.get("visibility") == "private")
        self._send(200, url)

    def _branch(self, model: Model, branch: str, content: bytes) -> None:
        if branch in model.branches:
            self._send(409, {"error": "Reference already exists"})
            return
        model.branches[branch] = dict(model.branches["main"])
        self._send(200, {})

    def _preupload(self, model: Model, branch: str, content: bytes) -> None:
        def mode(name: str) -> str:
            return "lfs" if name.endswith((".safetensors", ".onnx")) else "regular"

        files = [file["path"] for file in json.loads(content)["files"]]
        self._send(200, {"files": [{"path": f, "uploadMode": mode(f), "shouldIgnore": False} for f in files]})

    def _commit(self, model: Model, branch: str, content: bytes) -> None:
        files, lines = model.branches[branch], [json.loads(line) for line in content.splitlines()]
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "deletedFile":
                del files[value["path"]]
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        model.commits.append((branch, lines[0]["value"]["summary"], len(lines) - 1))
        name = "/".join(self._parts()[2:4])
        address = f"http://{self.headers['Host']}/{name}/commit/{len(model.commits)}"
        self._send(200, {"commitUrl": address, "commitOid": "1" * 40})

    def _words(self, method: str) -> list[str]:
        self.hub.requests.append(f"{method} {urlsplit(self.path).path}")
        return self._parts()

    def _parts(self) -> list[str]:
        return [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]

    def _content(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _refused(self) -> bool:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token == WRITES:
            return False
        known = token == READS
        self._send(403 if known else 401, {"error": "Forbidden" if known else "Invalid username or password."})
        return True

    def _send(self, status: int, content: Any, extra_headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(extra_headers or {})}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serve_models(home: Path) -> Iterator[tuple[Hub, dict[str, str]]]:
    """Serve a hub; yields it, and the environment for a process that pushes to it.

    The hub's client reads the address at import, so that it has to be another process.
    """
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Running", (_Handler,), {"hub": hub}))
    Thread(target=server.serve_forever, daemon=True).start()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
    address = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(home)}
    try:
        yield hub, {**kept, **address, "HF_HUB_DISABLE_XET": "1"}
    finally:
        server.shutdown()
        server.server_close()
