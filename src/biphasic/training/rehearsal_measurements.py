"""Measure a rehearsal: the memory, FLOPs, dtypes and compiled graphs of each batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward

from biphasic.amounts import format_bytes
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.timeline import MLMPhase, RampConfig
from biphasic.model.layers import recomputed_layers
from biphasic.training.fake_gpu import GPU_BYTES, GPU_NAME, HostAndDevice, PeakMemory, known_numbers
from biphasic.training.step import PreparedBatch

MICROBATCHES = 2
"""Number of microbatches in a batch: the second one's gradients are added to the first one's."""


@dataclass
class Rehearsal:
    """What a rehearsal measured. Bytes are those of one rank."""

    ranks: int
    strategy: str = ""
    """How ranks share the model."""
    setup: str = ""
    """How the model is computed."""
    microbatch: int = 0
    """Number of rows of a microbatch."""
    state_bytes: int = 0
    """Weights, gradients and optimizer state after a batch."""
    peak_bytes: int = 0
    """The most that existed at a time during training."""
    validation_peak_bytes: int = 0
    flops: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """For each objective, the FLOPs of each batch: those counted, and those of `Architecture.hardware_flops`."""
    half_precision_share: float = 1.0
    """Smallest share of a batch's FLOPs whose operands are bf16."""
    graphs: Counter[tuple[str, bool, int]] = field(default_factory=Counter)
    """Number of graphs by function, whether it is differentiated, and number of tokens."""
    problems: list[str] = field(default_factory=list)

    @property
    def attention(self) -> str:
        """Name of the attention backend."""
        return self.setup.partition("attention ")[2].partition(" ")[0]

    def to_dict(self) -> dict[str, Any]:
        """Return the measurements as values of JSON."""
        graphs = [
            {"function": name, "training": training, "tokens": tokens, "count": count}
            for (name, training, tokens), count in self.graphs.items()
        ]
        return {**vars(self), "graphs": graphs}

    def describe(self) -> str:
        """Return the memory as lines of text, with what is counted and what isn't."""
        temporary = self.peak_bytes - self.state_bytes
        lines = [
            f"{format_bytes(self.peak_bytes)} a rank at most, of {format_bytes(GPU_BYTES)} of {GPU_NAME}, with {self.ranks} "
            f"rank{'s' * (self.ranks > 1)} and microbatches of {self.microbatch} rows ({self.setup}, "
            f"{self.strategy}):",
            f"{format_bytes(self.state_bytes)} weights, gradients and optimizer, {format_bytes(temporary)} activations and "
            "temporary tensors",
            "an estimate, from the shapes of the tensors of some batches; nothing ran on a GPU",
            "counted: every tensor, in blocks of 512 bytes; operations between matrix products as if they were not fused, "
            "except in the loss; rows that are full",
            "not counted: the CUDA context (about 0.5 GB), buffers of NCCL, workspaces of cuBLAS and of attention kernels, "
            "fragmentation of the allocator",
        ]
        if self.validation_peak_bytes:
            lines.insert(2, f"validation: {format_bytes(self.validation_peak_bytes)}")
        lines += [f"PROBLEM: {problem}" for problem in dict.fromkeys(self.problems)]
        return "\n".join(f"  {'memory estimate' * (index == 0):17}{line}" for index, line in enumerate(lines))


