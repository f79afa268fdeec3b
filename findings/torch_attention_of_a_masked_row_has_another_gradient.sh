#!/usr/bin/env bash
# torch 2.11.0, scaled_dot_product_attention on a CPU: a row that is masked with the lowest number gets gradients times its length.
#
# Expected: a mask that adds torch.finfo(dtype).min, or -1e9, to all scores of a row (such as padding's) makes the row the mean of
# the values, as softmax says, and the gradients are that mean's.
# Seen: the output is the mean. In the backward pass of the fused kernel, which is chosen on a CPU, each of the 8 keys of such a row has
# the weight 1 and not 1/8: the query's gradient is 8 times the right one, and the values' gradients are wrong too. The kernel keeps
# log(sum(exp(scores))), to which log(8) adds nothing beside a number of that size. With -1e4 it's right, and with the math kernel, which
# is the reference here, always.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/masked_row.py" <<'PYTHON'
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def results(added, backend):
    """Output and query gradient of the masked row, and the gradient of all values."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, 8, 16, requires_grad=True) for _ in range(3))
    mask = torch.zeros(8, 8)
    mask[5] = added
    with sdpa_kernel(backend):
        output = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    output.backward(torch.randn(output.shape))
    return output[0, 0, 5], query.grad[0, 0, 5], value.grad


print("torch", torch.__version__)
print("expected: output and gradients of the two kernels agree")
as_described = True
for added, ratio in ((torch.finfo(torch.float32).min, 8), (-1e9, 8), (-1e4, 1)):
    fused, reference = results(added, SDPBackend.FLASH_ATTENTION), results(added, SDPBackend.MATH)
    differences = [(a - b).abs().max().item() for a, b in zip(fused, reference)]
    seen = (fused[1].norm() / reference[1].norm()).item()
    print(
        f"seen: {added:.3g} added: output differs by {differences[0]:.1e}, values' gradient by {differences[2]:.1e}, "
        f"the query's gradient is {seen:.3f} times the reference"
    )
    as_described &= differences[0] < 1e-6 and abs(seen - ratio) < 0.01 and (differences[2] > 0.1) == (ratio == 8)
sys.exit(not as_described)
PYTHON
CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/masked_row.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
