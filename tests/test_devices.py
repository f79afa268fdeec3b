"""The device of a rank, and its allocators' settings."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from composer.devices import DeviceCPU, DeviceGPU

import biphasic
from biphasic.devices import rank_device, require_compiler, require_precision, supports_bf16
from biphasic.errors import UserError
from biphasic.processes import set_allocators

SOURCES = [*Path(next(iter(biphasic.__path__))).rglob("*.py")]


def test_a_gpu_whose_driver_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for precision in ("amp_bf16", "fp32"):
        with pytest.raises(
            UserError, match=r"has GPUs \(8\), but PyTorch can't use them: usually the driver is older than CUDA"
        ):
            require_precision(precision)


def test_compiling_for_a_gpu_needs_a_compiler_and_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CC", "CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(UserError, match=rf"needs a C compiler \(gcc or clang\) and {tmp_path}/Python.h"):
        require_compiler()
    (tmp_path / "Python.h").touch()
    require_compiler()
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match="needs a C compiler"):
        require_compiler()


def test_without_a_gpu_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(rank_device(), DeviceCPU)


@pytest.mark.parametrize(("ranks", "threads"), [("1", 7), ("3", 2), ("16", 1)])
def test_ranks_on_the_cpu_share_the_cores_of_the_container(
    ranks: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("joblib.cpu_count", lambda: 7)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(8)
        monkeypatch.setenv("OMP_NUM_THREADS", "8")
        rank_device()
        assert torch.get_num_threads() == 8
        monkeypatch.delenv("OMP_NUM_THREADS")
        rank_device()
        assert torch.get_num_threads() == threads
        rank_device()
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_fp32_is_not_tf32_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        assert isinstance(rank_device(), DeviceGPU)
        assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize(("major", "supported"), [(7, False), (8, True), (9, True)])
def test_bf16_is_refused_before_ampere(major: int, supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    require_precision("fp32")
    with pytest.raises(UserError, match=r"precision: amp_bf16 needs a GPU .*\(this machine has no GPU\)"):
        require_precision("amp_bf16")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
    assert supports_bf16() == supported
    if supported:
        require_precision("amp_bf16")
    else:
        with pytest.raises(UserError, match=r"Ampere\) or later \(Tesla T4\): precision=fp32 runs everywhere"):
            require_precision("amp_bf16")


def test_composer_creates_no_device_by_itself() -> None:
    """`get_device` and a Trainer without `device` would allow TF32 again."""
    code = [path.read_text(encoding="utf-8") for path in SOURCES]
    assert not [text for text in code if "get_device(" in text]
    trainers = [call for text in code for call in re.findall(r" Trainer\(\n(?:.*\n)*?    \)", text)]
    assert len(trainers) == 2 and all("device=rank_device()" in call for call in trainers)


GROWING = "expandable_segments:True"


@pytest.mark.parametrize(
    ("own", "kernel", "expected"),
    [
        ({}, "6.8.0-generic", GROWING),
        ({}, "5.15.167.4-microsoft-standard-WSL2", None),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "6.8.0", "expandable_segments:False"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "6.8.0", None),
        ({"PYTORCH_HIP_ALLOC_CONF": ""}, "6.8.0", None),
    ],
)
def test_allocators_are_set_unless_the_user_has_set_them(
    own: dict[str, str], kernel: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", own)
    monkeypatch.setattr(platform, "release", lambda: kernel)
    set_allocators()
    assert own.get("PYTORCH_ALLOC_CONF") == expected


def test_pytorch_accepts_its_allocators_settings_and_is_imported_after_them(tmp_path: Path) -> None:
    """It refuses unknown ones. A YAML that is missing ends the command before the job is chosen."""
    code = """
import sys
from biphasic.processes import set_allocators
from biphasic import main
from unittest.mock import patch
imported = []
with patch("biphasic.main.set_allocators", lambda: (imported.append("torch" in sys.modules), set_allocators())):
    main.main(["missing.yaml"])
import torch
print(imported, torch._C._accelerator_getAllocatorSettings())
"""
    variables = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    variables["PYTHONPATH"] = str(Path(__file__).parents[1] / "src")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == [f"[False] {GROWING}"], done.stderr


def test_the_machine_is_described_as_by_composer_without_a_process() -> None:
    code = """
import subprocess, sys
from composer.utils import get_composer_env_dict
from composer.utils.collect_env import get_cpu_model
from biphasic.devices import describe_machine_once

expected = get_composer_env_dict()
get_cpu_model.cache_clear()
describe_machine_once()
sys.addaudithook(lambda event, _: event == "subprocess.Popen" and sys.exit("a process"))
assert get_composer_env_dict() == expected, expected
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
