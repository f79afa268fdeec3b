"""Values that are right by themselves and impossible together. Each check names the keys it is about."""

from __future__ import annotations

import re
from posixpath import normpath

from biphasic.config.architecture import Architecture, preset
from biphasic.config.base import Found, Section, changed
from biphasic.config.checks_data import conversion_problems, tasks_problems
from biphasic.config.checks_evaluate import evaluate_problems
from biphasic.config.checks_finetune import finetune_problems
from biphasic.config.checks_sweep import sweep_problems
from biphasic.config.conversion import ConvertConfig
from biphasic.config.durations import Duration
from biphasic.config.evaluate import EvaluateConfig
from biphasic.config.finetune import FinetuneConfig
from biphasic.config.places import splits_of
from biphasic.config.schema import DataConfig, MLMPhase, ModelConfig, PretrainConfig, RampConfig
from biphasic.config.sweep import SweepConfig
from biphasic.config.tasks import TasksConfig
from biphasic.config.timeline import spans

_DIMENSIONS = ("hidden_size", "intermediate_size", "num_layers", "num_heads")
_ONLY_NEW = (
    *_DIMENSIONS,
    "num_kv_heads",
    "head_dim",
    "rope_theta",
    "rms_norm_eps",
    "initializer_range",
    "tie_embeddings",
)


def problems_of(
    config: PretrainConfig | FinetuneConfig | EvaluateConfig | ConvertConfig | TasksConfig | SweepConfig, ranks: int
) -> Found:
    """Everything in `config` that can't be, for a run of `ranks` processes: the keys concerned, the first one first,
    and what was expected."""
    yield from _secrets(config)
    if isinstance(config, PretrainConfig):
        yield from _model(config)
        yield from _phases(config)
        yield from _schedule(config)
        yield from _batches(config, ranks)
        yield from _parallelism(config, ranks)
        yield from _compute(config)
        yield from _checkpoints(config)
        yield from _places(config)
    elif isinstance(config, FinetuneConfig):
        yield from finetune_problems(config, ranks)
    elif isinstance(config, EvaluateConfig):
        yield from evaluate_problems(config)
    elif isinstance(config, ConvertConfig):
        yield from conversion_problems(config)
    elif isinstance(config, SweepConfig):
        yield from sweep_problems(config)
    else:
        yield from tasks_problems(config)


def architecture_of(model: ModelConfig) -> Architecture | None:
    """The dimensions that a YAML gives; None when they come from the folder that `init_from` names."""
    if model.init_from is not None:
        return None
    if model.preset is not None:
        return preset(model.preset, model.vocab_size)
    sizes = [model.vocab_size, *(getattr(model, name) for name in _DIMENSIONS)]
    if None in sizes:
        return None
    assert model.vocab_size and model.hidden_size and model.intermediate_size and model.num_layers and model.num_heads
    return Architecture(
        vocab_size=model.vocab_size,
        hidden=model.hidden_size,
        ffn=model.intermediate_size,
        layers=model.num_layers,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads or model.num_heads,
        head_dim=model.head_dim or model.hidden_size // model.num_heads,
        tied=model.tie_embeddings,
    )


