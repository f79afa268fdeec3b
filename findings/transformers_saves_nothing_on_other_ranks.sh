#!/usr/bin/env bash
# transformers 5.23.0: save_pretrained of a model writes nothing on ranks other than 0, whatever is_main_process says.
#
# Expected: is_main_process says whether this process writes, and is True unless the caller passes False. So it is in 4.57.6: each rank
# that calls save_pretrained has written its model.
# Seen: in a process group, ranks other than 0 make an empty folder and return. Nothing warns. So ranks that hold different models (a trial
# of a search each), or nodes that save to their own disks, keep one of them, and learn of it when they load the others. Tokenizers
# and configurations are written by each rank if their own save_pretrained is called.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(transformers==5.23.0 torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/ranks.py" <<'PYTHON'
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import BertConfig, BertModel

if "RANK" in os.environ:  # started below
    torch.distributed.init_process_group("gloo")
    rank = os.environ["RANK"]
    torch.manual_seed(int(rank))
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    model = BertModel(BertConfig(**sizes))
    model.save_pretrained(Path(sys.argv[1]) / f"rank{rank}", is_main_process=True)
    model.config.save_pretrained(Path(sys.argv[1]) / f"configuration{rank}")
    torch.distributed.destroy_process_group()
    sys.exit()

print("transformers", transformers.__version__, "torch", torch.__version__)
print("expected: config.json and model.safetensors in both ranks' folders")
with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__, folder]
    subprocess.run(command, check=True)
    seen = {path.name: sorted(file.name for file in path.iterdir()) for path in Path(folder).iterdir()}
for name in sorted(seen):
    print(f"seen: {name}: {seen[name]}")
both, configuration = ["config.json", "model.safetensors"], ["config.json"]
sys.exit(seen != {"rank0": both, "rank1": [], "configuration0": configuration, "configuration1": configuration})
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/ranks.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
