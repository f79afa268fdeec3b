"""The copy of the training state in host memory, which is written while training goes on."""

import gc
from typing import Any

import pytest
import torch

from biphasic.checkpointing.save import StagingBuffer
from biphasic.errors import UserError


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


def test_tensors_that_share_memory_share_it_in_the_copy() -> None:
    """A tied head is written once; a slice keeps its place."""
    weight = torch.arange(6.0).reshape(2, 3)
    model = {
        "embedding": weight,
        "head": weight.detach(),
        "row": weight[1],
        "transposed": weight.T,
        "empty": weight[:0],
    }
    buffer = StagingBuffer()
    for _ in range(2):
        copied = buffer.copy({"state": {"model": model}, "rng": []})["state"]["model"]
        assert all(torch.equal(copied[name], tensor) for name, tensor in model.items())
        assert {copied[name].untyped_storage().data_ptr() for name in ("embedding", "head", "row", "transposed")} == {
            copied["embedding"].untyped_storage().data_ptr()
        }
        assert copied["transposed"].stride() == weight.T.stride()
        assert copied["embedding"].data_ptr() != weight.data_ptr()


def test_an_optimizer_state_that_appears_later_gets_memory_of_its_own() -> None:
    """An optimizer has no state before its first step, or after it was reset."""
    content, buffer = state_of("cpu"), StagingBuffer()
    without = state_of("cpu")
    without["state"]["optimizers"]["AdamW"]["state"] = {}
    for each in (without, content, without, content):
        state = buffer.copy(each)["state"]
        assert state["model"]["w"].tolist() == [1.0] * 3
        if each is content:
            assert state["optimizers"]["AdamW"]["state"]["w"]["exp_avg"].tolist() == [2.0] * 3


def test_large_tensors_of_a_gpu_are_copied_to_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, CUDA's functions are replaced: they record which memory is pinned, and when it is given back."""
    pinned: set[int] = set()
    result = 0

    class Cudart:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            pinned.add(address)
            return result

        def cudaHostUnregister(self, address: int) -> int:
            pinned.remove(address)
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(torch.UntypedStorage, "is_cuda", True)
    content, buffer = state_of("cpu"), StagingBuffer()
    content["state"]["model"]["large"] = torch.ones(1 << 18)
    copied = [buffer.copy(content)["state"]["model"] for _ in range(2)]
    assert pinned == {copied[1]["large"].data_ptr()} == {copied[0]["large"].data_ptr()}
    del buffer, copied
    gc.collect()
    assert not pinned
    result = 2  # cudaErrorMemoryAllocation
    with pytest.raises(
        UserError, match=r"checkpoint: 1\.05 MB of host memory .* can't be pinned .* error 2\): free host memory"
    ):
        StagingBuffer().copy(content)
