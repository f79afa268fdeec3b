#!/usr/bin/env bash
# s3fs 2026.9.0, pyarrow 26.0.1 and cloudpathlib 0.26.0: an exception within `with open(…, "wb")` puts what was written so far
# into the bucket, as an object that looks whole.
#
# Expected: no object, as with smart_open 9.0.2, because S3 shows an object only when its upload is completed.
# Seen: leaving the block completes the upload. A Parquet file of which the program wrote one of three parts can be read: its
# writer leaves its own block first, and adds the footer.
#
# Checked on 2026-11-30, Python 3.11, moto 5.2.5 as the server, Linux x86-64.
# Exit status: 0 as described here, 1 if a library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(s3fs==2026.9.0 pyarrow==26.0.1 cloudpathlib==0.26.0 smart-open==9.0.2 boto3==1.43.117 'moto[server]==5.2.5')
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/exceptions.py" <<'PYTHON'
import logging
import os
import sys
from importlib.metadata import version

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import s3fs
import smart_open
from botocore.exceptions import ClientError
from cloudpathlib import S3Client
from moto.server import ThreadedMotoServer
from pyarrow.fs import S3FileSystem

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
url = f"http://{host}:{port}"
os.environ.update(AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret", AWS_DEFAULT_REGION="us-east-1")
client = boto3.client("s3", endpoint_url=url)
client.create_bucket(Bucket="bucket")

arrow = S3FileSystem(access_key="key", secret_key="secret", region="us-east-1", scheme="http", endpoint_override=f"{host}:{port}")
writers = {
    "s3fs": lambda: s3fs.S3FileSystem(endpoint_url=url).open("bucket/s3fs", "wb"),
    "pyarrow": lambda: arrow.open_output_stream("bucket/pyarrow"),
    "cloudpathlib": lambda: S3Client(endpoint_url=url).CloudPath("s3://bucket/cloudpathlib").open("wb"),
    "smart-open": lambda: smart_open.open("s3://bucket/smart-open", "wb", transport_params={"client": client}),
}
part = pa.table({"text": ["a document"] * 1000})
print("expected: no object after an exception, with any of them")
readable = []
for name, opened in writers.items():
    try:
        with opened() as file, pq.ParquetWriter(file, part.schema) as writer:
            for number in range(3):
                writer.write_table(part)
                if number == 0:
                    raise RuntimeError("the source of the second part can't be read")
    except RuntimeError:
        pass
    try:
        content = client.get_object(Bucket="bucket", Key=name)["Body"].read()
    except ClientError as error:
        print(f"{name} {version(name)}: no object ({error.response['Error']['Code']})")
        continue
    rows = pq.read_table(pa.BufferReader(content)).num_rows
    print(f"{name} {version(name)}: an object of {len(content):,} bytes, a Parquet file of {rows:,} of 3,000 rows")
    readable.append(name)
server.stop()
sys.exit(readable != ["s3fs", "pyarrow", "cloudpathlib"])
PYTHON
"$work/venv/bin/python" "$work/exceptions.py"