def _model(config: PretrainConfig) -> Found:
    model = config.model
    if model.init_from is not None:
        for name in ("preset", "vocab_size", *_ONLY_NEW):
            if changed(model, name):
                yield [f"model.{name}"], "can't be given beside model.init_from, whose own value holds; take one away"
        return
    if model.preset is not None:
        for name in _ONLY_NEW:
            if name in (*_DIMENSIONS, "num_kv_heads", "head_dim", "tie_embeddings") and changed(model, name):
                yield [f"model.{name}"], f"can't be given beside model.preset: {model.preset}, which fixes it"
    else:
        missing = [name for name in ("vocab_size", *_DIMENSIONS) if getattr(model, name) is None]
        if len(missing) == len(_DIMENSIONS) + 1:
            yield ["model"], "expected one of `preset`, `init_from`, or explicit dimensions (hidden_size and so on)"
        else:
            for name in missing:
                yield [f"model.{name}"], "is missing: explicit dimensions need it (or use model.preset)"
        if missing:
            return
        assert model.hidden_size and model.num_heads
        if model.hidden_size % model.num_heads:
            message = f"expected a divisor of hidden_size ({model.hidden_size}); got {model.num_heads}"
            yield ["model.num_heads", "model.hidden_size"], message
            return
        if model.num_heads % (model.num_kv_heads or model.num_heads):
            message = f"expected a divisor of num_heads ({model.num_heads}); got {model.num_kv_heads}"
            yield ["model.num_kv_heads", "model.num_heads"], message
        architecture = architecture_of(model)
        if architecture is not None and architecture.head_dim % 2:
            key = "model.head_dim" if model.head_dim else "model.num_heads"
            yield [key, "model.hidden_size"], f"rotary positions need an even head_dim; got {architecture.head_dim}"
    if model.max_position_embeddings and model.max_position_embeddings < config.data.sequence_length:
        yield (
            ["model.max_position_embeddings", "data.sequence_length"],
            f"expected at least data.sequence_length ({config.data.sequence_length}); got {model.max_position_embeddings}",
        )


def _phases(config: PretrainConfig) -> Found:
    if config.max_duration.unit == "dur" or not config.max_duration.value:
        expected = "expected a positive length in batches, tokens, rows or epochs, such as 42000ba"
        yield ["max_duration"], f"{expected}; got {config.max_duration}"
        return
    phases = config.objective.phases
    for index, phase in enumerate(phases):
        key = f"objective.phases.{index}"
        last = index == len(phases) - 1
        if last and phase.until is not None:
            yield [f"{key}.until"], "the last phase runs to the end (max_duration): take this key away"
        if not last and phase.until is None:
            yield [f"{key}.until"], "is missing: only the last phase is open-ended"
        if isinstance(phase, MLMPhase):
            shares = phase.replacement
            if abs(shares.mask + shares.random + shares.keep - 1) > 1e-9:
                message = f"mask, random and keep must add up to 1; got {shares.mask} + {shares.random} + {shares.keep}"
                yield [f"{key}.replacement"], message
    if any(phase.until is None for phase in phases[:-1]) or phases[-1].until is not None:
        return
    laid_out = spans(phases, config.max_duration)
    for span in laid_out[:-1]:
        key = f"objective.phases.{span.index}.until"
        if _not_before(span.end, config.max_duration, config):
            message = f"the phase must end before the run does (max_duration: {config.max_duration}); got {span.end}"
            yield [key, "max_duration"], message
        elif _not_before(span.start, span.end, config):
            yield [key], f"the phase must end after it starts ({span.start}); got {span.end}"
    for span in laid_out:
        ramps = isinstance(span.phase, MLMPhase) and isinstance(span.phase.masking_ratio, RampConfig)
        if ramps and span.start.value and span.start.unit != span.end.unit:
            message = f"a ramp needs its phase's start ({span.start}) and end ({span.end}) in one unit"
            yield [f"objective.phases.{span.index}.masking_ratio"], message


def _not_before(a: Duration, b: Duration, config: PretrainConfig) -> bool:
    """Whether `a` is surely not before `b`; lengths in epochs can't be compared with others before the data is seen."""
    if a.unit == b.unit:
        return a.value >= b.value
    if "ep" in (a.unit, b.unit):
        return False
    return nominal_batches(a, config) >= nominal_batches(b, config)


def nominal_batches(duration: Duration, config: PretrainConfig) -> float:
    """`duration` (not epochs, not a share) in batches, as if every position of a row were a token."""
    rows = config.global_batch_size
    per_batch = {"ba": 1, "sp": rows, "tok": rows * config.data.sequence_length}[duration.unit]
    return duration.value / per_batch


