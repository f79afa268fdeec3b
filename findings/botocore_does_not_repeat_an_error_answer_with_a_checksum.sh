#!/usr/bin/env bash
# botocore 1.44.5: GetObject isn't tried again after a status 500 whose headers have an object's checksum: it ends in an AttributeError.
#
# Expected: as boto3 documents for its default retries, a general error such as 500 is tried again, up to five times, and the
# second answer's object is returned. So it is without the header, and with response_checksum_validation="when_required".
# Seen: `AttributeError: 'StreamingChecksumBody' object has no attribute 'strip'` after one request. The body is wrapped for the
# comparison of the checksum before it is known whether the answer is an error. Servers that write an object's headers before
# they read it, such as `rclone serve s3` 1.75.2, answer so when the reading fails.
#
# Checked on 2026-11-29, Python 3.11 and 3.12, boto3 1.44.5, Linux x86-64.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(boto3==1.44.5 botocore==1.44.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/answers.py" <<'PYTHON'
import base64
import sys
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import boto3
import botocore
from botocore.config import Config

CONTENT = b"content"
ERROR = b'<?xml version="1.0"?><Error><Code>InternalError</Code><Message>Internal Error</Message></Error>'
CHECKSUM = base64.b64encode(zlib.crc32(CONTENT).to_bytes(4, "big")).decode()
requests = 0


class Store(BaseHTTPRequestHandler):
    """Answers the first request with 500, the second with the object."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        global requests
        requests += 1
        fails = requests == 1
        body = ERROR if fails else CONTENT
        self.send_response(500 if fails else 200)
        if not fails or "with-checksum" in self.path:
            self.send_header("x-amz-checksum-crc32", CHECKSUM)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Store)
Thread(target=server.serve_forever, daemon=True).start()


def get(key, **settings):
    global requests
    requests = 0
    client = boto3.client(
        "s3", endpoint_url=f"http://127.0.0.1:{server.server_port}", region_name="us-east-1", aws_access_key_id="key",
        aws_secret_access_key="secret", config=Config(s3={"addressing_style": "path"}, **settings),
    )
    try:
        result = client.get_object(Bucket="bucket", Key=key)["Body"].read().decode()
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    print(f"{key}, {settings or 'defaults'}: {requests} requests, {result}")
    return requests, result


print("botocore", botocore.__version__)
print("expected: 2 requests and the content, three times")
without = get("without-checksum")
when_required = get("with-checksum", response_checksum_validation="when_required")
default = get("with-checksum")
is_as_described = without == when_required == (2, "content") and default[0] == 1 and "AttributeError" in default[1]
sys.exit(not is_as_described)
PYTHON
"$work/venv/bin/python" "$work/answers.py"
