#!/usr/bin/env bash
# Streaming 0.13.0: `merge_index` of nested folders makes a dataset in which some shards come twice and others never.
#
# Expected: the merged index lists each shard that it has found, by its path below the merged folder.
# Seen: indexes are found at any depth, but a path keeps only its last folder: the shards of more/0 are listed as those of 0. Where
# there is a folder of that name, its rows are read twice without a message, and those of more/0 never; the number of rows is the
# expected one. Where there is none, reading fails. (mosaicml/streaming issues 516 and 959 have the second.)
#
# Checked on 2026-11-29, Python 3.12, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if Streaming behaves differently, another one if it can't be installed.
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
cat >"$work/merge.py" <<'PYTHON'
import sys
from importlib.metadata import version

from streaming import LocalDataset, MDSWriter
from streaming.base.util import merge_index

written = []
for folder, first in (("0", 0), ("1", 10), ("more/0", 20), ("more/1", 30)):
    with MDSWriter(out=f"rows/{folder}", columns={"number": "int"}) as writer:
        for number in range(first, first + 3):
            writer.write({"number": number})
            written.append(number)
merge_index("rows")
dataset = LocalDataset("rows")
read = [int(dataset[row]["number"]) for row in range(len(dataset))]
print("mosaicml-streaming", version("mosaicml-streaming"))
print("expected:", written)
print("seen:    ", read)
sys.exit(read != 2 * [0, 1, 2, 10, 11, 12])
PYTHON
CUDA_VISIBLE_DEVICES="" "$work/venv/bin/python" "$work/merge.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
