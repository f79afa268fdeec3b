"""Rehearse the first batches of a pretraining run without GPUs, and measure their memory and FLOPs.

The run's own `prepare` and Composer's Trainer run on a fake GPU (`biphasic.training.fake_gpu`): each phase, the switch, the
choice of the microbatch, and validation. Only the data, the tokenizer, checkpoints and loggers are replaced.
"""

from __future__ import annotations

import functools
import io
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

from biphasic.config.durations import Duration
from biphasic.config.model import architecture_of
from biphasic.config.pretrain import PretrainConfig
from biphasic.data.streaming import Batch, RowDataset, collate
from biphasic.errors import UserError
from biphasic.model import backbone, losses
from biphasic.training import compute, recipe
from biphasic.training.fake_gpu import PeakMemory, fake_gpu
from biphasic.training.rehearsal_measurements import MICROBATCHES, AttentionFlops, Measuring, Rehearsal
from biphasic.training.step import EVALUATIONS

BATCHES_PER_PHASE = 2
FLOPS_TOLERANCE = 0.01
HALF_PRECISION_SHARE = 0.99
"""Smallest share of a bf16 run's FLOPs that are in bf16. Rotary positions are computed in fp32."""
_LOSS = losses._loss_and_gradient_to_compile.__qualname__
_COMPILER = "aot_eager_decomp_partition"
"""Compiles for no GPU, and stores the same activations for the backward pass as Inductor."""


def rehearse(config: PretrainConfig, ranks: int) -> Rehearsal:
    """Run the first batches of each phase of a configuration on a fake GPU.

    Args:
        config: a checked configuration, whose model is described by the YAML.
        ranks: number of ranks of the run.

    Returns:
        Measurements, and the problems that were found.

    Raises:
        UserError: the model is `init_from` another one.
        Exception: anything that the run itself raises, such as for tensors on different devices.
    """
    architecture = architecture_of(config.model)
    if architecture is None:
        raise UserError("a rehearsal needs a model that the YAML describes; model.init_from has weights to load")
    measured = Rehearsal(ranks)
    counters.clear()
    torch._dynamo.reset()
    attention = AttentionFlops()
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(io.StringIO()))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        mode, memory = stack.enter_context(fake_gpu(ranks, attention.formulas))
        config = _shortened(config, folder)
        for replacement in _replacements(config, measured, memory):
            stack.enter_context(replacement)
        measuring = Measuring(config, mode, memory, attention, measured)
        run: Any = SimpleNamespace(
            checkpoint=None,
            callbacks=[measuring],
            is_stopping=False,
            say=lambda text: None,
            check_rows=lambda indexes: None,
        )
        trainer = recipe.prepare(config, run)
        sharded = trainer.state.fsdp_config
        measured.strategy = "ddp" if sharded is None else f"fsdp over {sharded.data_parallel_shard_degree} ranks"
        trainer.fit()
        trainer.close()
        torch._dynamo.reset()
    _check(config, measured)
    return measured


def _shortened(config: PretrainConfig, folder: str) -> PretrainConfig:
    """Return the configuration with `BATCHES_PER_PHASE` batches in each phase, and one validation at the end."""
    phases = [
        phase.model_copy(update={"until": Duration((index + 1) * BATCHES_PER_PHASE, "ba")})
        for index, phase in enumerate(config.objective.phases)
    ]
    phases[-1] = phases[-1].model_copy(update={"until": None})
    return config.model_copy(
        update={
            "output": folder,
            "start_from": None,
            "max_duration": Duration(len(phases) * BATCHES_PER_PHASE, "ba"),
            "objective": config.objective.model_copy(update={"phases": phases}),
            "evaluation": config.evaluation.model_copy(update={"interval": None, "batches": 1}),
        }
    )