class Measuring(Callback):
    """Callback that compares FLOPs with the formula, and reads the memory after training and after validation."""

    reason = None  # of stopping; this callback is in the place of the one that stops runs

    def __init__(
        self,
        config: PretrainConfig,
        mode: HostAndDevice,
        memory: PeakMemory,
        attention: AttentionFlops,
        measured: Rehearsal,
    ):
        self.config, self.mode, self.memory, self.attention, self.measured = config, mode, memory, attention, measured

    def fit_start(self, state: State, logger: Logger) -> None:
        """Let the loaders give batches of the microbatch size that was measured."""
        microbatch = int(state.device_train_microbatch_size or 1)
        self.measured.microbatch = microbatch
        for loader in [state.train_dataloader, *(evaluator.dataloader.dataloader for evaluator in state.evaluators)]:
            loader.microbatch = microbatch  # pyright: ignore[reportOptionalMemberAccess]
        self.memory.reset()

    def batch_start(self, state: State, logger: Logger) -> None:
        """Begin to count."""
        batch: PreparedBatch = state.batch  # pyright: ignore[reportAssignmentType]
        self.mode.share = self._share(batch)
        microbatches = len(batch.lengths) / self.measured.microbatch
        self.attention.pairs = pairs_of(batch.segment_lengths, batch.causal) / microbatches
        self.mode.flops.clear()
        self.mode.nonzero = 0

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Record the FLOPs of the batch."""
        batch: PreparedBatch = state.batch  # pyright: ignore[reportAssignmentType]
        model: Any = getattr(state.model, "module", state.model)  # DDP's module
        recomputed = recomputed_layers(model.model.backbone)
        expected = model.model.architecture().hardware_flops(
            batch.segment_lengths, batch.causal, self.mode.nonzero, recomputed
        )
        counted = float(sum(self.mode.flops.values()))
        self.measured.flops.setdefault(batch.objective, []).append((counted, expected))
        share = self.mode.flops.get(torch.bfloat16, 0) / max(counted, 1.0)
        self.measured.half_precision_share = min(self.measured.half_precision_share, share)
        self.measured.problems += _misplaced(model, state.optimizers)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Record the memory of training."""
        self.measured.state_bytes, self.measured.peak_bytes = self.memory.current, self.memory.peak

    def eval_start(self, state: State, logger: Logger) -> None:
        """Begin a new peak."""
        self.memory.reset()

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        """Set the share of targets."""
        self.mode.share = self._share(state.batch)  # pyright: ignore[reportArgumentType]

    def eval_end(self, state: State, logger: Logger) -> None:
        """Record the memory of validation."""
        self.measured.validation_peak_bytes = max(self.measured.validation_peak_bytes, self.memory.peak)

    def _share(self, batch: PreparedBatch) -> float:
        """Return the share of positions that are predicted."""
        if batch.causal:
            return 1.0
        phase = None if batch.phase is None else self.config.objective.phases[batch.phase]
        ratio = phase.masking_ratio if isinstance(phase, MLMPhase) else self.config.evaluation.masking_ratio
        return max(ratio.start, ratio.end) if isinstance(ratio, RampConfig) else ratio


def _misplaced(model: nn.Module, optimizers: Any) -> list[str]:
    """Return which weights, gradients and optimizer states are not fp32 tensors on the GPU."""
    problems = []
    for name, parameter in model.named_parameters():
        tensors = {"weight": parameter, "gradient": parameter.grad}
        for optimizer in optimizers:
            tensors |= {key: x for key, x in optimizer.state.get(parameter, {}).items() if isinstance(x, Tensor)}
        for kind, tensor in tensors.items():
            if tensor is None or tensor.device.type != "cuda" or tensor.dtype != torch.float32:
                actual = "missing" if tensor is None else f"{tensor.dtype} on {tensor.device}"
                problems.append(f"{name}: {kind} is {actual}; expected fp32 on the GPU")
    return problems


class AttentionFlops:
    """FLOPs of attention between tokens that see each other. The kernels' own recomputation is not counted.

    Attributes:
        formulas: functions for `HostAndDevice`, by operator.
        pairs: number of pairs of tokens that see each other in a microbatch. FlexAttention's operator has no lengths.
    """

    def __init__(self) -> None:
        self.pairs = 0.0
        operators: Any = torch.ops.torch_attn
        self.formulas: dict[Any, Any] = {
            operators._varlen_attn: _varlen_flops,
            operators._varlen_attn_backward: _varlen_backward_flops,
            flex_attention: self._flex_flops,
            flex_attention_backward: lambda *given, **_: 2 * self._flex_flops(*given),
        }

    def _flex_flops(self, query: Tensor, *_: Any, **__: Any) -> float:
        return 4 * query.shape[1] * query.shape[3] * self.pairs


def pairs_of(lengths: list[int], causal: bool) -> int:
    """Return the number of pairs of a query and a key that see each other, in segments of the given lengths."""
    return sum(length * (length + 1) // 2 if causal else length**2 for length in lengths)


def _varlen_flops(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, *rest: Any, **_: Any) -> int:
    """Return the FLOPs of the two matrix products of attention. `rest`: cu_seqlens of keys, two lengths, and causal."""
    ends = known_numbers(cu_seqlens)
    assert ends is not None
    lengths = [end - start for start, end in pairwise(ends)]
    return 4 * query.shape[1] * query.shape[2] * pairs_of(lengths, rest[3])


def _varlen_backward_flops(grad: Tensor, *given: Any, **_: Any) -> int:
    """Return twice the forward pass; the kernels' own recomputation is not counted, as in `Architecture.flops`."""
    query, key, value, _out, _lse, cu_seqlens, *rest = given
    return 2 * _varlen_flops(query, key, value, cu_seqlens, *rest)
