"""Training on one GPU: largest microbatch, tokens/s, MFU and peak memory of the paper's three sizes.

    PYTHONPATH=src python benchmarks/gpu.py [--sizes 1b 210m 610m] [--rows N] [--variants NAME ...] [--seconds 500]

Needs this repository, PyTorch (2.11 or newer) and transformers (5.17 or newer), and no other dependency of Biphasic. Without
a CUDA device it prints a message and ends. Every step is a complete one: bf16 with fp32 weights, packed documents, the loss
of the phase, clipping, fused AdamW, over `STEP_ROWS` rows in microbatches. MFU counts the documents' tokens (without
padding), the pairs within attention's reach, and the computed logits, over the dense peak of the data sheet. The rates of a
large matrix product and a large copy in the same run are reported beside it. Results are written after each measurement, to
gpu-NAME.{json,md} in `--results`, so that an interrupted run keeps what it has measured.

The search for the largest microbatch compiles the layers for three or four numbers of rows; `--rows` replaces it.
"""

import argparse
import gc
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_report import Report, describe_machine, roofline, synchronize
from torch import Tensor

from biphasic.devices import peak_flops
from biphasic.model import layers, losses
from biphasic.model.architecture import PRESETS, Architecture
from biphasic.model.attention import BACKEND_FUNCTIONS, backend_available, choose_backend
from biphasic.model.auto_microbatch import available_bytes, even_microbatch, largest_microbatch, peak_bytes
from biphasic.model.kernels import select_kernels
from biphasic.model.language_model import LanguageModel, from_hf_config, llama_config
from biphasic.model.segments import Segments, rounded_count
from biphasic.objectives.targets import Vocabulary, clm_targets, mlm_inputs_and_targets

RESULTS = Path(__file__).parent / "results"
LENGTH = 2048
STEP_ROWS = 48
"""Rows of a step: the paper's batch (1,152 rows of 2,048 tokens) over 24 GPUs."""
MEAN_DOCUMENT = 1000
"""Mean tokens of a document, roughly as in FineWeb-Edu; log-normal, cut at the row's end."""
MASKING_RATIO = 0.4
PHASES = ("clm", "mlm")


