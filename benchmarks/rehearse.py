"""Rehearse the pretraining YAMLs without a GPU: `make rehearse`.

Each YAML's first batches run through the run's own `prepare` and Composer's Trainer on a fake GPU (fake_gpu.py) and fake
ranks: every phase, the switch, the choice of the microbatch, and validation. Only data, tokenizer, checkpoints and loggers
are replaced. A line is printed for each YAML and number of ranks, with the memory of a rank: weights, gradients and
optimizer, and the peak (without CUDA's context, buffers of NCCL, workspaces and fragmentation). The exit status is 1 if a
check fails: tensors on different devices or of other dtypes, FLOPs that differ from the formula by more than 1%, and graph
breaks.
"""

import argparse
import io
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import numpy as np
import torch
from composer.core import Callback, State
from composer.loggers import Logger
from fake_gpu import FakeGPU, fake_gpu
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward

from biphasic import initial_model
from biphasic.amounts import format_bytes
from biphasic.config.load import load
from biphasic.config.model import architecture_of
from biphasic.config.pretrain import PretrainConfig
from biphasic.data.streaming import Batch, RowDataset, collate
from biphasic.data.streams import ReadingSettings
from biphasic.durations import Duration
from biphasic.errors import ConfigError, UserError
from biphasic.model import losses
from biphasic.model.layers import recomputed_layers
from biphasic.objectives.batch import segment_lengths, step_of
from biphasic.training import compute, recipe

ROOT = Path(__file__).parents[1]
YAMLS = (
    ("yamls/210m_biphasic.yaml", (1, 8, 64)),
    ("yamls/610m_biphasic.yaml", (1, 8, 64)),
    ("yamls/1b_biphasic.yaml", (1, 8, 64)),
    ("yamls/210m_clm.yaml", (8,)),
    ("yamls/210m_mlm.yaml", (8,)),
    ("yamls/quickstart.yaml", (1,)),
    ("recipes/mini/pretrain.yaml", (1,)),
)
"""The YAMLs that describe a new model, and their numbers of ranks."""
_WIDTHS = (26, 5, 26, 5, 10, 10, 13, 8, 6)
_HEADER = ("YAML", "ranks", "attention, strategy", "rows", "state", "peak", "FLOPs/formula", "seconds", "")
BATCHES_PER_PHASE = 2
MICROBATCHES = 2
"""Number of microbatches in a batch; two, so that gradients are accumulated."""
FLOPS_TOLERANCE = 0.01
HALF_PRECISION_SHARE = 0.99
"""Smallest share of a bf16 run's FLOPs that are in bf16. Rotary positions are computed in fp32."""
_LOSS = losses._loss_and_gradient_to_compile.__qualname__
_COMPILER = "aot_eager_decomp_partition"
"""A backend that needs no GPU, and stores the same activations for the backward pass as Inductor."""


@dataclass
class Rehearsal:
    """Measurements of a rehearsal. Bytes are those of one rank."""

    ranks: int
    strategy: str = ""
    """`ddp`, or `fsdp` with the number of ranks that share a model."""
    setup: str = ""
    """The line that `configure_compute` returned."""
    microbatch: int = 0
    state_bytes: int = 0
    """Weights, gradients and optimizer state after a batch."""
    peak_bytes: int = 0
    phases: dict[int, tuple[int, int]] = field(default_factory=dict)
    """For each phase, the number of rows in a microbatch and the peak memory."""
    validation_peak_bytes: int = 0
    flops: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """For each objective, each batch's FLOPs as counted, and as computed by `Architecture.flops`."""
    half_precision_share: float = 1.0
    """Smallest share of a batch's FLOPs whose operands are bf16."""
    problems: list[str] = field(default_factory=list)


