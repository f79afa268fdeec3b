"""The rehearsal on a fake GPU passes for a preset, and each of its checks fails when the code is wrong."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from biphasic.amounts import format_bytes
from biphasic.model.architecture import PRESETS
from helpers.tiny import ROOT

TINY = """
job: pretrain
run_name: tiny
output: unused
tokenizer: unused
max_duration: 800ba
global_batch_size: 64
microbatch_size: 4
precision: amp_bf16
model: {vocab_size: 512, hidden_size: 64, intermediate_size: 96, num_layers: 2, num_heads: 4, num_kv_heads: 2}
data: {sequence_length: 256, folder: unused}
objective: {phases: [{name: clm, until: 400ba}, {name: mlm, masking_ratio: 0.4}]}
schedule: {warmup: 40ba, decay: 160ba}
compute: {activation_checkpointing: 2}
"""

# Each fault is made in a process of its own rehearsals, since these replace parts of PyTorch.
CODE = """
import json, sys
sys.path.insert(0, "benchmarks")
from contextlib import ExitStack
from unittest import mock

import torch

from biphasic.model.architecture import Architecture
from biphasic.config.load import load
from biphasic.model import attention, segments
from biphasic.training import optimizer, recipe
from rehearse import rehearse

of, varlen, flops, build = segments.Segments.of.__func__, attention._varlen, Architecture.flops, recipe.build_optimizer

def positions_on_the_host(cls, *given, **named):
    made = of(cls, *given, **named)
    made.position_ids = torch.zeros(made.position_ids.shape, dtype=torch.int64)
    return made

def fp32_attention_with_a_break(query, key, value, *rest):
    torch._dynamo.graph_break()
    return varlen(query.float(), key.float(), value.float(), *rest).to(query.dtype)

def bf16_moments(model, *given, **adam):
    made = build(model, *given, **adam)
    def cast(dtype):
        for state in made.state.values():
            state["exp_avg"] = state["exp_avg"].to(dtype)
    def cast_after_backward(made, given, named):
        def closure():
            loss = named["closure"]()
            cast(torch.float32)  # torch 2.11's fused step refuses others
            return loss
        return given, {"closure": closure}
    made.register_step_pre_hook(cast_after_backward)
    made.register_step_post_hook(lambda *_: cast(torch.bfloat16))
    return made

attend = attention.BACKEND_FUNCTIONS
faults = {
    "none": [],
    "flex": [],
    "device": [mock.patch.object(segments.Segments, "of", classmethod(positions_on_the_host))],
    "others": [
        mock.patch.dict(attend, varlen=fp32_attention_with_a_break),
        mock.patch.object(Architecture, "flops", lambda *given: 1.02 * flops(*given)),
        mock.patch.object(recipe, "build_optimizer", bf16_moments),
    ],
}
results = {}
for name, ranks, strategy in json.loads(sys.argv[2]):
    config = load(sys.argv[1], [f"parallelism.strategy={strategy}", *(["precision=fp32"] if name == "flex" else [])], ranks)
    with ExitStack() as stack:
        for fault in faults[name]:
            stack.enter_context(fault)
        try:
            result = vars(rehearse(config, ranks))
        except Exception as error:
            result = {"error": str(error)}
    results[f"{name} {ranks} {strategy}"] = result
print(json.dumps(results))
"""
RUNS = [
    ("none", 16, "fsdp"),
    ("flex", 1, "ddp"),
    ("device", 1, "ddp"),
    ("others", 1, "ddp"),
]


@pytest.fixture(scope="module")
def rehearsals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    file = tmp_path_factory.mktemp("rehearsal") / "tiny.yaml"
    file.write_text(TINY)
    command = [sys.executable, "-c", CODE, str(file), json.dumps(RUNS)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_a_run_without_faults(rehearsals: dict[str, dict[str, Any]]) -> None:
    result = rehearsals["none 16 fsdp"]
    assert result.get("error") is None and result["problems"] == []
    assert {objective: len(batches) for objective, batches in result["flops"].items()} == {"clm": 2, "mlm": 2}
    parameters = 2 * 512 * 64 + 2 * (64 * 16 * 12 + 3 * 64 * 96 + 2 * 64) + 64
    share = 4 * 4 * parameters / 16
    assert share <= result["state_bytes"] <= share + 512 * 200  # in blocks of 512 bytes, and with AdamW's steps
    assert result["state_bytes"] < result["peak_bytes"]


def test_a_run_in_fp32_with_flex_attention(rehearsals: dict[str, dict[str, Any]]) -> None:
    result = rehearsals["flex 1 ddp"]
    assert result.get("error") is None and result["problems"] == []
    assert "attention flex" in result["setup"] and result["half_precision_share"] == 0


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        ("others 1 ddp", "graph break: "),
        ("others 1 ddp", "of the FLOPs are in bf16"),
        ("others 1 ddp", "FLOPs were counted, and the formula gives"),
        ("others 1 ddp", "exp_avg is torch.bfloat16 on cuda:0; expected fp32 on the GPU"),
    ],
)
def test_a_fault_is_found(run: str, problem: str, rehearsals: dict[str, dict[str, Any]]) -> None:
    assert any(problem in text for text in rehearsals[run]["problems"])


def test_a_tensor_on_the_host_stops_the_rehearsal(rehearsals: dict[str, dict[str, Any]]) -> None:
    assert "cpu" in rehearsals["device 1 ddp"]["error"] and "cuda:0" in rehearsals["device 1 ddp"]["error"]


def test_a_preset(tmp_path: Path) -> None:
    """`make rehearse` runs all of them."""
    command = [sys.executable, str(ROOT / "benchmarks" / "rehearse.py"), "yamls/210m_mlm.yaml"]
    run = subprocess.run(
        [*command, "--ranks", "8", "--set", "microbatch_size=2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    _, row, verdict = run.stdout.splitlines()
    assert verdict == "every check passed"
    # Weights, gradients, AdamW's two moments, and DDP's buckets of gradients.
    assert f" {format_bytes(5 * 4 * PRESETS['210m'].parameters)} " in row
