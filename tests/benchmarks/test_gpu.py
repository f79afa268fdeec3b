"""`make bench-gpu` on a CPU, small: everything but the figures that only a GPU has."""

import importlib.util
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from biphasic.model.architecture import Architecture
from helpers.tiny import ROOT

BENCHMARKS = ROOT / "benchmarks"
SMALL = Architecture(500, hidden=32, ffn=48, layers=1, heads=4, kv_heads=2, head_dim=8)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("gpu", BENCHMARKS / "gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu", module)
    spec.loader.exec_module(module)
    for name, value in {"LENGTH": 64, "STEP_ROWS": 4, "MEAN_DOCUMENT": 20, "PRESETS": {"210m": SMALL}}.items():
        monkeypatch.setattr(module, name, value)
    # Without the last stage of the compiler, which takes half a minute.
    compile_ = torch.compile
    torch._dynamo.reset()
    without_mode = {"backend": "aot_eager", "mode": None}  # modes are Inductor's
    monkeypatch.setattr(torch, "compile", lambda *given, **named: compile_(*given, **{**named, **without_mode}))
    yield module
    torch._dynamo.reset()


def test_a_report_of_one_size_and_its_variants(gpu: Any, tmp_path: Path) -> None:
    report = gpu.Report(tmp_path, "Some GPU 9000", time.monotonic() + 600)
    report.note("machine", {"device": "Some GPU 9000"})
    report.note("roofline", gpu.roofline("cpu", side=64, copied=1 << 16))
    report.note("dense_peak", 1e12)
    gpu.measure_size(report, "210m", 1e12, "cpu")
    gpu.variants(report, "210m", 1e12, list(gpu.VARIANTS), "cpu")
    assert report.results["failed"] == []
    results = json.loads((tmp_path / "gpu-some-gpu-9000.json").read_text())
    assert set(results["mfu"]["210m"]) == {"clm", "mlm"}
    ran = [(one["phase"], one["ways"]) for one in results["measured"]]
    # The others' attention needs a GPU.
    names = ["residual", "chunks-4", "chunks-0.25", "sdpa", "whole", "padded", "eager", "autotune"]
    variants = [gpu.Variant(), *(gpu.VARIANTS[name] for name in names)]
    assert ran == [(phase, asdict(variant)) for variant in variants for phase in ("clm", "mlm")]
    for one in results["measured"]:
        first, last = one["loss_first_and_last"]
        assert abs(first - math.log(500)) < 0.1 and last < first
        assert one["mfu"] == pytest.approx(one["flops_per_second"] / 1e12)
    assert set(results["profiles"]) == {"210m clm", "210m mlm"}
    text = (tmp_path / "gpu-some-gpu-9000.md").read_text()
    assert "| 210m | mlm | compiled | sdpa | documents | 4 |" in text
    assert text.count("\n| 210m ") == 18
    assert "| 210m | clm | compiled, bf16 residual | sdpa |" in text
    assert "| 210m | clm | compiled, max-autotune-no-cudagraphs | sdpa |" in text
    assert "| 210m | clm | compiled, chunks of the loss 0.25 | sdpa |" in text


def test_padding_is_not_counted(gpu: Any) -> None:
    lengths, real = gpu.row_lengths(50, "padded")
    assert all(sum(row) == 64 for row in lengths)
    assert [row[0] for row in lengths] == real
    batch = gpu.batch_of(SMALL, "clm", lengths, real, "cpu")
    assert batch["predicted"] == sum(real) - 50
    masked = gpu.batch_of(SMALL, "mlm", lengths, real, "cpu")
    assert 0.3 < masked["predicted"] / sum(real) < 0.5
    assert (masked["targets"][0, real[0] :] == -100).all()
    packed, full = gpu.row_lengths(50, "documents")
    assert all(sum(row) == 64 for row in packed) and set(full) == {64}
    assert gpu.batch_of(SMALL, "clm", packed, full, "cpu")["predicted"] == 50 * 64 - sum(len(row) for row in packed)


def test_what_fails_is_written_down(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One way of computing fails; the next one is tried and gives the figures."""
    report = gpu.Report(tmp_path, "x", time.monotonic() + 600)

    def fails(backbone: Any, mode: str) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(gpu.layers, "compile_layers", fails)
    monkeypatch.setattr(gpu, "profile", lambda *_: {"share_of_wall": {}})
    gpu.measure_size(report, "210m", None, "cpu")
    results = json.loads((tmp_path / "gpu-x.json").read_text())
    assert len(results["failed"]) == 2 and "no compiler here" in results["failed"][0]["error"]
    assert [one["ways"]["compile"] for one in results["measured"]] == [False, False]
    assert "Failed: " in (tmp_path / "gpu-x.md").read_text()
    late = gpu.Report(tmp_path, "y", time.monotonic() - 1)
    gpu.measure_size(late, "210m", None, "cpu")
    assert late.results["measured"] == []


def test_without_a_gpu_it_says_so_and_imports_nothing_but_torch_and_transformers() -> None:
    code = (
        "import sys, runpy; sys.argv = ['gpu.py']; sys.path.insert(0, 'benchmarks'); "
        "runpy.run_path('benchmarks/gpu.py', run_name='__main__'); "
        "print(sorted({'composer', 'streaming', 'pydantic', 'omegaconf', 'datasets'} & set(sys.modules)))"
    )
    environment = {"PYTHONPATH": "src", "CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert run.stdout.splitlines() == ["make bench-gpu: skipped, there is no CUDA device", "[]"], run.stderr
