"""Run code for a GPU and many ranks on a machine that has neither, with tensors that have no values.

Tensors on `cuda` are PyTorch's fake tensors: they have shapes, dtypes and a device, but no data. Tensors on the CPU are
real. The process group is PyTorch's fake one, whose collectives do nothing. PyTorch has no public interface for all of
this, so `fake_gpu` replaces private parts. It is tested with torch 2.11 and with the version in requirements.lock.
"""

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as torch_dist
import torch.distributed._tools.fake_collectives  # registers collectives of fake tensors
from composer.devices import DeviceGPU
from composer.distributed import dist_strategy
from composer.models import ComposerModel
from composer.trainer import trainer as composer_trainer
from composer.utils import dist
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import distributed as ddp
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from biphasic.model.architecture import RANKS_OF_A_MACHINE

GPU_NAME = "NVIDIA H100 80GB HBM3"
GPU_BYTES = 79 * 2**30
"""Memory that PyTorch reports for this GPU."""
_BLOCK = 512
"""Size in bytes of the blocks in which PyTorch allocates GPU memory."""
_CUDA = torch.device("cuda", 0)
_KNOWN_NUMBERS = 16
"""Maximum number of elements of a GPU tensor whose values are kept on the host."""
_aten: Any = torch.ops.aten


class FakeGPU(TorchDispatchMode):
    """Mode that runs operators on fake tensors, and counts the bytes and FLOPs that they would take on the GPU.

    Programs read numbers from the GPU, such as losses, counts and flags. Small tensors that were computed from values
    of the host keep these values, also through collectives. For other tensors, floating-point numbers are read as 1,
    and integers and flags as 0. `nonzero` returns a `share` of a tensor's elements; `flops` are by the dtype of an
    operator's second tensor.
    """

    supports_higher_order_operators = True

    def __init__(self, attention_flops: dict[Any, Callable[..., float]]):
        super().__init__()
        self.share, self.nonzero = 1.0, 0
        self.flops: dict[torch.dtype, float] = {}
        self.formulas = {**flop_registry, _aten.addmm_: flop_registry[_aten.addmm], **attention_flops}
        self.current = self.peak = 0
        self._bytes: dict[int, int] = {}
        self._is_fused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, on the host if it has no fake tensors, and count its FLOPs and the memory of its results."""
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        is_operator = isinstance(func, torch._ops.OpOverload)
        if is_operator:
            device = torch.device(kwargs.get("device") or "cpu")
            if device.type == "cpu" and not any(isinstance(x, FakeTensor) for x in tensors):
                result = _on_host(func, args, kwargs)
                self._track(result)  # sharded tensors have local parts on the GPU
                return result
            if device.type == "meta" and func is _aten._to_copy.default and _only_moves(kwargs):
                return _aten.alias(*args)  # see `_device`
            if func is _aten._local_scalar_dense.default:
                return _number(args[0])
            if func is _aten.copy_.default and not isinstance(args[0], FakeTensor):
                return args[0]  # DDP copies back the values that rank 0, this rank, has just sent
        if func is _aten.addmm.dtype_out:
            # torch 2.11 neither runs it on fake tensors nor counts its FLOPs.
            func, args = _aten.addmm.out, (args[0], *(matrix.to(args[3]) for matrix in args[1:3]))
        if func is _aten.nonzero.default:
            count = round(self.share * args[0].numel())
            self.nonzero += count
            result = torch.empty((count, args[0].dim()), dtype=torch.int64, device=args[0].device)
        else:
            result = func(*args, **kwargs)
        if is_operator:
            _keep_values(func, tensors, args, kwargs, result)
        if (formula := self.formulas.get(func._overloadpacket if is_operator else func)) is not None:
            dtype = tensors[1].dtype  # the first may be an fp32 sum, to which a product of bf16 matrices is added
            self.flops[dtype] = self.flops.get(dtype, 0) + formula(*args, **kwargs, out_val=result)
        if not self._is_fused:
            self._track(result)
        return result

    def fused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with only its results counted as memory, as if the compiler fused all operations."""

        def run(*args: Any) -> Any:
            self._is_fused = True
            try:
                results = function(*args)
            finally:
                self._is_fused = False
            self._track(results)
            return results

        return run

    def reset_peak(self, *_: Any) -> None:
        self.peak = self.current

    def _track(self, results: Any) -> None:
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and tensor.device.type == "cuda":
                for storage in get_untyped_storages(tensor):
                    if (address := storage._cdata) not in self._bytes:
                        weakref.finalize(storage, self._set_bytes, address, None).atexit = False
                    self._set_bytes(address, storage.nbytes())
        self.peak = max(self.peak, self.current)

    def _set_bytes(self, address: int, size: int | None) -> None:
        """Set the size of a storage, or None after it was freed."""
        blocks = -(-(size or 0) // _BLOCK) * _BLOCK
        self.current += blocks - self._bytes.pop(address, 0)
        if size is not None:
            self._bytes[address] = blocks

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Resize a storage. FSDP does so to free gathered weights, without calling an operator."""
        _resize(storage, size)
        if storage._cdata in self._bytes:
            self._set_bytes(storage._cdata, size)


_resize = torch.UntypedStorage.resize_


def _on_host(func: Any, args: Any, kwargs: Any) -> Any:
    # Pinned memory needs a driver.
    if func is _aten._pin_memory.default:
        return args[0]
    if func is _aten.is_pinned.default:
        return False
    with _disable_current_modes():
        return func(*args, **kwargs)


def _number(tensor: Any) -> bool | int | float:
    if _is_known(tensor):
        with _disable_current_modes():
            return tensor._values_on_host.item()
    return False if tensor.dtype == torch.bool else 1.0 if tensor.dtype.is_floating_point else 0


def _is_known(tensor: Any) -> bool:
    return type(tensor) is Tensor or getattr(tensor, "_values_on_host", None) is not None


def _keep_values(func: Any, tensors: list[Tensor], args: Any, kwargs: Any, result: Any) -> None:
    """Compute a small result on the host too, if the values of all arguments are known there."""
    output: Any = args[0] if func._schema.is_mutable else result
    if func.namespace == "c10d" or not isinstance(output, FakeTensor) or output.numel() > _KNOWN_NUMBERS:
        return
    if tensors and all(map(_is_known, tensors)):
        named = {name: value for name, value in kwargs.items() if name != "device"}
        on_host = tree_map(lambda x: getattr(x, "_values_on_host", x), (args, named))
        with _disable_current_modes():
            output._values_on_host = func(*on_host[0], **on_host[1])  # pyright: ignore[reportAttributeAccessIssue]
    elif func._schema.is_mutable:
        output._values_on_host = None  # pyright: ignore[reportAttributeAccessIssue]


def _only_moves(kwargs: dict[str, Any]) -> bool:
    return {name for name, value in kwargs.items() if value is not None} <= {"device", "non_blocking"}


class _Stream(mock.MagicMock):
    """A stream or event of the GPU, which does nothing, because operators run in program order."""

    device, device_index, device_type, stream_id = _CUDA, 0, 1, 0


def _device(tensor: Any) -> torch.device:
    """Return the device of a fake tensor for C++ code: `meta` instead of `cuda`.

    For a GPU, autograd would ask the driver for its streams. Python code sees `cuda`, by a property of fake tensors.
    Where C++ code creates a new tensor on the same device, `meta`, it is created on `cuda`.
    """
    return torch.device("meta") if tensor.fake_device.type == "cuda" else tensor.fake_device


def _seen_by_python(tensor: Any) -> torch.device:
    device = torch._C.TensorBase.device.__get__(tensor)  # pyright: ignore[reportAttributeAccessIssue]
    return _CUDA if device.type == "meta" else device


def _replacements(ranks: int, gpu: FakeGPU) -> Iterator[Any]:
    # Devices, see `_device`
    ask_subclass, dispatch = FakeTensor.__torch_dispatch__, FakeTensorMode.dispatch

    def ask(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return _device(args[0])
        return ask_subclass(func, types, args, kwargs or {})

    def on_cuda(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
            kwargs = {**kwargs, "device": _CUDA}
        return dispatch(mode, func, types, args, kwargs)

    yield mock.patch.object(FakeTensor, "__torch_dispatch__", classmethod(ask))
    handlers: Any = fake_tensor._DISPATCH_META_HANDLERS
    yield mock.patch.dict(handlers, {torch.ops.prim.device.default: lambda args: _device(args[0])})
    yield mock.patch.object(FakeTensorMode, "dispatch", on_cuda)
    yield mock.patch.object(FakeTensorMode, "avoid_device_init", True)
    # In torch 2.11 it creates a real tensor on an available GPU.
    yield mock.patch.object(fake_tensor, "init_gpu_context", return_value=None)
    for kind in (FakeTensor, FunctionalTensor, DTensor):
        if kind is not FakeTensor:
            yield mock.patch.object(kind, "device", property(_seen_by_python), create=True)
        for name, device in (("is_cuda", "cuda"), ("is_meta", "meta")):
            is_on = property(lambda tensor, device=device: tensor.device.type == device)
            yield mock.patch.object(kind, name, is_on, create=True)

    linear = functional.linear

    def cast_and_multiply(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Cast as autocast does for `cuda`; C++ code sees `meta`, which has no autocast."""
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            inputs, weight, bias = inputs.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return linear(inputs, weight, bias)

    yield mock.patch.object(functional, "linear", cast_and_multiply)

    # The driver
    local_ranks = min(ranks, RANKS_OF_A_MACHINE)
    properties = SimpleNamespace(
        name=GPU_NAME, total_memory=GPU_BYTES, major=9, minor=0, multi_processor_count=132, warp_size=32
    )
    without_result = ("_lazy_init", "set_device", "synchronize", "empty_cache", "manual_seed_all", "set_rng_state")
    answers: dict[str, Any] = {
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
        **dict.fromkeys(without_result),
        **{"is_current_stream_capturing": False, "current_device": 0, "device_count": local_ranks},
        **{"get_device_properties": properties, "get_device_capability": (9, 0), "get_device_name": GPU_NAME},
        **{"stream": nullcontext(), "current_stream": _Stream()},
        **{"memory_stats": {"num_alloc_retries": 0}, "get_rng_state": torch.zeros(16, dtype=torch.uint8)},
    }
    for name, answer in answers.items():
        yield mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    yield mock.patch.multiple(
        torch.cuda,
        Stream=_Stream,
        Event=_Stream,
        mem_get_info=lambda *_: (GPU_BYTES - gpu.current, GPU_BYTES),
        memory_reserved=lambda *_: gpu.current,
        memory_allocated=lambda *_: gpu.current,
        max_memory_allocated=lambda *_: gpu.peak,
        reset_peak_memory_stats=gpu.reset_peak,
    )
    yield mock.patch.object(torch.UntypedStorage, "resize_", lambda *given: gpu.resize(*given))

    # Other ranks
    first = dict.fromkeys(("RANK", "LOCAL_RANK", "NODE_RANK"), "0")
    yield mock.patch.dict(os.environ, {**first, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(local_ranks)})
    yield mock.patch.object(dist, "all_gather_object", lambda obj: [obj] * ranks)
    yield mock.patch.object(dist, "broadcast_object_list", return_value=None)
    yield mock.patch.object(DeviceGPU, "dist_backend", "fake")
    yield mock.patch.object(torch_dist.ProcessGroup, "set_timeout", return_value=None)  # torch 2.11's fake one refuses
    yield mock.patch.object(ddp, "_verify_param_shape_across_processes", return_value=None)
    wrap = dist_strategy.prepare_ddp_module
    yield mock.patch.object(composer_trainer, "prepare_ddp_module", lambda *given: _without_all_reduce(wrap(*given)))
    # Parameters are created on the GPU, because a fake tensor can't change its device in place.
    move = DeviceGPU.module_to_device
    yield mock.patch.object(
        DeviceGPU,
        "module_to_device",
        lambda device, module: module if isinstance(module, ComposerModel) else move(device, module),
    )


def _without_all_reduce(model: Any) -> Any:
    """Let DDP take this rank's gradients as the mean. Its own hook would read a tensor from the fake group's result."""

    def keep(state: object, bucket: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    keep.__annotations__.clear()  # DDP compares them with types, and here they are strings
    model.register_comm_hook(None, keep)
    return model


@contextmanager
def fake_gpu(ranks: int, attention_flops: dict[Any, Callable[..., float]]) -> Iterator[FakeGPU]:
    """Make this process rank 0 of `ranks` processes with a GPU each, up to 8 on a node, within the context.

    `attention_flops` has formulas for attention operators, whose FLOPs depend on tensors' values.
    """
    torch._C._ensureCUDADeviceGuardSet()  # pyright: ignore[reportAttributeAccessIssue] - guards that need no driver
    gpu = FakeGPU(attention_flops)
    with ExitStack() as stack:
        for replacement in _replacements(ranks, gpu):
            stack.enter_context(replacement)
        torch_dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        stack.callback(torch_dist.destroy_process_group)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield stack.enter_context(gpu)
