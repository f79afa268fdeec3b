#!/usr/bin/env bash
# torch-optimi 0.3.3: StableAdamW runs its Triton kernels whatever the device, dtype and class of the parameters.
#
# Expected: as its other optimizers, it chooses Triton for parameters on GPUs that support it, and PyTorch otherwise.
# Seen: on a CPU, the first step raises RuntimeError: 0 active drivers. It asks whether all parameters fit before it has listed them,
# and all of none do; its seven siblings train. With triton=False it trains. triton comes with torch from PyPI on Linux.
#
# Checked on 2026-11-30, Python 3.11, torch 2.11.0, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(torch-optimi==0.3.3 torch==2.11.0 numpy==2.3.5 packaging==25.0) # it imports packaging, and doesn't ask for it
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/steps.py" <<'PYTHON'
import sys

import optimi
import torch

print("torch", torch.__version__)
print("expected: every optimizer takes a step on a CPU")


def chooses_triton(name, **options):
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = getattr(optimi, name)([parameter], lr=1e-3, **options)
    parameter.grad = torch.ones(4)
    try:
        optimizer.step()
        result = "a step"
    except RuntimeError as error:
        result = f"RuntimeError: {error}"
    chosen = bool(optimizer.param_groups[0]["triton"])
    print(f"{name}({', '.join(f'{key}={value}' for key, value in options.items())}): triton={chosen}, {result}")
    return chosen and result != "a step"


others = [chooses_triton(name) for name in ("SGD", "Adam", "AdamW", "Lion", "Adan", "RAdam", "Ranger")]
asked = chooses_triton("StableAdamW", triton=False)
sys.exit(any(others) or asked or not chooses_triton("StableAdamW"))
PYTHON
"$work/venv/bin/python" "$work/steps.py"