@dataclass(frozen=True)
class Variant:
    """A way to compute the layers."""

    compile: bool = True
    """Compile the layers and the loss."""
    mode: str = "default"
    """The layers' mode of torch.compile."""
    residual: str = "fp32"
    """`compute.residual`."""
    attention: str = "auto"
    """`auto`, a backend, or `varlen by` and the name of its kernels in a YAML."""
    packing: str = "documents"
    """`documents`; `whole`: each row is one segment; `padded`: each row is one document and padding."""
    loss_chunks: float = 1.0
    """Size of the loss's chunks of logits, over the size that training uses."""

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Set what the loss reads from a module variable."""
        share = losses.GPU_SHARE
        losses.GPU_SHARE = share * self.loss_chunks
        try:
            yield
        finally:
            losses.GPU_SHARE = share


VARIANTS = {
    "residual": Variant(residual="bf16"),
    "flex": Variant(attention="flex"),
    "chunks-4": Variant(loss_chunks=4.0),
    "chunks-0.25": Variant(loss_chunks=0.25),
    "cudnn": Variant(attention="varlen by cudnn"),
    "fa2": Variant(attention="varlen by fa2"),
    "sdpa": Variant(attention="sdpa"),
    "whole": Variant(packing="whole"),
    "padded": Variant(packing="padded"),
    "eager": Variant(compile=False),
    "autotune": Variant(mode="max-autotune-no-cudagraphs"),
}
"""The variants that are compared with the default one, in the order of what a short run should show."""


def row_lengths(rows: int, packing: str, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """The segment lengths of each row, which add up to it, and the document tokens in each row."""
    if packing == "whole":
        return [[LENGTH]] * rows, [LENGTH] * rows
    generator = torch.Generator().manual_seed(seed)

    def document() -> int:
        spread = 1.0
        deviation = spread * float(torch.randn((), generator=generator))
        return max(16, round(MEAN_DOCUMENT * math.exp(deviation - spread**2 / 2)))

    segments: list[list[int]] = []
    real_tokens: list[int] = []
    for _ in range(rows):
        if packing == "padded":
            length = min(document(), LENGTH)
            segments.append([length, LENGTH - length] if length < LENGTH else [length])
            real_tokens.append(length)
            continue
        lengths: list[int] = []
        while (left := LENGTH - sum(lengths)) > 0:
            lengths.append(min(document(), left))
        segments.append(lengths)
        real_tokens.append(LENGTH)
    return segments, real_tokens


def batch_of(size: Architecture, phase: str, lengths: list[list[int]], real: list[int], device: str) -> dict[str, Any]:
    """Inputs and targets of a phase for rows of random tokens."""
    rows = len(lengths)
    generator = torch.Generator(device=device).manual_seed(1)
    tokens = torch.randint(16, size.vocab_size, (rows, LENGTH), generator=generator, device=device)
    owners = [torch.repeat_interleave(torch.arange(1, len(row) + 1), torch.tensor(row)) for row in lengths]
    segment_ids = torch.stack(owners).to(device)
    for row, count in enumerate(real):
        segment_ids[row, count:] = 0
    if phase == "clm":
        inputs, targets = tokens, clm_targets(tokens, segment_ids)
    else:
        inputs, targets = mlm_inputs_and_targets(
            tokens, segment_ids, torch.arange(rows, device=device), Vocabulary(size.vocab_size, 3, (0, 1, 2, 3)),
            seed=0, counter=0, masking_ratio=MASKING_RATIO,
        )  # fmt: skip
    predicted = int((targets >= 0).sum())
    return {"inputs": inputs, "targets": targets, "lengths": lengths, "predicted": predicted, "phase": phase}


class Trained:
    """A model in one variant, its optimizer, and its steps."""

    def __init__(self, size: Architecture, variant: Variant, device: str):
        self.size, self.variant, self.device = size, variant, device
        self.model: LanguageModel = from_hf_config(llama_config(size, LENGTH), seed=0, device=device)
        backend, _, kernels = variant.attention.partition(" by ")
        self.attention = choose_backend(self.model.config, backend, device, torch.bfloat16, training=True)
        self.model.backbone.attention_backend = self.attention  # pyright: ignore[reportAttributeAccessIssue]
        self.kernels = ""
        if self.attention == "varlen":
            self.kernels = select_kernels(self.model.config, kernels or "auto")
        self.model.compiled_loss = variant.compile
        if variant.compile:
            layers.compile_layers(self.model.backbone, variant.mode)
        if variant.residual == "bf16":
            layers.round_residual(self.model.backbone)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1, fused=True
        )

    def backward(self, batch: dict[str, Any], first: int, rows: int) -> Tensor:
        """Add the gradients of some of a batch's rows; returns the summed loss."""
        inputs, targets = (batch[name][first : first + rows].flatten() for name in ("inputs", "targets"))
        lengths = [length for row in batch["lengths"][first : first + rows] for length in row]
        segments = Segments.of(lengths, inputs.device, LENGTH, rounded_count(len(lengths)))
        with torch.autocast(self.device, dtype=torch.bfloat16):
            total, _ = self.model(inputs, targets, segments, batch["phase"] == "clm")
        (total / batch["predicted"]).backward()
        return total.detach()

    def step(self, batch: dict[str, Any], rows: int) -> Tensor:
        """One optimizer step over a batch, in microbatches of `rows`."""
        total = torch.zeros((), device=self.device)
        for first in range(0, len(batch["lengths"]), rows):
            total += self.backward(batch, first, rows)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total / batch["predicted"]

    def fit(self, phase: str, limit: int) -> int:
        """The largest number of rows in a microbatch, up to `limit`."""

        def measure(rows: int) -> float | None:
            batch = batch_of(self.size, phase, *row_lengths(rows, self.variant.packing), self.device)
            peak = peak_bytes(lambda: [self.backward(batch, 0, rows) for _ in range(2)])
            self.optimizer.zero_grad(set_to_none=True)
            return peak

        state_bytes = 0 if self.optimizer.state else 8 * sum(p.numel() for p in self.model.parameters())
        return largest_microbatch(measure, limit, available_bytes() - state_bytes)


def measure(trained: Trained, phase: str, rows: int, peak: float | None, steps: int = 4) -> dict[str, Any]:
    lengths, real = row_lengths(STEP_ROWS, trained.variant.packing)
    batch = batch_of(trained.size, phase, lengths, real, trained.device)
    start = time.perf_counter()
    first = float(trained.step(batch, rows))
    first_seconds = time.perf_counter() - start
    trained.step(batch, rows)
    synchronize(trained.device)
    if trained.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        last = trained.step(batch, rows)
        synchronize(trained.device)
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    # The padding of a padded row is a segment whose FLOPs are not counted.
    segments = [row[: 1 if trained.variant.packing == "padded" else None] for row in lengths]
    flops = trained.size.flops([n for row in segments for n in row], phase == "clm", batch["predicted"])
    return {
        "attention": trained.attention + f" ({trained.kernels})" * bool(trained.kernels),
        "microbatch_rows": rows,
        "step_rows": STEP_ROWS,
        "step_seconds": seconds,
        "first_step_seconds": first_seconds,
        "tokens_per_second": sum(real) / median,
        "flops_per_second": flops / median,
        "mfu": None if peak is None else flops / median / peak,
        "peak_bytes": torch.cuda.max_memory_allocated() if trained.device == "cuda" else None,
        "loss_first_and_last": [first, float(last)],
        "segments_per_row": sum(len(row) for row in lengths) / len(lengths),
    }


