"""The copy of the training state in host memory, which is written while training goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.staging import StagingOptions

from biphasic.checkpointing import save
from biphasic.checkpointing.save import StagingBuffer


def state_of(device: str) -> dict[str, Any]:
    """A checkpoint's content, whose optimizer counts its steps in host memory."""
    weight, step = torch.ones(3, device=device), torch.tensor(1.0)
    optimizer = {
        "state": {"w": {"exp_avg": weight + 1, "step": step}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 1)}],
    }
    return {"state": {"model": {"w": weight}, "optimizers": {"AdamW": optimizer}, "timestamp": [1]}, "rng": []}


def test_a_state_that_composer_has_offloaded_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With FSDP on GPUs the tensors are copies already. Without a GPU they are the model's own."""
    content = state_of("cpu")
    for offloaded in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda offloaded=offloaded: offloaded)
        copied = StagingBuffer().copy(content)["state"]
        assert (copied["model"]["w"] is content["state"]["model"]["w"]) == offloaded
        states = [state["optimizers"]["AdamW"] for state in (copied, content["state"])]
        assert (states[0]["state"]["w"]["exp_avg"] is states[1]["state"]["w"]["exp_avg"]) == offloaded
        assert states[0]["state"]["w"]["exp_avg"].tolist() == [2.0] * 3
        assert states[0]["state"]["w"]["step"] is not states[1]["state"]["w"]["step"]
        assert states[0]["param_groups"] == states[1]["param_groups"]
        assert states[0]["param_groups"][0] is not states[1]["param_groups"][0]
        assert copied["timestamp"] == [1] and copied["timestamp"] is not content["state"]["timestamp"]


def test_the_memory_of_a_copy_is_reused() -> None:
    content, buffer = state_of("cpu"), StagingBuffer()
    weight = content["state"]["model"]["w"]
    first = buffer.copy(content)["state"]["model"]["w"]
    weight += 1
    assert first.tolist() == [1.0] * 3
    second = buffer.copy(content)["state"]["model"]["w"]
    assert second.tolist() == [2.0] * 3 and second.data_ptr() == first.data_ptr()


def test_a_gpu_s_state_is_copied_to_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for a GPU."""
    options: list[StagingOptions] = []

    class Stager:
        def __init__(self, given: StagingOptions):
            options.append(given)

        def stage(self, state: dict[str, Any]) -> dict[str, Any]:
            return {"tensors": [torch.zeros(tensor.shape) for tensor in state["tensors"]]}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(save, "DefaultStager", Stager)
    copied = StagingBuffer().copy(state_of("meta"))["state"]
    assert options[0].use_pinned_memory and copied["model"]["w"].device.type == "cpu"
    assert copied["optimizers"]["AdamW"]["state"]["w"]["exp_avg"].device.type == "cpu"