def _check(config: PretrainConfig, measured: Rehearsal) -> None:
    """Add problems: FLOPs that differ from the formula, wrong dtypes, graph breaks, and repeated compilations."""
    problems = measured.problems
    for objective, batches in measured.flops.items():
        for counted, expected in batches:
            if abs(counted / expected - 1) > FLOPS_TOLERANCE:
                problems.append(f"{objective}: {counted:.4g} FLOPs were counted, and the formula gives {expected:.4g}")
    if config.precision == "amp_bf16" and measured.half_precision_share < HALF_PRECISION_SHARE:
        problems.append(f"only {measured.half_precision_share:.1%} of the FLOPs are in bf16")
    problems += [f"graph break: {reason}" for reason in counters["graph_break"]]
    trained = len({phase.name for phase in config.objective.phases})
    for (name, training, tokens), count in measured.graphs.items():
        expected = trained if training else len(EVALUATIONS)
        if "Layer" in name and count > expected:
            problems.append(f"{name} was compiled {count} times for {tokens} tokens; expected {expected}")


def _replacements(config: PretrainConfig, measured: Rehearsal, memory: PeakMemory) -> Iterator[Any]:
    """Yield patches of what the rehearsal has not: data, tokenizer, checkpoints, loggers, kernels and their compiler."""
    tokenizer = SimpleNamespace(
        vocab_size=getattr(architecture_of(config.model), "vocab_size", 0), mask_id=1, special_ids=(0,)
    )
    configure, build, compile_ = compute.configure_compute, backbone.build_language_model, torch.compile

    def on_gpu(*given: Any, **named: Any) -> Any:
        with torch.device("cuda"):
            return build(*given, **named)

    def record_setup(*given: Any) -> str:
        measured.setup = configure(*given)
        return measured.setup

    def rows(data: Any, streams: Any, rows: int, seed_: int, *, train: bool, **_: Any) -> _Rows:
        return _Rows(config, rows, MICROBATCHES if train else 1)

    backend: Any = lookup_backend(_COMPILER)

    @functools.cache  # layers share compilations only with the same backend
    def recording_backend(name: str) -> Any:
        def compile_graph(graph: Any, inputs: list[Any], **options: Any) -> Any:
            tokens = max((int(x.shape[-2]) for x in inputs if isinstance(x, Tensor) and x.dim() >= 2), default=0)
            measured.graphs[name, torch.is_grad_enabled(), tokens] += 1
            compiled = backend(graph, inputs, **options)
            return memory.fused(compiled) if name == _LOSS else compiled

        return compile_graph

    yield mock.patch.object(
        torch,
        "compile",
        lambda function, **named: compile_(function, **named, backend=recording_backend(function.__qualname__)),
    )
    yield mock.patch.object(compute, "select_kernels", return_value="kernels not tried")
    replaced = {
        "build_language_model": on_gpu, "configure_compute": record_setup, "build_loader": rows,
        "load_tokenizer": lambda *_: tokenizer,
        "conversion_record": lambda *_: {}, "index_hashes": lambda *_: {}, "loggers": lambda *_: [],
        "has_gpu": torch.cuda.is_available,
    }  # fmt: skip
    for name, replacement in replaced.items():
        yield mock.patch.object(recipe, name, replacement)


class _Rows:
    """A loader of rows whose documents have random lengths. Some rows end with padding."""

    def __init__(self, config: PretrainConfig, rows: int, microbatches: int):
        self.config, self.rows, self.microbatches = config, rows, microbatches
        self.batch_size, self.dataset = rows, object.__new__(_NoDataset)
        self.microbatch: int | None = None
        """Number of rows in a microbatch, if it is measured first."""

    def __len__(self) -> int:
        return len(self.config.objective.phases) * BATCHES_PER_PHASE

    def __iter__(self) -> Iterator[Batch]:
        random = np.random.default_rng(0)
        rows = min(self.rows, self.microbatches * (self.microbatch or self.rows))
        for _ in range(len(self)):
            yield collate([{"tokens": np.ones(self._length, np.uint16), "lengths": self._lengths(random), "row_id": row}
                           for row in range(rows)])  # fmt: skip

    @property
    def _length(self) -> int:
        return self.config.data.sequence_length

    def _lengths(self, random: np.random.Generator) -> np.ndarray:
        lengths, left = list[int](), self._length
        while left > self._length // 50:
            lengths.append(int(min(left, random.integers(self._length // 50, self._length) + 1)))
            left -= lengths[-1]
        return np.array(lengths, np.uint32)


class _NoDataset(RowDataset):
    """A dataset that is never read."""

    @property
    def first_epoch(self) -> int:
        return 0

    @property
    def skipped_batches(self) -> int:
        return 0

    def __del__(self) -> None:
        pass  # nothing was opened