def _schedule(config: PretrainConfig) -> Found:
    schedule, whole = config.schedule, config.max_duration
    if whole.unit == "dur" or not whole.value:
        return
    if schedule.decay.unit not in ("dur", whole.unit) and schedule.decay.value:
        message = f"expected the unit of max_duration ({whole}) or dur, since the decay ends with the run"
        yield ["schedule.decay", "max_duration"], f"{message}; got {schedule.decay}"
        return
    warmup, decay = schedule.warmup.of(whole), schedule.decay.of(whole)
    if _not_before(warmup, whole, config):
        message = f"expected less than max_duration ({whole}); got {schedule.warmup}"
        yield ["schedule.warmup", "max_duration"], message
    elif (
        warmup.value
        and decay.value
        and "ep" not in (warmup.unit, decay.unit)
        and nominal_batches(warmup, config) + nominal_batches(decay, config) > nominal_batches(whole, config)
    ):
        message = f"warmup ({schedule.warmup}) and decay ({schedule.decay}) are longer than the run ({whole})"
        yield ["schedule.warmup", "schedule.decay", "max_duration"], message
    if decay.value > whole.value:
        yield ["schedule.decay", "max_duration"], f"expected at most max_duration ({whole}); got {schedule.decay}"
    if not decay.value:
        for name in ("decay_shape", "final_lr", "decay_from"):
            if changed(schedule, name):
                yield (
                    [f"schedule.{name}", "schedule.decay"],
                    "has no effect without a decay: set schedule.decay as well",
                )
    if schedule.decay_from is not None and config.model.init_from is not None:
        message = "can't be given beside schedule.decay_from, whose checkpoint holds the weights"
        yield ["model.init_from", "schedule.decay_from"], message


