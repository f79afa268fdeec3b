"""What each phase of a run reads: its data, the size of its batches, and the base of its rotary positions.

A phase that doesn't name one of them has that of the phase before, and the first phase those of the run's own sections.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from posixpath import normpath

from biphasic.config.base import KeyProblems
from biphasic.config.data import DataConfig, cache_limit_problems, data_problems
from biphasic.config.phases import Phase
from biphasic.data.streams import RowStream
from biphasic.durations import BatchShape


@dataclass(frozen=True)
class PhaseInputs:
    """What a phase reads: global batches of `rows` rows of `data`, which phase `source` is the first to read.

    `rope_theta`: base of the rotary positions; None if no phase so far has changed it.
    """

    data: DataConfig
    source: int
    rows: int
    rope_theta: float | None

    @property
    def shape(self) -> BatchShape:
        """The size of the phase's global batches."""
        return BatchShape(self.rows, self.data.sequence_length)

    @property
    def streams(self) -> dict[str, RowStream]:
        """The streams of the data by their keys in the YAML."""
        above = f"{phase_key(self.source)}." if self.source else ""
        return {f"{above}{key}": stream for key, stream in self.data.streams.items()}


def phase_key(index: int) -> str:
    """Return the YAML key of a phase."""
    return f"objective.phases.{index}"


def phase_inputs(phases: Sequence[Phase], data: DataConfig, rows: int) -> list[PhaseInputs]:
    """Return what each phase reads. `data` and `rows` are the run's own `data` and `global_batch_size`."""
    inputs = [PhaseInputs(data, 0, rows, None)]
    for index, phase in enumerate(phases[1:], start=1):
        now = inputs[-1]
        if phase.data is not None:
            own = phase.data.after(now.data, data.cache)
            same = (each.source for each in inputs if each.data.identity() == own.identity())
            now = replace(now, data=own, source=next(same, index))
        theta = now.rope_theta if phase.model is None else phase.model.rope_theta
        inputs.append(replace(now, rows=phase.global_batch_size or now.rows, rope_theta=theta))
    return inputs


def sources(inputs: Sequence[PhaseInputs]) -> list[PhaseInputs]:
    """Return the first phase of each data, in the order in which they are read."""
    return [each for index, each in enumerate(inputs) if each.source == index]


def inputs_differ(inputs: Sequence[PhaseInputs]) -> bool:
    """Return whether phases differ in data or batch size, and so in the length of their epochs."""
    return len({(each.source, each.rows) for each in inputs}) > 1


def input_problems(phases: Sequence[Phase], inputs: Sequence[PhaseInputs], ranks: int) -> KeyProblems:
    """Report keys of phases that can't be used: data, and batches that `ranks` processes can't divide."""
    for name in ("data", "global_batch_size", "model"):
        if getattr(phases[0], name) is not None:
            message = f"the first phase has the run's own {name}: set that instead"
            yield [f"{phase_key(0)}.{name}"], message
    if phases[0].reset_optimizer:
        yield [f"{phase_key(0)}.reset_optimizer"], "has no effect: the first phase begins with a new state"
    folders = {normpath(stream.local): key for key, stream in inputs[0].data.splits.items()}
    for index, (phase, own) in list(enumerate(zip(phases, inputs, strict=True)))[1:]:
        if phase.global_batch_size is not None and phase.global_batch_size % ranks:
            yield [f"{phase_key(index)}.global_batch_size"], f"expected a multiple of the number of ranks ({ranks})"
        if phase.data is None:
            continue
        for keys, message in data_problems(own.data, own.rows):
            # Keys that the phase can't have were checked in the run's own section.
            if keys[0].split(".")[1] in type(phase.data).model_fields:
                yield [f"{phase_key(index)}.{key}" if key.startswith("data.") else key for key in keys], message
        if own.source != index:
            continue
        yield from cache_limit_problems(own.data, own.streams)
        for key, stream in own.streams.items():
            other = folders.setdefault(normpath(stream.local), key)
            if other != key and stream.remote is not None:  # the shards have the same names
                at = f"{phase_key(index)}.data.cache" if phase.data.folder is not None else f"{key}.local"
                yield [at, other], f"expected another folder for the shards of {stream.remote} than that of {other}"
