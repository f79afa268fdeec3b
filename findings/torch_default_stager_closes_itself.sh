#!/usr/bin/env bash
# torch 2.11.0, torch.distributed.checkpoint.staging.DefaultStager: a stager stages once, and the next copy fails.
#
# Expected: stage() can be called for each checkpoint until close(). Its documentation says of close() that it "should be called
# when the stager is no longer needed", and that "after calling close(), the stager should not be used for further staging
# operations"; the stager keeps its host memory to use it again.
# Seen: DefaultStager._stage calls close() on its StateDictStager after each copy, which empties the table of functions that
# copy each type. The second stage() raises KeyError: <class 'type'>, although nobody has called close().
#
# Synchronous staging, no GPU needed. Checked on 2026-11-27, Python 3.12, Linux x86-64.
# Exit status: 0 as described here, 1 if torch behaves differently, another one if it can't be installed.
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
cat >"$work/stage_twice.py" <<'PYTHON'
import sys

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

options = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)
stager = DefaultStager(options)
state = {"model": {"weight": torch.ones(3)}, "step": 1}
print("torch", torch.__version__)
print("expected: two equal copies of", state)
print("first stage():", stager.stage(state))
try:
    second = stager.stage(state)
except KeyError as error:
    print("second stage(): KeyError:", error)
    sys.exit(str(error) != "<class 'type'>")
print("second stage():", second)
sys.exit(1)
PYTHON
"$work/venv/bin/python" "$work/stage_twice.py"