KINDS = (
    ("attention", ("flash", "fmha", "flex", "varlen", "attention")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "wgmma", "matmul", "_mm_")),
    ("optimizer", ("adam", "multi_tensor", "foreach")),
    ("compiled elementwise and norms", ("triton",)),
)


def profile(trained: Trained, phase: str, rows: int) -> dict[str, Any]:
    """The device time of a step: shares by kind of kernel, the forty longest kernels, and idle time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    batch = batch_of(trained.size, phase, *row_lengths(STEP_ROWS, trained.variant.packing), trained.device)
    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as events:
        start = time.perf_counter()
        trained.step(batch, rows)
        synchronize(trained.device)
        wall = time.perf_counter() - start
    times: dict[str, float] = {}
    for event in events.key_averages():
        # Only kernels: the operators that call them, and the optimizer's annotation, report the same time again.
        if str(event.device_type).endswith("CUDA") and not event.is_user_annotation:
            times[event.key] = times.get(event.key, 0.0) + event.self_device_time_total / 1e6
    kinds: dict[str, float] = {}
    for name, spent in times.items():
        kind = next((k for k, parts in KINDS if any(part in name.lower() for part in parts)), "other")
        kinds[kind] = kinds.get(kind, 0.0) + spent
    busy = sum(times.values())
    longest = sorted(times.items(), key=lambda item: -item[1])[:40]
    return {
        "wall_seconds": wall,
        "share_of_wall": {**{kind: spent / wall for kind, spent in kinds.items()}, "idle": max(0.0, 1 - busy / wall)},
        "longest_kernels": [{"name": name[:120], "share_of_wall": spent / wall} for name, spent in longest],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="*", default=["1b", "210m", "610m"], choices=list(PRESETS))
    parser.add_argument("--rows", type=int, help="rows of a microbatch (default: as many as fit)")
    parser.add_argument(
        "--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS), help="of the first size (default: all)"
    )
    parser.add_argument("--seconds", type=float, default=500, help="no measurement starts after this time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("make bench-gpu: skipped, there is no CUDA device")
        return
    name = torch.cuda.get_device_name()
    report = Report(options.results, name, time.monotonic() + options.seconds)
    print(f"{name}: at most {options.seconds / 60:.0f} minutes, into {report.path}.md and .json", flush=True)
    report.note("machine", describe_machine())
    report.note("roofline", roofline("cuda"))
    peak = peak_flops(name, torch.bfloat16)
    report.note("dense_peak", peak)
    for size in options.sizes:
        measure_size(report, size, peak, rows=options.rows)
        if size == options.sizes[0]:
            variants(report, size, peak, options.variants)
    print(report.markdown())


def measure_size(report: Report, name: str, peak: float | None, device: str = "cuda", rows: int | None = None) -> None:
    """Measure a size in the first variant that works: its largest microbatch, both phases, and their profiles."""
    size = PRESETS[name]
    for variant in (Variant(), Variant(attention="flex"), Variant(compile=False)):
        if not report.time_left():
            return
        trained = None
        with report.attempt(f"{name} {variant}") as attempt, variant.settings():
            trained = Trained(size, variant, device)
            fitting = rows or (trained.fit("clm", STEP_ROWS) if device == "cuda" else STEP_ROWS)
            microbatch = even_microbatch(STEP_ROWS, fitting)
            for phase in PHASES:
                report.add(name, phase, variant, measure(trained, phase, microbatch, peak))
            for phase in PHASES:
                if report.time_left():
                    report.profiled(name, phase, profile(trained, phase, microbatch))
        del trained
        free()
        if attempt.worked:
            return


def variants(report: Report, name: str, peak: float | None, names: Sequence[str], device: str = "cuda") -> None:
    """Measure other variants of the same size with the same microbatch, in both phases."""
    best = report.best(name, "clm")
    if best is None:
        return
    for key in names:
        variant = VARIANTS[key]
        if variant.attention.partition(" ")[0] not in ("auto", *filter(backend_available, BACKEND_FUNCTIONS)):
            continue
        trained = None
        with report.attempt(f"{name} {variant}"), variant.settings():
            for phase in PHASES:
                if not report.time_left():
                    return
                trained = trained or Trained(PRESETS[name], variant, device)
                # Eager layers keep more activations for the backward pass.
                rows = best["microbatch_rows"] if variant.compile else max(1, best["microbatch_rows"] // 2)
                report.add(name, phase, variant, measure(trained, phase, rows, peak, steps=3))
        del trained
        free()


def free() -> None:
    """Free compiled code and cached memory."""
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
