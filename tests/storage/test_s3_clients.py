"""What the clients of S3 send, to servers that answer them with HTTPS."""

import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from biphasic.storage import filesystem, is_unreachable, open_store
from helpers.https_server import serve_https, serve_proxy
from helpers.ports import free_port
from helpers.s3_server import CREDENTIALS

_CONTENT = b"text\n"
_REGION = "eu-west-3"
_AMAZON = ("s3.amazonaws.com", "*.s3.amazonaws.com", f"s3.{_REGION}.amazonaws.com", f"*.s3.{_REGION}.amazonaws.com")


class _Store(BaseHTTPRequestHandler):
    """Takes and gives any object, and keeps what was asked. At Amazon's names, it only does so in Paris."""

    protocol_version = "HTTP/1.1"
    requests: list[tuple[str, str, dict[str, str]]] = []

    def do_PUT(self) -> None:
        self._keep()
        # A server that doesn't know the trailer of a checksum has to be told how long the content is.
        if "content-length" not in self.requests[-1][2]:
            self.close_connection = True
            return self._answer(411)
        self.rfile.read(int(self.headers["Content-Length"]))
        return self._answer(200)

    def do_HEAD(self) -> None:
        self._keep()
        self._answer(200, len(_CONTENT))

    def do_GET(self) -> None:
        self._keep()
        self._answer(200, len(_CONTENT))
        self.wfile.write(_CONTENT)

    def _keep(self) -> None:
        self.requests.append((self.command, self.path, {name.lower(): text for name, text in self.headers.items()}))

    def _answer(self, status: int, length: int = 0) -> None:
        if self.headers["Host"].endswith(".amazonaws.com"):
            if f".{_REGION}." not in self.headers["Host"]:
                status, length = 301, 0
            elif self.path == "/":
                status, length = 403, 0  # as Amazon answers an unsigned request, with the region
        self.send_response(status)
        self.send_header("x-amz-bucket-region", _REGION)
        self.send_header("ETag", '"0"')
        self.send_header("Last-Modified", "Thu, 26 Nov 2026 12:00:00 GMT")
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Store]]:
    """A store over HTTPS, to which the environment leads."""
    settings = {"AWS_MAX_ATTEMPTS": "1", "AWS_EC2_METADATA_DISABLED": "true"}
    for name, value in {**CREDENTIALS, **settings}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_REQUEST_CHECKSUM_CALCULATION")
    _Store.requests = []
    with serve_https(_Store, tmp_path, _AMAZON) as (address, certificate):
        monkeypatch.setenv("S3_ENDPOINT_URL", address)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        yield _Store


def _read_text(path: str) -> bytes:
    """Read a text as a conversion does."""
    system, name = filesystem(path)
    with system.open_input_stream(name) as text:
        return text.read()


def test_writes_over_https_have_their_length_and_no_checksum(server: type[_Store], tmp_path: Path) -> None:
    store = open_store("s3://bucket/run")
    store.write("a.txt", _CONTENT)
    file = tmp_path / "file"
    file.write_bytes(_CONTENT)
    store.upload(file, "b.txt")
    assert store.read("a.txt") == _CONTENT
    assert [(method, path) for method, path, _ in server.requests] == [
        ("PUT", "/bucket/run/a.txt"),
        ("PUT", "/bucket/run/b.txt"),
        ("GET", "/bucket/run/a.txt"),
    ]
    for _, _, headers in server.requests:
        assert not [name for name in headers if "checksum" in name or "trailer" in name]


def test_the_environment_may_ask_for_checksums(server: type[_Store], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
    with pytest.raises(OSError):
        open_store("s3://bucket/run").write("a.txt", _CONTENT)
    assert server.requests[0][2]["x-amz-trailer"] == "x-amz-checksum-crc32"


def test_text_is_read_over_https_with_the_certificates_of_boto3(server: type[_Store]) -> None:
    assert _read_text("s3://certificates/text.jsonl") == _CONTENT


def test_text_is_read_from_a_bucket_in_another_region_through_a_proxy(
    server: type[_Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = os.environ["S3_ENDPOINT_URL"]
    monkeypatch.delenv("S3_ENDPOINT_URL")
    with serve_proxy(address) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        assert _read_text("s3://paris/text.jsonl") == _CONTENT
    hosts = [headers["host"] for _, path, headers in server.requests if path != "/"]
    assert hosts and set(hosts) == {f"paris.s3.{_REGION}.amazonaws.com"}


def test_text_whose_bucket_does_not_answer_is_refused_in_one_line(
    server: type[_Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("S3_ENDPOINT_URL")
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(OSError, match="proxy") as unreachable:
        filesystem("s3://nowhere/text.jsonl")
    assert is_unreachable(unreachable.value)
