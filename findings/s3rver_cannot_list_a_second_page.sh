#!/usr/bin/env bash
# s3rver 3.7.1 (npm) on Node.js 20: a listing of more keys than fit one page is answered with 500 InternalError.
#
# Expected: the first page, with IsTruncated and a NextContinuationToken.
# Seen: ListObjectsV2 of three keys works with MaxKeys=3 and fails with MaxKeys=2, so folders of more than 1,000 keys, the size of a
# page, can't be listed. The older ListObjects, whose marker is a key, works with both.
#
# Checked on 2026-11-29, Node.js 20.20.2, boto3 1.44.5, Linux x86-64.
# Exit status: 0 as described here, 1 if the program behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(boto3==1.44.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
npm install --silent --no-audit --no-fund --prefix "$work" s3rver@3.7.1
port=$("$work/venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
mkdir "$work/root"
"$work/node_modules/.bin/s3rver" --directory "$work/root" --address 127.0.0.1 --port "$port" --silent --configure-bucket bucket &
cat >"$work/pages.py" <<'PYTHON'
import sys

import boto3
from botocore.exceptions import ClientError

client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{sys.argv[1]}", region_name="us-east-1",
                      aws_access_key_id="S3RVER", aws_secret_access_key="S3RVER")
for number in range(3):
    client.put_object(Bucket="bucket", Key=str(number), Body=b"")
seen = {}
for name, listing in {"ListObjectsV2": client.list_objects_v2, "ListObjects": client.list_objects}.items():
    for limit in (3, 2):
        try:
            seen[name, limit] = f"{len(listing(Bucket='bucket', MaxKeys=limit)['Contents'])} keys"
        except ClientError as error:
            seen[name, limit] = error.response["Error"]["Code"]
        print(f"{name} of 3 keys with MaxKeys={limit}: {seen[name, limit]}")
right = {("ListObjectsV2", 3): "3 keys", ("ListObjects", 3): "3 keys", ("ListObjects", 2): "2 keys"}
sys.exit(seen != {**right, ("ListObjectsV2", 2): "InternalError"})
PYTHON
echo "s3rver $(node -p 'require("'"$work"'/node_modules/s3rver/package.json").version'), Node.js $(node --version)"
echo "expected: 2 keys of 3 with MaxKeys=2"
"$work/venv/bin/python" "$work/pages.py" "$port"
