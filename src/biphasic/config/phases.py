"""Schema of training phases and the learning-rate schedule, and their checks."""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from functools import cache
from importlib import import_module
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import Field, SerializeAsAny, ValidationError, WrapValidator, create_model
from pydantic_core import PydanticCustomError

from biphasic.config.base import KeyProblems, Positive, Section, Share
from biphasic.config.data import PhaseDataConfig
from biphasic.durations import BatchShapes, Duration
from biphasic.objectives.objective import CLM, MLM, Objective
from biphasic.timeline import decay_start, resolve_phases

_COUNTED = "batches (ba), rows (sp) or tokens (tok)"


class RampConfig(Section):
    """A masking ratio that changes linearly from `start` to `end` during its phase."""

    start: Share
    """Masking ratio of the phase's first batch."""
    end: Share
    """Masking ratio at the end of the phase."""

    def __str__(self) -> str:
        return f"{self.start} to {self.end}"


class ReplacementConfig(Section):
    """How selected tokens are replaced; the shares add up to 1. Default: always by the mask token, as in EuroBERT's code."""

    mask: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share that becomes the mask token."""
    random: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share that becomes a random token of the vocabulary, special tokens excluded. BERT: 0.1."""
    keep: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share that stays as it is, and is predicted. BERT: 0.1."""


class PhaseModelConfig(Section):
    """What a phase changes in the model."""

    rope_theta: Annotated[float, Field(gt=0)]
    """Base of the rotary position embeddings from this phase on."""


class _Phase(Section):
    name: str
    until: Duration | None = None
    """End of the phase, counted from the start of the run. Omit it for the last phase, which ends with the run."""
    reset_optimizer: bool = False
    """Whether to reset the optimizer state when this phase begins."""
    data: PhaseDataConfig | None = None
    """Training data from this phase on. Null: that of the phase before, which goes on where it was. The first phase has the
    run's `data`. Data that an earlier phase has read goes on where that phase left it."""
    global_batch_size: Positive | None = None
    """Number of rows in an optimizer step from this phase on. Null: as before."""
    model: PhaseModelConfig | None = None
    """What changes in the model from this phase on. Null: nothing."""

    @property
    def objective(self) -> Objective:
        """What the phase trains."""
        kind = objective_class(self.name)
        return kind(**{field.name: getattr(self, field.name) for field in fields(kind)})


class CLMPhase(_Phase):
    """Causal language modeling: each token predicts the next token of its segment."""

    name: Literal["clm"]  # pyright: ignore[reportIncompatibleVariableOverride]


class MLMPhase(_Phase):
    """Masked language modeling: masked tokens are predicted from the tokens on both sides in their segment."""

    name: Literal["mlm"]  # pyright: ignore[reportIncompatibleVariableOverride]
    masking_ratio: Share | RampConfig = 0.4
    """Probability with which each token is selected, independently. The paper compares 0.2, 0.3, 0.4 and 0.5 (0.4 in its
    biphasic runs)."""
    replacement: ReplacementConfig = ReplacementConfig()
    """What stands in place of the selected tokens."""
    target: Literal["same", "next"] = "same"
    """`same`: predict a masked token at its own position. `next`: predict it at the previous position, as in CLM, so that
    the head's offset stays the same when the objective changes (masked next-token prediction)."""


_OBJECTIVES: dict[str, type[Objective]] = {"clm": CLM, "mlm": MLM}


def objective_class(name: str) -> type[Objective]:
    """Return the objective that a phase's `name` means: `clm`, `mlm`, or `MODULE.CLASS` of a module on Python's path.

    Raises a ValueError if there is no such class.
    """
    if name in _OBJECTIVES:
        return _OBJECTIVES[name]
    module, _, kind = name.rpartition(".")
    try:
        found = getattr(import_module(module), kind)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} can't be imported ({error}); set PYTHONPATH to its module's folder") from None
    if not (isinstance(found, type) and issubclass(found, Objective)):
        raise ValueError(f"{name} is not a subclass of biphasic.Objective")
    return found


@cache
def phase_section(name: str) -> type[_Phase]:
    """Return the section of phases with an objective of one's own: the fields of its class are its keys."""
    kind = objective_class(name)
    hints, own = get_type_hints(kind), [field for field in fields(kind) if field.name not in _Phase.model_fields]
    defaults = {field.name: ... if field.default is MISSING else field.default for field in own}
    keys: dict[str, Any] = {key: (hints[key], default) for key, default in defaults.items()}
    keys["name"] = Literal[name], ...
    return create_model(kind.__name__, __base__=_Phase, __doc__=kind.__doc__, **keys)


def _of_own_objective(value: Any, validate: Callable[[Any], Any]) -> Any:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or "." not in name:
        return value if isinstance(value, _Phase) else validate(value)
    try:
        kind = phase_section(name)
    except ValueError as error:
        kind_of_error: Any = PydanticCustomError("value_error", "{text}", {"text": str(error)})
        fault: Any = {"type": kind_of_error, "loc": ("name",), "input": name}
        raise ValidationError.from_exception_data("phase", [fault]) from None
    section = kind.model_validate(value)
    assert section.objective  # raises the ValueError of a class that checks its values
    return section


