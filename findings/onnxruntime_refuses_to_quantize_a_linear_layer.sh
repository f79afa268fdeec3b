#!/usr/bin/env bash
# onnxruntime 1.31.1: quantize_dynamic refuses a linear layer whose weight has its shape in the graph too, as torch exports it.
#
# Expected: quantize_dynamic quantizes a valid graph of one Gemm with a transposed weight of 3 x 8.
# Seen: an InferenceError, "Inferred shape and existing shape differ in dimension 0: (8) vs (3)". It transposes the weight and
# keeps the entry of `value_info` with the shape from before. torch.onnx.export writes such an entry for each weight (2.15.0), so
# that torch.nn.Linear(8, 3), exported by it, can't be quantized; square weights can. Without the entry all can.
#
# Without torch: onnx makes the graph, and its checker accepts it. Checked on 2026-11-29, Python 3.12, Linux x86-64.
# Exit status: 0 as described here, 1 if onnxruntime behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(onnxruntime==1.31.1 onnx==1.23.2 numpy==2.4.6 sympy==1.14.0)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
"$work/venv/bin/python" - 2>messages.log <<'PYTHON'
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic


def quantized(rows: int, with_entry: bool) -> str:
    weight = np.ones((rows, 8), np.float32)
    entry = [helper.make_tensor_value_info("weight", TensorProto.FLOAT, [rows, 8])]
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "weight"], ["y"], transB=1)], "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", rows])],
        [numpy_helper.from_array(weight, "weight")], value_info=entry if with_entry else [],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, "linear.onnx")
    try:
        quantize_dynamic("linear.onnx", "int8.onnx")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "quantized"


results = {f"{rows} x 8, {'with' if entry else 'without'} its shape": quantized(rows, entry) for rows in (3, 8) for entry in (True, False)}
print(f"onnxruntime {onnxruntime.__version__}, onnx {onnx.__version__}: expected: quantized, four times")
for name, result in results.items():
    print(f"weight of {name}: {result}")
first, *others = results.values()
sys.exit(not ("shape differ" in first and others == ["quantized"] * 3))
PYTHON