def _batches(config: PretrainConfig, ranks: int) -> Found:
    size, microbatch = config.global_batch_size, config.microbatch_size
    if size % ranks:
        yield ["global_batch_size"], f"expected a multiple of the number of ranks ({ranks}); got {size}"
    elif isinstance(microbatch, int) and (size // ranks) % microbatch:
        message = (
            f"expected a divisor of a rank's batch ({size} rows / {ranks} ranks = {size // ranks}); got {microbatch}"
        )
        yield ["microbatch_size", "global_batch_size"], message
    evaluated = config.evaluation.batch_size
    if evaluated is not None and evaluated % ranks:
        yield ["evaluation.batch_size"], f"expected a multiple of the number of ranks ({ranks}); got {evaluated}"
    for name, interval in (("evaluation", config.evaluation.interval), ("checkpoint", config.checkpoint.interval)):
        if interval is not None and not interval.value:
            yield [f"{name}.interval"], f"expected more than nothing; got {interval}"
    if config.data.validation is None:
        for name in type(config.evaluation).model_fields:
            if changed(config.evaluation, name):
                yield [f"evaluation.{name}", "data.validation"], "has no effect without data.validation"


def _parallelism(config: PretrainConfig, ranks: int) -> Found:
    ours = config.parallelism
    if ours.strategy == "ddp":
        for name in ("shard_degree", "reshard_after_forward"):
            if changed(ours, name):
                yield [f"parallelism.{name}", "parallelism.strategy"], "has no effect with parallelism.strategy: ddp"
    if isinstance(ours.shard_degree, int) and ranks % ours.shard_degree:
        message = f"expected a divisor of the number of ranks ({ranks}); got {ours.shard_degree}"
        yield ["parallelism.shard_degree"], message


def _compute(config: PretrainConfig) -> Found:
    ours, size = config.compute, architecture_of(config.model)
    if size is None or ours.activation_checkpointing in ("none", "all"):
        return
    beyond = [layer for layer in ours.recomputed(size.layers) if layer >= size.layers]
    if beyond or not ours.recomputed(size.layers):
        message = f"expected layers from 0 to {size.layers - 1}, or every Nth of {size.layers}"
        yield ["compute.activation_checkpointing"], f"{message}; got {ours.activation_checkpointing}"


def _secrets(value: object, key: str = "") -> Found:
    """Passwords in addresses: a configuration is written to the run's folder, its checkpoints and its card."""
    if isinstance(value, Section):
        for name in type(value).model_fields:
            yield from _secrets(getattr(value, name), f"{key}.{name}".lstrip("."))
    elif isinstance(value, dict | list):
        for name, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _secrets(child, f"{key}.{name}".lstrip("."))
    elif isinstance(value, str) and re.match(r"[a-z0-9+]+://[^/]*@", value):
        yield [key], "expected an address without user and password: credentials come from the environment"


def _checkpoints(config: PretrainConfig) -> Found:
    if config.checkpoint.disk_limit is not None and "://" not in (config.checkpoint.folder or ""):
        yield ["checkpoint.disk_limit", "checkpoint.folder"], "has no effect unless checkpoint.folder is in a bucket"
    for index, moment in enumerate(config.checkpoint.keep_at):
        if not _not_before(config.max_duration, moment.of(config.max_duration), config) or not moment.value:
            message = f"expected a moment within the run ({config.max_duration}); got {moment}"
            yield [f"checkpoint.keep_at.{index}", "max_duration"], message


def _places(config: PretrainConfig) -> Found:
    data = config.data
    if (data.train is None) == (data.mix is None):
        message = "expected exactly one of data.train (one dataset) and data.mix (several)"
        got = "neither" if data.mix is None else "both; `data.train: null` takes away what a file below gives"
        yield ["data.mix", "data.train"], f"{message}; got {got}"
        return
    yield from _mix(config)
    yield from _folders(data)
    remote = [key for key, stream in data.streams.items() if stream.remote is not None]
    if not remote:
        where = "data.train.remote" if data.mix is None else "a remote in data.mix"
        for name in ("cache_limit", "predownload", "download_retry", "download_timeout"):
            if changed(data, name):
                yield [f"data.{name}", *data.streams], f"has no effect without {where}"
    elif data.cache_limit is not None:
        for key in data.streams:
            if key not in remote:
                # Streaming drops shards of any dataset, whether it can be downloaded again or not.
                yield ["data.cache_limit", key], f"would delete shards of {key}, which has no remote: give it one"
    if not data.shuffle:
        for name in ("shuffle_seed", "shuffle_algo", "shuffle_block_size"):
            if changed(data, name):
                yield [f"data.{name}", "data.shuffle"], "has no effect with data.shuffle: false"
    if config.checkpoint.keep == 0:
        yield ["checkpoint.keep"], "0 keeps no checkpoint at all; expected -1 (all) or at least 1"
    for number, name in enumerate(config.checkpoint.allow):
        # A dataset's index is what is compared of it.
        if not _is_key(config, name.removesuffix(".index").split(".")):
            yield [f"checkpoint.allow.{number}"], f"expected a key of this configuration, or a section; got {name!r}"


def _is_key(value: object, parts: list[str]) -> bool:
    for part in parts:
        if isinstance(value, Section) and part in type(value).model_fields:
            value = getattr(value, part)
        elif isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return False
    return True


def _mix(config: PretrainConfig) -> Found:
    data = config.data
    if data.mix is None:
        if data.epoch_rows is not None:
            yield ["data.epoch_rows", "data.mix"], "has no effect without data.mix"
        return
    total = sum(stream.proportion for stream in data.mix.values())
    if abs(total - 1) > 1e-6:
        shares = " + ".join(f"{stream.proportion:g}" for stream in data.mix.values())
        yield ["data.mix"], f"expected proportions that add up to 1; got {shares} = {total:g}"
    if data.epoch_rows is not None and data.epoch_rows < config.global_batch_size:
        message = f"expected at least global_batch_size ({config.global_batch_size}); got {data.epoch_rows}"
        yield ["data.epoch_rows", "global_batch_size"], message


def _folders(data: DataConfig) -> Found:
    """Each split and stream unpacks its shards, of the same names, in its own folder."""
    taken: dict[str, str] = {}
    for key, stream in splits_of(data).items():
        place = normpath(stream.local)
        if place in taken:
            message = f"expected another folder than {taken[place]}"
            yield [f"{key}.local", taken[place]], message
        elif stream.remote is not None and normpath(stream.remote) == place:
            yield [f"{key}.remote", f"{key}.local"], "expected another folder than the local one; leave it out"
        taken.setdefault(place, f"{key}.local")
