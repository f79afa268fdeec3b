"""The device of a rank."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from composer.devices import DeviceCPU, DeviceGPU

import biphasic
from biphasic.devices import rank_device, require_precision, supports_bf16
from biphasic.errors import UserError

SOURCES = [*Path(next(iter(biphasic.__path__))).rglob("*.py")]


def test_without_a_gpu_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(rank_device(), DeviceCPU)


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
    with pytest.raises(UserError, match=r"precision: amp_bf16 needs a GPU .*\(there is none here\)"):
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
