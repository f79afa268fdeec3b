#!/usr/bin/env bash
# torch 2.11.0, torch.compile on a CPU: a function that changes its input in place and then gathers from it returns a wrong sum.
#
# Expected: a compiled function returns what it returns uncompiled, within rounding.
# Seen: softcapped logits, computed by x.div_(c).tanh_().mul_(c), then logsumexp(1) - gather(1, targets), summed: 186.0742
# compiled and 186.7030 uncompiled, 0.3% less and without a message. The generated code gathers from the input's memory after
# it has written the new values there, and applies the operations to them a second time. The same operations out of place are
# right, and with torch 2.15.0 both are.
#
# No GPU needed; a C++ compiler is. Checked on 2026-11-27, Python 3.12, Linux x86-64.
# Exit status: 0 as described here, 1 if torch behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" torch==2.11.0 numpy==2.3.5 "setuptools<82"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.11.0 numpy==2.3.5 "setuptools<82"
fi
cat >"$work/gather.py" <<'PYTHON'
import sys

import torch


def in_place(logits, targets, softcap):
    capped = logits.div_(softcap).tanh_().mul_(softcap)
    normalizer = capped.logsumexp(1, keepdim=True)
    return (normalizer - capped.gather(1, targets)).sum(), (capped - normalizer).exp()


def out_of_place(logits, targets, softcap):
    capped = (logits / softcap).tanh() * softcap
    normalizer = capped.logsumexp(1, keepdim=True)
    return (normalizer - capped.gather(1, targets)).sum(), (capped - normalizer).exp()


torch.manual_seed(0)
logits, targets = 3 * torch.randn(30, 50), torch.randint(50, (30, 1))
print("torch", torch.__version__)
differences = []
for function in (in_place, out_of_place):
    plain = float(function(logits.clone(), targets, 5.0)[0])
    compiled = float(torch.compile(function)(logits.clone(), targets, 5.0)[0])
    differences.append(abs(compiled / plain - 1))
    print(f"{function.__name__}: {plain:.4f}, compiled {compiled:.4f}")
sys.exit(not (differences[0] > 1e-3 and differences[1] < 1e-5))
PYTHON
"$work/venv/bin/python" "$work/gather.py"
