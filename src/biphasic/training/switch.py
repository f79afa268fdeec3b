"""The switch of objectives: which objective a batch has, its inputs and targets, and their number on all ranks."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.models import HuggingFaceModel
from composer.utils import dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from biphasic.data.seeds import derive_seed
from biphasic.durations import Duration, TrainingProgress, epoch_batches
from biphasic.errors import UserError
from biphasic.model.architecture import RopeThreshold, rope_threshold
from biphasic.model.forward import packed_forward
from biphasic.model.language_model import LanguageModel, language_model_of
from biphasic.model.losses import IGNORE
from biphasic.model.segments import Segments, limited_lengths
from biphasic.objectives.batch import Batch, Step, complete, segments_of, step_of
from biphasic.objectives.objective import Draws, Objective
from biphasic.objectives.targets import Vocabulary
from biphasic.timeline import ResolvedPhase, phase_at, resolve_phases

_TOLERANCE = 1e-5
"""Relative difference of two sums of the same losses; the first losses of microbatches differ by little more."""


class ObjectiveSwitch(Algorithm):
    """Algorithm that applies the current phase's objective to the rank's rows. The switch from CLM to MLM happens here.

    Batches are as in `biphasic.objectives.batch`. A batch's phase depends only on the timestamp, so a phase starts at the
    configured batch, also after a resume. Targets are counted over all ranks, because the loss is the mean over the targets
    of the global batch, for any microbatch size and number of ranks. Masks depend on the seed, the row and the counter
    alone.

    Composer's `HuggingFaceModel` around a decoder, or an encoder with a language-model head, is changed so that it takes
    prepared batches. A ComposerModel of one's own gets them as its batches, and reads
    `direction = step_of(batch).causal`, `batch["labels"]` and `step_of(batch).mean_loss(total, rows)`.

    Args:
        phases: the objectives in order, such as `[CLM(until="0.5dur"), MLM()]`. Each but the last has `until`.
        tokenizer: a Hugging Face tokenizer, or its `Vocabulary`.
        seed: of the masks, and of dropout.
        validation: objectives by the label of their evaluator. Default: those of the phases by name; an evaluator with
            another label gets the objective of the current phase.
        byte_lengths: number of bytes of text of each token, for bits per byte.
        on_phase: called with the index of the phase before each batch, in training and in validation.
    """

    def __init__(
        self,
        phases: Sequence[Objective],
        tokenizer: Any,
        seed: int,
        *,
        validation: Mapping[str, Objective] | None = None,
        byte_lengths: Sequence[int] | None = None,
        on_phase: Callable[[int], object] = lambda index: None,
    ):
        open_ended = [index for index, phase in enumerate(phases) if phase.until is None]
        if open_ended != [len(phases) - 1]:
            raise UserError("phases: expected `until` in each phase but the last, which ends with the run")
        is_vocabulary = isinstance(tokenizer, Vocabulary)
        self.vocabulary: Vocabulary = tokenizer if is_vocabulary else Vocabulary.of(tokenizer)
        self.phases, self.seed, self._on_phase = list(phases), seed, on_phase
        self.validation = {phase.name: phase for phase in phases} if validation is None else dict(validation)
        self.byte_lengths = None if byte_lengths is None else torch.tensor([*byte_lengths, 0])  # the last for `IGNORE`
        self.last_batch = TrainingProgress(0, 0, 0, 0)
        """When the last batch began, or the start of the run before the first one; stored in checkpoints."""
        self._spans: tuple[tuple[Duration, int | None], list[ResolvedPhase]] | None = None
        self._epoch: int | None = None
        """Number of batches in an epoch of the training data, if known."""
        self._expected: Tensor | None = None
        """Loss of the first batch after a start, summed over its microbatches."""
        self._is_checked = False

    def span(self, state: State, time: TrainingProgress) -> ResolvedPhase:
        """Return the phase at a time of the run.

        Raises a UserError if the phases don't fit its `max_duration`, or one with a ramp is not in one unit.
        """
        end, epoch = Duration.parse(str(state.max_duration)), self._epoch
        if self._spans is None or self._spans[0] != (end, epoch):
            spans = resolve_phases(self.phases, end, epoch)
            for each in spans:
                start, stop = each.start.resolve(end, epoch), each.end.resolve(end, epoch)
                is_known = end.unit != "ep" or epoch is not None  # `fit` may give the loader
                if is_known and start.unit == stop.unit and start.value >= stop.value:
                    raise UserError(f"phases: phase {each.index} begins at {each.start} and ends at {each.end} of {end}")
                ramps = each.phase.predicted_share(0.0) != each.phase.predicted_share(1.0)
                if ramps and (each.end.unit == "ep" or (each.start.value and each.start.unit != each.end.unit)):
                    expected = "a ramp needs its phase's start and end in the same unit, in ba, sp or tok"
                    raise UserError(f"phases: phase {each.index}: {expected}; got {each.start} to {each.end} of {end}")
            self._spans = (end, epoch), spans
        return phase_at(self._spans[1], time)

    def match(self, event: Event, state: State) -> bool:
        if event in (Event.AFTER_LOSS, Event.BATCH_END):
            return not self._is_checked
        return event in (Event.INIT, Event.BEFORE_LOAD, Event.BATCH_START, Event.EVAL_BATCH_START, Event.FIT_END)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event in (Event.BEFORE_LOAD, Event.BATCH_START):  # in validation, the loader is another
            self._epoch = epoch_batches(state)
        if event == Event.INIT:
            if isinstance(state.model, HuggingFaceModel):
                rows: Any = state.model.model.get_input_embeddings().num_embeddings
                size = self.vocabulary.size
                if rows < size:  # which Composer compares with the number of tokens; ids may have gaps
                    expected = f"expected an embedding of at least {size} rows, for the tokenizer's ids"
                    raise UserError(f"{expected}; got {rows}: model.resize_token_embeddings({size})")
                compute_prepared_batches(state.model)
        elif event == Event.BEFORE_LOAD:
            if state.max_duration is not None:  # it may also be given to `fit`
                self.span(state, self.last_batch)
        elif event in (Event.AFTER_LOSS, Event.BATCH_END):
            self._check_loss(event, state)
        elif event == Event.FIT_END:
            # Durations in different units can't be compared before.
            index, length = self.span(state, self.last_batch).index, state.max_duration
            if state.get_elapsed_duration() >= 1 and index < len(self.phases) - 1:  # pyright: ignore[reportOptionalOperand]
                problem = f"phases: phase {index + 1} has not begun: phase {index} lasts until {self.phases[index].until}"
                warnings.warn(f"{problem}, and the run was {length}", stacklevel=2)
        elif event == Event.EVAL_BATCH_START:
            span = self.span(state, self.last_batch)
            self._on_phase(span.index)
            label = str(state.dataloader_label)
            objective = self.validation.get(label) or span.phase
            rows = state.device.batch_to_device(complete(state.batch, self.vocabulary.special_ids))
            state.batch = self.prepare(rows, objective, None, 0, lambda: span.share(self.last_batch))
        else:
            self._begin(state, logger)

    def _begin(self, state: State, logger: Logger) -> None:
        now = TrainingProgress.of(state.timestamp)
        span, before = self.span(state, now), self.span(state, self.last_batch)
        if span.index != before.index and span.phase.reset_optimizer:
            for optimizer in state.optimizers:
                optimizer.state.clear()  # Adam's moments and step counts; learning rates don't change
        self.last_batch = now
        self._on_phase(span.index)
        counter = state.batch.get("counter", now.batches) if isinstance(state.batch, Mapping) else 0
        rows = complete(state.batch, self.vocabulary.special_ids)
        # Before the rows are moved, since reading a number on the device would wait for it.
        torch.manual_seed(derive_seed("dropout", self.seed, now.batches, int(rows["row_ids"][0])))
        rows = state.device.batch_to_device(rows)
        state.batch = self.prepare(rows, span.phase, span.index, counter, lambda: span.share(now))
        logger.log_metrics({"objective/phase": span.index, **span.phase.metrics(lambda: span.share(now))})

    def prepare(
        self, rows: Batch, objective: Objective, phase: int | None, counter: int, share: Callable[[], float]
    ) -> Batch:
        """Apply an objective to a rank's rows. All ranks must call this together."""
        tokens, segment_ids = rows["input_ids"], rows["segment_ids"]
        draws = Draws(rows["row_ids"], self.seed, counter)
        inputs, targets = objective.inputs_and_targets(tokens, segment_ids, self.vocabulary, draws, share)
        if self.byte_lengths is None:
            target_bytes = torch.tensor(float("nan"), device=targets.device)
        else:
            self.byte_lengths = self.byte_lengths.to(targets.device)  # copied once
            target_bytes = self.byte_lengths[targets.clamp(min=-1)].sum()
        count = (targets != IGNORE).sum()
        counts = torch.stack([count, target_bytes, count.new_full((), len(tokens))]).to(torch.float32)
        dist.all_reduce(counts, reduce_operation="SUM")
        if phase is not None and not self._is_checked and not counts[0]:  # in the first batch alone: it waits for the device
            got = f"the first batch of {objective.name} has none"
            raise UserError(f"expected targets at positions that are neither padding nor special tokens; {got}")
        mean_targets, mean_bytes, mean_rows = counts.clamp(min=1.0) / dist.get_world_size()
        step = Step(objective, phase, mean_targets, mean_rows, mean_bytes / mean_targets)
        return {**rows, "input_ids": inputs, "labels": targets, "step": [step] * len(tokens)}

    def _check_loss(self, event: Event, state: State) -> None:
        """Check once that Composer weights microbatches by their rows. Raises a UserError on all ranks."""
        batch: Any = state.batch
        if event == Event.AFTER_LOSS:
            step, loss = batch["step"][0], state.loss
            values = loss.values() if isinstance(loss, dict) else [loss]
            total = loss["total"] if isinstance(loss, dict) and "total" in loss else sum(values)  # pyright: ignore
            part = total.detach() * (len(batch["step"]) / step.mean_rows_per_rank)  # pyright: ignore
            self._expected = part if self._expected is None else self._expected + part
            return
        self._is_checked = True
        if self._expected is None or not state.total_loss_dict:
            return
        dist.all_reduce(self._expected, reduce_operation="SUM")
        expected, actual = float(self._expected) / dist.get_world_size(), state.total_loss_dict["loss/train/total"]
        if abs(actual - expected) > _TOLERANCE * abs(expected):
            raise UserError(
                f"Composer has weighted this batch's microbatches by other numbers than their rows (loss {actual:.4f}, and "
                f"{expected:.4f} as the mean over the targets): set Trainer(accumulate_train_batch_on_tokens=False); "
                "ObjectiveSwitch counts targets itself"
            )

    @property
    def phase_name(self) -> str:
        if self._spans is None:
            return self.phases[0].name
        return phase_at(self._spans[1], self.last_batch).phase.name

    def state_dict(self) -> dict[str, Any]:
        return {"repr": repr(self), "last_batch": list(astuple(self.last_batch))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # The phase is looked up in this run's phases, because the checkpoint may come from another run.
        self.last_batch = TrainingProgress(*state["last_batch"])


def compute_prepared_batches(model: Any) -> None:
    """Change a Composer `HuggingFaceModel` in place, so that it takes batches of `ObjectiveSwitch` besides its own.

    Its network then attends to packed segments, and computes the loss without the complete logits. For validation and
    training metrics, labels are aligned with logits (`shift_labels=False`).

    Raises:
        UserError: the network has no linear head on a decoder that can be made causal and bidirectional.
    """
    network, changed = model.model, model.model.forward
    if not (isinstance(changed, partial) and changed.func is _forward):
        parts = language_model_of(network, f"model {type(network).__name__}")
        # Not as an attribute of the network, which would register its modules a second time. Not as a closure, which would
        # compute the original in a deep copy; the arguments of a partial are copied too.
        changed = partial(_forward, parts, rope_threshold(parts.config.to_dict()), network.forward)
    # A network may be in several of Composer's models, each with its own metrics.
    network.forward = partial(_forward, *changed.args, with_logits=bool(model.train_metrics))
    model.model_forward_args |= {"input_ids", "labels", "segment_ids", "lengths", "step"}
    model.shift_labels = False


def _forward(
    parts: LanguageModel,
    rope: RopeThreshold | None,
    original: Callable[..., Any],
    *inputs: Any,
    with_logits: bool,
    **batch: Any,
) -> Any:
    """Compute a prepared batch, and any other with the network's `original` forward."""
    return original(*inputs, **batch) if "step" not in batch else _compute(parts, rope, batch, with_logits)


@torch.compiler.disable()  # lengths differ from batch to batch
def _segments_of(batch: Mapping[str, Any], rope: RopeThreshold | None) -> Segments:
    if rope is not None:
        batch = {**batch, "lengths": limited_lengths(batch["segment_ids"], rope)}
    return segments_of(batch)


def _compute(parts: LanguageModel, rope: RopeThreshold | None, batch: Mapping[str, Any], with_logits: bool) -> Any:
    """Return the loss of a prepared batch, as transformers' output; its logits if it has no labels, or if asked for."""
    from transformers.modeling_outputs import CausalLMOutput

    step, inputs, targets, loss = step_of(batch), batch["input_ids"], batch.get("labels"), None
    segments = _segments_of(batch, rope)
    if targets is not None and not with_logits:
        total, _ = parts(inputs.flatten(), targets.flatten(), segments, step.causal)
        return CausalLMOutput(loss=step.mean_loss(total, len(inputs)))
    hidden = packed_forward(parts.backbone, inputs.flatten(), segments, step.causal)
    logits = parts.logits(hidden).unflatten(0, inputs.shape)
    if targets is not None:
        total = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        loss = step.mean_loss(total, len(inputs))
    return CausalLMOutput(loss=loss, logits=logits)