Phase = Annotated[
    SerializeAsAny[Annotated[CLMPhase | MLMPhase, Field(discriminator="name")]], WrapValidator(_of_own_objective)
]
"""A phase with one of Biphasic's objectives, or with `name: MODULE.CLASS` one of the user's own."""


class ObjectiveConfig(Section):
    """The phases of training, in order."""

    phases: Annotated[list[Phase], Field(min_length=1)]
    """The phases. Each but the last needs `until`."""


class ScheduleConfig(Section):
    """Warmup-stable-decay (WSD) schedule: the learning rate rises from 0, stays constant, and falls at the end."""

    warmup: Duration = Duration(0, "ba")
    """Length of the linear warmup from 0. The paper: 2,000 batches."""
    decay: Duration = Duration(0, "ba")
    """Length of the decay at the end of the run. 0ba: no decay, for a trunk from which other runs branch off."""
    decay_shape: Literal["linear", "1-sqrt", "cosine"] = "linear"
    """Course of the decay. The paper: linear."""
    final_lr: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Learning rate at the end of the decay, as a share of `optimizer.lr`."""


def phase_problems(phases: Sequence[_Phase], max_duration: Duration, batch: BatchShapes) -> KeyProblems:
    """Check the phases of a run of `max_duration`."""
    for index, phase in enumerate(phases):
        key = f"objective.phases.{index}"
        if index == len(phases) - 1 and phase.until is not None:
            yield [f"{key}.until"], "the last phase runs to the end (max_duration): remove this key"
        if index < len(phases) - 1 and phase.until is None:
            yield [f"{key}.until"], "is missing: only the last phase is open-ended"
        if isinstance(phase, MLMPhase):
            shares = phase.replacement
            if abs(shares.mask + shares.random + shares.keep - 1) > 1e-9:
                message = f"mask, random and keep must add up to 1; got {shares.mask} + {shares.random} + {shares.keep}"
                yield [f"{key}.replacement"], message
    if any(phase.until is None for phase in phases[:-1]) or phases[-1].until is not None:
        return
    for span in resolve_phases(phases, max_duration):
        key, until, start, end = f"objective.phases.{span.index}", span.phase.until, span.start, span.end
        if until is not None and not until.is_whole_of(max_duration):
            message = f"expected whole epochs, or a length in another unit; got {until} of {max_duration}"
            yield [f"{key}.until", "max_duration"], message
        if until is not None and batch.not_before(end, max_duration):
            message = (
                f"the phase must end before the run does (max_duration: {max_duration}), by at least a batch; got {end}"
            )
            yield [f"{key}.until", "max_duration"], message
        elif until is not None and batch.not_before(start, end):
            yield [f"{key}.until"], f"the phase must end after it starts ({start}), by at least a batch; got {end}"
        ramps = isinstance(span.phase, MLMPhase) and isinstance(span.phase.masking_ratio, RampConfig)
        if ramps and (end.unit == "ep" or (start.value and start.unit != end.unit)):
            message = f"a ramp needs its phase's start and end in the same unit, in {_COUNTED}; got {start} to {end}"
            yield [f"{key}.masking_ratio", f"{key}.until", "max_duration"], message


def schedule_problems(schedule: ScheduleConfig, max_duration: Duration, batch: BatchShapes) -> KeyProblems:
    """Check the warmup and decay of a run of `max_duration`."""
    if schedule.decay.unit not in ("dur", max_duration.unit) and schedule.decay.value:
        message = f"expected the unit of max_duration ({max_duration}) or dur, since the decay ends with the run"
        yield ["schedule.decay", "max_duration"], message
        return
    warmup, decay = schedule.warmup.resolve(max_duration), schedule.decay.resolve(max_duration)
    in_epochs = [name for name, time in (("warmup", warmup), ("decay", decay)) if time.value and time.unit == "ep"]
    for name in in_epochs:
        message = f"expected {_COUNTED}, here or in max_duration, instead of epochs"
        yield [f"schedule.{name}", "max_duration"], f"{message}; got {getattr(schedule, name)} of {max_duration}"
    if in_epochs:
        return
    if batch.not_before(warmup, max_duration):
        yield ["schedule.warmup", "max_duration"], f"expected less than max_duration ({max_duration})"
    elif warmup.value and decay.value and batch.tokens(warmup) > batch.tokens(decay_start(schedule, max_duration)):
        message = f"warmup ({schedule.warmup}) and decay ({schedule.decay}) are longer than the run ({max_duration})"
        yield ["schedule.warmup", "schedule.decay", "max_duration"], message
    if decay.value > max_duration.value:
        yield ["schedule.decay", "max_duration"], f"expected at most max_duration ({max_duration})"
    elif decay.value and batch.not_before(decay_start(schedule, max_duration), max_duration):
        yield ["schedule.decay", "max_duration"], f"expected a length in which a batch begins; got {schedule.decay}"
    if not decay.value:
        message = "has no effect without a decay: set schedule.decay as well"
        yield from schedule.require_defaults(("decay_shape", "final_lr"), "schedule", ["schedule.decay"], message)