def rehearse(config: PretrainConfig, ranks: int) -> Rehearsal:
    """Run the first batches of each phase of a checked configuration on a fake GPU. Return measurements and problems."""
    architecture = architecture_of(config.model)
    if architecture is None:
        raise UserError("model.init_from: a rehearsal can't load weights; give the model's dimensions in the YAML")
    measured = Rehearsal(ranks)
    counters.clear()
    torch._dynamo.reset()
    measuring = _Measuring(config, measured)
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(io.StringIO()))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        measuring.gpu = gpu = stack.enter_context(fake_gpu(ranks, measuring.attention_flops))
        config = _shortened(config, folder)
        for replacement in _replacements(config, gpu, architecture.vocab_size):
            stack.enter_context(replacement)
        said = list[str]()
        run: Any = SimpleNamespace(
            checkpoint=None,
            callbacks=[measuring],
            is_stopping=False,
            id=None,
            say=said.append,
            check_rows=lambda indexes: None,
            check_later_data=lambda streams: None,
        )
        trainer = recipe.prepare(config, run)
        measured.setup = next(line for line in said if "attention " in line)
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
    """Add problems: FLOPs that differ from the formula, wrong dtypes, and graph breaks."""
    problems = measured.problems
    for objective, batches in measured.flops.items():
        for counted, expected in batches:
            if abs(counted / expected - 1) > FLOPS_TOLERANCE:
                problems.append(f"{objective}: {counted:.4g} FLOPs were counted, and the formula gives {expected:.4g}")
    if config.precision == "amp_bf16" and measured.half_precision_share < HALF_PRECISION_SHARE:
        problems.append(f"only {measured.half_precision_share:.1%} of the FLOPs are in bf16")
    problems += [f"graph break: {reason}" for reason in counters["graph_break"]]


def _replacements(config: PretrainConfig, gpu: FakeGPU, vocab_size: int) -> Iterator[Any]:
    tokenizer = SimpleNamespace(vocab_size=vocab_size, mask_id=1, special_ids=(0,))
    build, compile_ = initial_model.build_language_model, torch.compile

    def on_gpu(*given: Any, **named: Any) -> Any:
        with torch.device("cuda"):
            return build(*given, **named)

    backend: Any = lookup_backend(_COMPILER)

    def fusing_backend(graph: Any, inputs: list[Any], **options: Any) -> Any:
        return gpu.fused(backend(graph, inputs, **options))

    def compile_function(function: Any, **named: Any) -> Any:
        # Modes are Inductor's.
        named |= {"backend": fusing_backend if function.__qualname__ == _LOSS else backend, "mode": None}
        return compile_(function, **named)

    yield mock.patch.object(torch, "compile", compile_function)
    yield mock.patch.object(compute, "select_kernels", return_value="kernels not tried")
    yield mock.patch.object(compute, "require_compiler")
    replaced = {
        "build_language_model": on_gpu, "build_loader": lambda reading, streams, rows, *_, **__: _Loader(reading, rows),
        "load_tokenizer": lambda *_: tokenizer,
        "conversion_record": lambda *_: {}, "read_conversions": lambda *_: {},
        "index_hashes": lambda *_: {}, "loggers": lambda *_: [],
        "TokenTexts": lambda _: SimpleNamespace(texts=[b"ab"] * vocab_size),
    }  # fmt: skip
    for name, replacement in replaced.items():
        yield mock.patch.object(recipe, name, replacement)


class _Loader:
    """A loader of rows with documents of random lengths. Some rows end with padding."""

    def __init__(self, reading: ReadingSettings, rows: int):
        self.reading, self.batch_size, self._iterator = reading, rows, None
        self.dataset = mock.Mock(spec=RowDataset, epoch_size=1 << 40)
        self.microbatch: int | None = None
        """Number of rows in a microbatch; None until it has been measured."""

    def __len__(self) -> int:
        return 1 << 30

    def __iter__(self) -> Iterator[Batch]:
        random, length = np.random.default_rng(0), self.reading.sequence_length
        rows = min(self.batch_size, MICROBATCHES * (self.microbatch or self.batch_size))
        for _ in range(len(self)):
            yield collate([{"tokens": np.ones(length, np.uint16), "lengths": _lengths(random, length), "row_id": row}
                           for row in range(rows)])  # fmt: skip


