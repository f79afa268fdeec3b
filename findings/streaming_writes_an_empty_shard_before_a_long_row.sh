#!/usr/bin/env bash
# Streaming 0.13.0: MDSWriter writes a shard without rows if the first row is longer than `size_limit`.
#
# Expected: a row that doesn't fit a shard's limit gets a shard of its own, and every shard has rows.
# Seen: when such a row comes first, the writer closes the shard that is still empty, and the index begins with a shard of 0 samples
# and its file. Long rows after it get shards of their own, as expected. Who counts shards, or divides them among workers, counts it.
#
# Checked on 2026-11-28, Python 3.12, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" mosaicml-streaming==0.13.0 numpy==2.1.3
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check mosaicml-streaming==0.13.0 numpy==2.1.3
fi
cat >"$work/long_rows.py" <<'PYTHON'
import json
import sys
from importlib.metadata import version

from streaming import MDSWriter

lengths = [5000, 10, 5000, 5000]
with MDSWriter(out="rows", columns={"text": "bytes"}, size_limit=1000) as writer:
    for length in lengths:
        writer.write({"text": bytes(length)})
samples = [shard["samples"] for shard in json.load(open("rows/index.json"))["shards"]]
print("mosaicml-streaming", version("mosaicml-streaming"))
print("rows of", lengths, "bytes, size_limit 1,000")
print("expected samples of the shards:", [1, 1, 1, 1])
print("seen:                          ", samples)
sys.exit(samples != [0, 1, 1, 1, 1])
PYTHON
CUDA_VISIBLE_DEVICES="" "$work/venv/bin/python" "$work/long_rows.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
