"""A server over HTTPS, with a certificate of its own, and a proxy that leads to it."""

import ipaddress
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@contextmanager
def serve_https(
    handler: type[BaseHTTPRequestHandler], folder: Path, names: Sequence[str] = ()
) -> Iterator[tuple[str, Path]]:
    """Serve until the end of the block; returns the address, and the file of the certificate that clients have to trust.

    The certificate is also that of the hosts with these names.
    """
    context, certificate = _https_context(folder, names)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"https://127.0.0.1:{server.server_address[1]}", certificate
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def forward_https(port: int, folder: Path) -> Iterator[tuple[str, Path]]:
    """Put HTTPS before a local server of HTTP until the end of the block; returns as `serve_https`."""
    context, certificate = _https_context(folder)

    class Forward(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            _connect(context.wrap_socket(self.request, server_side=True), port)

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Forward)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"https://127.0.0.1:{server.server_address[1]}", certificate
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def serve_proxy(address: str) -> Iterator[str]:
    """Run a proxy that takes every host for the server at this address; returns the proxy's own."""

    class Proxy(BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            self.send_response(200)
            self.end_headers()
            _connect(self.connection, int(address.rpartition(":")[2]))

        def log_message(self, format: str, *args: object) -> None:
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_address[1]}"
    finally:
        proxy.shutdown()
        proxy.server_close()


def _connect(client: socket.socket, port: int) -> None:
    """Pass on what the client and the local server at the port send each other, until both have ended."""
    with socket.create_connection(("127.0.0.1", port)) as server:
        thread = threading.Thread(target=_pass_on, args=(server, client), daemon=True)
        thread.start()
        _pass_on(client, server)
        thread.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while content := source.recv(65_536):
            target.sendall(content)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _https_context(folder: Path, names: Sequence[str] = ()) -> tuple[ssl.SSLContext, Path]:
    (certificate := folder / "certificate.pem").write_bytes(_certificate(names))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context, certificate


def _certificate(names: Sequence[str]) -> bytes:
    """A certificate of 127.0.0.1 and other names by itself, and its key, as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address, *map(x509.DNSName, names)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private + certificate.public_bytes(serialization.Encoding.PEM)
