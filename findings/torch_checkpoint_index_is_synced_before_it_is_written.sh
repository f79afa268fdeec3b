#!/usr/bin/env bash
# torch 2.11.0, torch.distributed.checkpoint.FileSystemWriter(sync_files=True): the index is synced while it is still empty.
#
# Expected: sync_files, which is on by default, "forces files to be synced to permanent storage" before save() returns.
# Seen: fsync is called on the index (.metadata) when it holds 0 of its bytes: they are still in Python's buffer, and are written when the file is
# closed, after which nobody syncs them. After a power failure the shards may be whole and the index empty, and without it no shard
# can be read. torch 2.15.0 syncs all of it.
#
# Checked on 2026-11-28, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" torch==2.11.0 numpy==2.3.5
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.11.0 numpy==2.3.5
fi
cat >"$work/sizes_at_sync.py" <<'PYTHON'
import os
import sys

import torch
import torch.distributed.checkpoint as checkpoint

synced, sync = {}, os.fsync


def measure(file):
    synced[os.path.basename(os.readlink(f"/proc/self/fd/{file}")).removesuffix(".tmp")] = os.fstat(file).st_size
    sync(file)


os.fsync = measure
writer = checkpoint.FileSystemWriter("saved", sync_files=True)
checkpoint.save({"weight": torch.ones(10)}, storage_writer=writer, no_dist=True)
sizes = {name: os.path.getsize(f"saved/{name}") for name in sorted(os.listdir("saved"))}
print("torch", torch.__version__)
print("bytes of each file, expected to be synced:", sizes)
print("bytes of each file when it was synced:    ", {name: synced[name] for name in sizes})
sys.exit(synced[".metadata"] != 0 or sizes[".metadata"] == 0 or synced["__0_0.distcp"] != sizes["__0_0.distcp"])
PYTHON
CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/sizes_at_sync.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
