#!/usr/bin/env bash
# torch 2.15.0: with `options`, `linear_cross_entropy` isn't the loss that it stands for under autocast, with loss scaling, or for a
# microbatch without targets.
#
# Its documentation calls it equivalent to a linear layer and `cross_entropy`. `LinearCrossEntropyOptions()` computes the gradient in the
# forward pass, in chunks of rows:
# - under bf16 autocast, hidden states in bf16 give a loss in bf16, of three digits, where `options=None` gives fp32;
# - gradients in fp16 are rounded before a loss scale multiplies them, so that small ones are 0 whatever the scale is;
# - rows that all have the target `ignore_index` give gradients of NaN, where `options=None` gives 0.
# Give it hidden states in fp32, or take the sum of the losses and divide by the number of targets; don't train in fp16 with it.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(torch==2.15.0 numpy==2.1.3)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/chunked_loss.py" <<'PYTHON'
import torch
from torch.nn import LinearCrossEntropyOptions
from torch.nn.functional import linear_cross_entropy

torch.manual_seed(0)
ROWS, WIDTH, CLASSES = 8192, 64, 512
weight = torch.nn.functional.normalize(torch.randn(CLASSES, WIDTH), dim=1)
target = torch.randint(CLASSES, (ROWS,))
untrained = torch.randn(ROWS, WIDTH)
hidden = weight[target] * 14 + 0.3 * untrained  # as of a model that is nearly always right


def loss_and_gradient(hidden, weight, target, options, scale=1.0):
    """The mean loss, and the gradient of the hidden states divided by the scale of the loss."""
    hidden = hidden.clone().requires_grad_()
    loss = linear_cross_entropy(hidden, weight.clone().requires_grad_(), target, options=options)
    (loss * scale).backward()
    return loss.detach(), hidden.grad.double() / scale


for options in (None, LinearCrossEntropyOptions()):
    exact, _ = loss_and_gradient(untrained.double(), weight.double(), target, None)
    _, expected = loss_and_gradient(hidden.double(), weight.double(), target, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = loss_and_gradient(untrained.bfloat16(), weight, target, options)
    zeros = [
        (loss_and_gradient(hidden.half(), weight.half(), target, options, scale)[1] == 0).double().mean().item()
        for scale in (1.0, 1024.0)
    ]
    _, ignored = loss_and_gradient(hidden[:8], weight, torch.full((8,), -100), options)
    print(f"options={options and 'LinearCrossEntropyOptions()'}:")
    print(f"  under autocast to bf16 the loss is {loss.item():.6f} in {loss.dtype} (exact: {exact:.6f})")
    print(f"  fp16: {zeros[0]:.1%} of the gradient are 0; with the loss scaled by 1024 {zeros[1]:.1%} (exact: {(expected == 0).double().mean():.1%})")
    print(f"  8 rows without a target: largest gradient {ignored.abs().max().item()}")
    if options is None:
        assert loss.dtype == torch.float32 and zeros[1] < 0.01 and zeros[0] > 0.5 and ignored.abs().max() == 0
    else:
        assert loss.dtype == torch.bfloat16 and zeros[1] == zeros[0] > 0.5 and ignored.isnan().all()
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/chunked_loss.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
