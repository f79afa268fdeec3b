#!/usr/bin/env bash
# torch 2.15.0: consolidated safetensors files have 0 for every weight without dimensions.
#
# Expected: HuggingFaceStorageWriter with enable_consolidation=True, which joins the ranks' files into ones that transformers loads, writes
# the values that were saved.
# Seen: a tensor of shape [] is 0 in the consolidated file, without a warning; without consolidation it is kept. Learned temperatures have
# this shape, such as the logit_scale of CLIP and of many retrievers: here similarities are multiplied by exp(0) = 1 in place of 20. So
# it is in torch 2.11.0. A weight of shape [1] is kept.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(torch==2.15.0 numpy==2.3.5 safetensors==0.8.0)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/consolidate.py" <<'PYTHON'
import math
import os
import tempfile
import warnings

import torch
import torch.distributed.checkpoint as checkpoint
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

warnings.simplefilter("ignore")


class Retriever(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(3, 2)
        self.logit_scale = torch.nn.Parameter(torch.tensor(math.log(20.0)))
        self.threshold = torch.nn.Parameter(torch.tensor([0.25]))


print("torch", torch.__version__)
weights = Retriever().state_dict()
print(f"expected: logit_scale {weights['logit_scale']:.4f} from both, as saved")
seen = {}
for consolidate in (False, True):
    with tempfile.TemporaryDirectory() as folder:
        writer = HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=consolidate)
        checkpoint.save(weights, storage_writer=writer, no_dist=True)
        name = next(name for name in os.listdir(folder) if name.endswith(".safetensors"))
        stored = load_file(os.path.join(folder, name))
        loaded = {name: torch.full_like(value, -1) for name, value in weights.items()}
        checkpoint.load(loaded, storage_reader=HuggingFaceStorageReader(folder), no_dist=True)
    others = all(torch.equal(stored[name], value) for name, value in weights.items() if name != "logit_scale")
    seen[consolidate] = torch.equal(stored["logit_scale"], weights["logit_scale"]), float(loaded["logit_scale"]), others
    print(f"seen: consolidated {consolidate}: logit_scale {stored['logit_scale']:.4f}; the other weights are equal: {others}")
kept, zero = seen[False], seen[True]
raise SystemExit(0 if kept[0] and kept[2] and not zero[0] and zero[1] == 0.0 and zero[2] else 1)
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/consolidate.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