def _lengths(random: np.random.Generator, length: int) -> np.ndarray:
    lengths, left = list[int](), length
    while left > length // 50:
        lengths.append(int(min(left, random.integers(length // 50, length) + 1)))
        left -= lengths[-1]
    return np.array(lengths, np.uint32)


class _Measuring(Callback):
    """Callback that compares FLOPs with the formula, and reads the memory after training and after validation."""

    reason = None  # why the run stops, an attribute of the callback that this one replaces

    gpu: FakeGPU

    def __init__(self, config: PretrainConfig, measured: Rehearsal):
        self.config, self.measured = config, measured
        self.pairs = {True: 0.0, False: 0.0}
        """Mean number of (query, key) pairs in a microbatch's attention, by whether it is causal."""
        self.is_causal = False
        operators: Any = torch.ops.torch_attn
        self.attention_flops: dict[Any, Callable[..., float]] = {
            operators._varlen_attn: lambda *given, **_: self._flops(given[0], given[7], head_dim=2),
            operators._varlen_attn_backward: lambda *given, **_: 2 * self._flops(given[1], given[10], head_dim=2),
            flex_attention: lambda query, *_, **__: self._flops(query, self.is_causal, head_dim=3),
            flex_attention_backward: lambda query, *_, **__: 2 * self._flops(query, self.is_causal, head_dim=3),
        }

    def _flops(self, query: Tensor, causal: bool, head_dim: int) -> float:
        """Return the FLOPs of attention's two matrix products; dimension 1 of `query` is that of the heads."""
        return 4 * query.shape[1] * query.shape[head_dim] * self.pairs[causal]

    def fit_start(self, state: State, logger: Logger) -> None:
        microbatch = int(state.device_train_microbatch_size or 1)
        self.measured.microbatch = microbatch
        for evaluator in state.evaluators:
            evaluator.dataloader.dataloader.microbatch = microbatch  # pyright: ignore
        sizes = next(each.sizes for each in state.algorithms if isinstance(each, compute.MicrobatchSize))
        for inputs, size in zip(self.config.inputs, sizes, strict=True):
            state.train_dataloader.loader(inputs.source).microbatch = size  # pyright: ignore
        self.gpu.reset_peak()

    def batch_start(self, state: State, logger: Logger) -> None:
        batch: Any = state.batch
        self.gpu.share = self._share(batch)
        if step_of(batch).phase not in self.measured.phases:
            self.gpu.reset_peak()
        microbatches = len(batch["lengths"]) / int(state.device_train_microbatch_size or 1)
        lengths = segment_lengths(batch)
        self.is_causal = step_of(batch).causal
        self.pairs[True] = sum(length * (length + 1) // 2 for length in lengths) / microbatches
        self.pairs[False] = sum(length**2 for length in lengths) / microbatches
        self.gpu.flops.clear()
        self.gpu.nonzero = 0

    def after_train_batch(self, state: State, logger: Logger) -> None:
        batch: Any = state.batch
        model: Any = getattr(state.model, "module", state.model)  # DDP's module
        recomputed = recomputed_layers(model.model.backbone)
        expected = model.model.architecture().flops(
            segment_lengths(batch), step_of(batch).causal, self.gpu.nonzero, recomputed
        )
        counted = float(sum(self.gpu.flops.values()))
        self.measured.flops.setdefault(step_of(batch).objective.name, []).append((counted, expected))
        share = self.gpu.flops.get(torch.bfloat16, 0) / max(counted, 1.0)
        self.measured.half_precision_share = min(self.measured.half_precision_share, share)
        self.measured.problems += _misplaced(model, state.optimizers)

    def batch_end(self, state: State, logger: Logger) -> None:
        batch: Any = state.batch
        self.measured.state_bytes = self.gpu.current
        self.measured.peak_bytes = max(self.measured.peak_bytes, self.gpu.peak)
        self.measured.phases[step_of(batch).phase or 0] = int(state.device_train_microbatch_size or 1), self.gpu.peak

    def eval_start(self, state: State, logger: Logger) -> None:
        self.gpu.reset_peak()

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        self.gpu.share = self._share(state.batch)  # pyright: ignore[reportArgumentType]

    def eval_end(self, state: State, logger: Logger) -> None:
        self.measured.validation_peak_bytes = max(self.measured.validation_peak_bytes, self.gpu.peak)

    def _share(self, batch: Any) -> float:
        """Return the largest share of positions that are predicted."""
        objective = step_of(batch).objective
        return max(objective.predicted_share(0.0), objective.predicted_share(1.0))


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


def main() -> int:
    parser = argparse.ArgumentParser(description="Rehearse the pretraining YAMLs without a GPU.")
    parser.add_argument("files", nargs="*", help="YAMLs; default: those that describe a new model")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8], help="numbers of ranks of the given YAMLs")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="replace values, e.g. microbatch_size=2")
    parser.add_argument("--processes", type=int, default=2, help="number of rehearsals at a time")
    options = parser.parse_args()
    runs = [(file, options.ranks) for file in options.files] or YAMLS
    _print_row(_HEADER)
    failures = []
    processes = min(options.processes, sum(len(counts) for _, counts in runs))
    # Each in a process of its own, because a rehearsal replaces parts of PyTorch; slow imports are made once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([recipe.__name__, "torch._dynamo"])
    with ProcessPoolExecutor(processes, context, max_tasks_per_child=1) as pool:
        futures = {
            (file, ranks): pool.submit(_rehearse, file, ranks, options.set) for file, counts in runs for ranks in counts
        }
        for (file, ranks), future in futures.items():
            columns, problems = future.result()
            _print_row(columns)
            failures += [f"{file}, {ranks} ranks: {problem}" for problem in dict.fromkeys(problems)]
    print("\n".join(failures) or "every check passed", flush=True)
    return 1 if failures else 0


def _rehearse(file: str, ranks: int, overrides: list[str]) -> tuple[tuple[str, ...], list[str]]:
    os.environ.setdefault("BUCKET", "unused")

    begin = time.monotonic()
    try:
        config = load(ROOT / file, overrides, ranks)
        assert isinstance(config, PretrainConfig)
        rehearsal = rehearse(config, ranks)
    except Exception as error:  # what fails in one YAML doesn't hide the others
        if not isinstance(error, ConfigError | UserError):
            traceback.print_exc()
        return (file, f"{ranks}", *[""] * 6, "FAILED"), [f"{type(error).__name__}: {error}"]
    return _columns(file, rehearsal, time.monotonic() - begin), rehearsal.problems


def _columns(file: str, rehearsal: Rehearsal, seconds: float) -> tuple[str, ...]:
    ratios = [counted / expected for batches in rehearsal.flops.values() for counted, expected in batches]
    memory = (format_bytes(rehearsal.state_bytes), format_bytes(rehearsal.peak_bytes))
    flops = f"{min(ratios):.4f}" if max(ratios) - min(ratios) < 5e-5 else f"{min(ratios):.3f}-{max(ratios):.3f}"
    verdict = "FAILED" if rehearsal.problems else "ok"
    attention, rows = rehearsal.setup.partition("attention ")[2].partition(" ")[0], f"{rehearsal.microbatch}"
    setup = f"{attention}, {rehearsal.strategy}"
    return file, f"{rehearsal.ranks}", setup, rows, *memory, flops, f"{seconds:.0f}", verdict


def _print_row(columns: tuple[str, ...]) -> None:
    print("  ".join(f"{text:{width}}" for text, width in zip(columns, _WIDTHS, strict=True)).rstrip(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
