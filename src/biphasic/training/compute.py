"""Set up precision, attention, compilation and microbatch size as the YAML configures them."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Literal

import torch
from composer.core import Algorithm, Event, State
from composer.core.precision import get_precision_context
from composer.loggers import Logger
from composer.utils import dist
from torch.nn.parallel import DistributedDataParallel

from biphasic.config.pretrain import MAX_AUTOTUNE, ComputeConfig
from biphasic.data.batches import PhaseRows
from biphasic.data.streams import StreamRecord
from biphasic.devices import require_compiler
from biphasic.errors import Unavailable, UserError
from biphasic.model import attention
from biphasic.model import layers as decoder_layers
from biphasic.model.auto_microbatch import available_bytes, even_microbatch, largest_microbatch, peak_bytes
from biphasic.model.kernels import select_kernels
from biphasic.model.language_model import LanguageModel
from biphasic.objectives.batch import Batch, Step, step_of
from biphasic.objectives.objective import CLM, MLM
from biphasic.ranks import is_first_rank
from biphasic.storage import json_bytes, open_store

MICROBATCH_FILE = "microbatch-{length}.json"
"""Name of the file with the result for rows of a length."""


def configure_compute(model: LanguageModel, config: ComputeConfig, precision: str) -> str:
    """Set compilation, activation checkpointing and attention as configured. Return a line that describes the setup.

    Results stay the same, within rounding. The model may be on any device.

    Raises:
        UserError: the requested attention backend or its kernels aren't installed, don't run on this machine, or lack an
            option of the model; or nothing can be compiled for the GPU.
    """
    gpu = torch.cuda.is_available()
    dtype, problem = torch.bfloat16 if precision == "amp_bf16" else torch.float32, None
    if config.attention != "auto" and not attention.backend_available(config.attention):
        problem = "doesn't run on this GPU, or with this torch" if gpu else "needs a GPU"
    elif gpu and (option := attention.missing_option(model.config, config.attention, dtype, training=True)):
        problem = f"has no {option}"
    if problem is not None:
        raise UserError(f"compute.attention: {config.attention} {problem}: choose another backend, or auto")
    backend = attention.choose_backend(model.config, config.attention, "cuda" if gpu else "cpu", dtype, training=True)
    kernels = ""
    if gpu and backend == "varlen":
        kernels = f" ({select_kernels(model.config, config.varlen_kernels)})"
    elif config.varlen_kernels != "auto":
        raise UserError(
            f"compute.varlen_kernels: {config.varlen_kernels} has no effect, because attention is computed by {backend} "
            f"with this model, precision: {precision} and this device: leave it out"
        )
    backbone: Any = model.backbone
    backbone.attention_backend = backend
    model.compiled_loss = gpu if config.compile == "auto" else config.compile is not False
    details = list[str]()
    if model.compiled_loss:
        if gpu:
            require_compiler()
        decoder_layers.compile_layers(backbone, MAX_AUTOTUNE if config.compile == MAX_AUTOTUNE else "default")
        details += [MAX_AUTOTUNE] * (config.compile == MAX_AUTOTUNE)
    if config.residual == "bf16":
        decoder_layers.round_residual(backbone)
        details.append("bf16 residual")
    count = len(backbone.layers)
    decoder_layers.recompute_layers(backbone, config.recomputed(count))
    if recomputed := decoder_layers.recomputed_layers(backbone):
        details.append(f"{recomputed} of {count} layers recomputed")
    compiled, shown = "compiled" if model.compiled_loss else "not compiled", f" ({', '.join(details)})" * bool(details)
    return f"layers and loss {compiled}{shown}, attention {backend}{kernels}"


class MicrobatchSize(Algorithm):
    """Algorithm that sets the number of rows in a microbatch, for the rows of each phase, so that it splits a batch evenly.

    With `microbatch_size: auto` on GPUs, as many rows as fit are measured before the first batch, for each row length. The
    result is stored beside the checkpoints for the next start. Composer's own `auto` relies on out-of-memory errors during
    training, after which FSDP's ranks would wait for each other forever. A `size` is for the rows of the first phase; other
    rows have about as many tokens in a microbatch.

    `inputs` is what each phase reads, and `causal` whether its attention is causal. Results are stored in `place`, for the
    same `settings`, of which a row's memory is a function. With `conversions`, the records of the data, measured rows have
    as many segments as the data's: FlashAttention's and cuDNN's backward passes take memory for each.
    """

    def __init__(
        self,
        size: int | Literal["auto"],
        inputs: Sequence[PhaseRows],
        causal: Sequence[bool],
        place: str,
        settings: Mapping[str, Any],
        conversions: Mapping[str, StreamRecord] = MappingProxyType({}),
    ):
        self.size, self.inputs, self.causal, self.place, self.settings = size, inputs, causal, place, settings
        self.sizes = list[int]()
        """The microbatch size of each phase, once it is known."""
        self._shape = 0, 0
        """Rows and row length of the microbatches of the current phase."""
        self._circumstances: dict[int, dict[str, Any]] = {}
        """What the results were measured with, by row length."""
        self._segments: dict[int, int] = {}
        for each in inputs if conversions else ():
            length = each.shape.row_length
            for key in filter(each.streams.__contains__, conversions):
                # Some microbatches have more than the mean, and padding is a segment too.
                count = min(math.ceil(1.25 * conversions[key].segments_per_row) + 1, length)
                self._segments[length] = max(self._segments.get(length, 1), count)

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.FIT_START, Event.EVAL_STANDALONE_START, Event.BATCH_START)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.BATCH_START:
            batch: Any = state.batch
            phase = step_of(batch).phase or 0
            state.device_train_microbatch_size = self.sizes[phase]
            self._shape = self.sizes[phase], self.inputs[phase].shape.row_length
        elif not self.sizes:
            ranks, fitting = dist.get_world_size(), self._fitting(state)
            for shape in (each.shape for each in self.inputs):
                rows = shape.rows // ranks
                self.sizes.append(even_microbatch(rows, min(rows, fitting[shape.row_length])))
            state.device_train_microbatch_size = self.sizes[0]
            self._compile(state)
            if _is_measured(self.size):
                for evaluator in state.evaluators:
                    evaluator.device_eval_microbatch_size = self.sizes[0]
                if torch.cuda.is_available():
                    # The run's peak is not that of the largest microbatch that was tried, which may not have fit.
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()

    def out_of_memory(self, state: State) -> UserError:
        """Return the error of a rank that ran out of GPU memory. A measured size is stored as a tenth less."""
        rows, length = self._shape
        if self.sizes and state.dataloader_label != "train":  # a validation
            rows, length = self.sizes[0], self.inputs[0].shape.row_length
        problem = f"a GPU ran out of memory in batch {int(state.timestamp.batch)} with microbatches of {rows} rows"
        if length in self._circumstances and rows > 1:
            with suppress(OSError, UserError):
                self._store(length, int(0.9 * rows))
                return Unavailable(f"microbatch_size: auto: {problem}: the next start takes a tenth less")
        advice = "set a smaller number, parallelism.strategy: fsdp, or compute.activation_checkpointing: all"
        return UserError(f"microbatch_size: {problem}: {advice}")

    def _store(self, length: int, rows: int) -> None:
        content = json_bytes({"circumstances": self._circumstances[length], "rows": rows})
        open_store(self.place).write(MICROBATCH_FILE.format(length=length), content)

    def _stored(self, length: int) -> int:
        try:
            store = open_store(self.place)
            record = json.loads(store.read(MICROBATCH_FILE.format(length=length)))
            return int(record["rows"]) if record["circumstances"] == self._circumstances[length] else 0
        except (OSError, UserError, ValueError, KeyError, TypeError):
            return 0

    def _compile(self, state: State) -> None:
        model: Any = getattr(state.model, "module", state.model)  # DDP's module
        if model.model.compiled_loss:
            # For each objective and its rows, so that no phase begins with a slow step.
            lengths = [each.shape.row_length for each in self.inputs]
            for causal, length, rows in dict.fromkeys(zip(self.causal, lengths, self.sizes, strict=True)):
                self._shape = rows, length
                self._train(state, length, rows, causal)

    def _fitting(self, state: State) -> dict[int, int]:
        most: dict[int, int] = {}
        for shape in (each.shape for each in self.inputs):
            most[shape.row_length] = max(most.get(shape.row_length, 0), shape.rows // dist.get_world_size())
        if isinstance(self.size, int):
            tokens = self.size * self.inputs[0].shape.row_length
            return {length: max(tokens // length, 1) for length in most}
        if not _is_measured(self.size):
            return most
        return {length: self._largest(state, length, rows) for length, rows in most.items()}

    def _largest(self, state: State, length: int, rows: int) -> int:
        segments = self._segments.get(length, 1)
        self._circumstances[length] = {"segments": segments, **_circumstances(length, rows), **self.settings}
        # Rank 0 stores what was measured, and a rank that ran out of memory less: in a local folder, that of its own node.
        stored = dist.all_gather_object(self._stored(length) if dist.get_local_rank() == 0 else 0)
        if fitting := min(filter(None, stored), default=0):
            return fitting
        if is_first_rank():
            what = f"{rows} rows of {length} tokens fit the GPU (a minute or two, once)"
            print(f"microbatch_size: auto: measuring how many of {what}", flush=True)
        available = min(dist.all_gather_object(available_bytes() - _missing_optimizer_state(state)))
        # FSDP's ranks would wait forever for one that runs out of memory.
        before = min(dist.all_gather_object(torch.cuda.memory_allocated())) if _has_collectives(state) else None
        fitting = largest_microbatch(lambda count: self._measure(state, length, count), rows, available, before)
        if is_first_rank():
            size = even_microbatch(rows, fitting)
            print(f"microbatch_size: auto: {fitting} rows fit; batches are split into microbatches of {size} rows")
            with suppress(OSError, UserError):  # the next start measures again
                self._store(length, fitting)
        return fitting

    def _measure(self, state: State, length: int, rows: int) -> float | None:
        """Return the peak bytes of training on `rows` rows, the largest of all ranks; None if they don't fit."""
        # A batch that needs the most memory is causal, if any is, with a target at every position.
        causal = any(self.causal)
        peak = peak_bytes(lambda: self._train(state, length, rows, causal))
        if peak is None and _has_collectives(state):
            raise UserError(
                f"microbatch_size: auto: a microbatch of size {rows} doesn't fit in GPU memory; set a smaller size, or "
                "compute.activation_checkpointing: all"
            )
        peaks: list[Any] = dist.all_gather_object(peak)
        return None if None in peaks else max(peaks)

    def _train(self, state: State, length: int, rows: int, causal: bool) -> None:
        """Run two forward and backward passes, then restore the RNG states: measuring must not change the training."""
        model = state.model
        # These passes need no gradient synchronization between DDP ranks.
        context = model.no_sync if isinstance(model, DistributedDataParallel) else torch.enable_grad
        try:
            with context(), torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
                model.train()  # transformers loads backbones in evaluation mode, in which no layer is recomputed
                for _ in range(2):  # the second pass adds to existing gradients
                    with get_precision_context(state.precision, state.precision_config):
                        total, _ = model(self._batch(state, length, rows, causal))
                    total.backward()
        finally:
            for optimizer in state.optimizers:
                optimizer.zero_grad(set_to_none=True)

    def _batch(self, state: State, length: int, rows: int, causal: bool) -> Batch:
        tokens = state.device.tensor_to_device(torch.zeros((rows, length), dtype=torch.int64))
        count = self._segments.get(length, 1)
        targets = state.device.tensor_to_device(torch.tensor(float(rows * length)))
        step = Step(CLM() if causal else MLM(), None, targets, float(rows), tokens[0, 0])
        return {
            "input_ids": tokens,
            "labels": tokens,
            "row_ids": tokens[:, 0],
            "lengths": [[length - (count - 1) * (length // count), *[length // count] * (count - 1)]] * rows,
            "step": [step] * rows,
        }


def _has_collectives(state: State) -> bool:
    return state.fsdp_config is not None and dist.get_world_size() > 1


def _is_measured(size: int | str) -> bool:
    return size == "auto" and torch.cuda.is_available()


def _missing_optimizer_state(state: State) -> float:
    """Return the bytes of optimizer state that the first step will allocate."""
    missing = 0
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            averages = 1 if "momentum" in group else 2  # Muon has one moving average, AdamW two
            for parameter in group["params"]:
                if not optimizer.state.get(parameter):
                    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                    missing += averages * local.numel() * local.element_size()
    return missing


def _circumstances(length: int, rows: int) -> dict[str, Any]:
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    about = {"device": device.name, "memory": device.total_memory, "torch": torch.__version__}
    return {**about, "ranks": dist.get_world_size(), "length": length, "most": rows}
