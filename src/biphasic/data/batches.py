"""The batches of a run in their order, also when its phases read different data in batches of different sizes."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch.utils.data import DataLoader

from biphasic.data.streaming import Batch, RowDataset
from biphasic.data.streams import ReadingSettings, RowStream
from biphasic.durations import BatchShape, TrainingProgress
from biphasic.errors import UserError
from biphasic.timeline import ResolvedPhase, phase_at

_BATCHES_AHEAD = 50
"""How many batches before the end of a phase the loader of the next phase's data is started."""
_Position = tuple[int, int]
"""An epoch of the data, and the number of its rows, over all ranks, that have been read."""


def advance(position: _Position, batches: int, rows: int, epoch_rows: int) -> _Position:
    """Return the position after `batches` global batches of `rows` rows. An epoch ends with its last complete batch."""
    epoch, row = position
    left = (epoch_rows - row) // rows
    if batches >= left:
        epochs, batches = divmod(batches - left, epoch_rows // rows)
        epoch, row = epoch + 1 + epochs, 0
    return epoch, row + batches * rows


@dataclass(frozen=True)
class PhaseRows:
    """What a phase reads: batches of `shape` from streams that phase `source` is the first to read, from `first_row` on."""

    source: int
    shape: BatchShape
    streams: Mapping[str, RowStream]
    reading: ReadingSettings
    first_row: int


_Build = Callable[[PhaseRows, int], DataLoader[Batch]]


class _Source:
    """The data of one or more phases. Its loader yields parts of batches, as many rows as divide all phases' batches."""

    def __init__(self, loader: DataLoader[Batch], rows: int, start: _Position):
        dataset = loader.dataset
        assert isinstance(dataset, RowDataset)
        self.loader, self.dataset, self.rows, self.start = loader, dataset, rows, start
        self._parts: Iterator[Batch] | None = None
        self._next: _Position | None = None
        self._closing: Thread | None = None

    def open(self, position: _Position) -> None:
        if position == self._next:
            return
        if self._next is None or position != (self._next[0] + 1, 0):
            self.close()
            self.wait_until_closed()
            self.dataset.start_at(*position)
        # Otherwise the loader's processes go on with the next epoch.
        self._parts, self._next = iter(self.loader), position

    def read(self, position: _Position, rows: int) -> Batch:
        """Return this rank's part of the global batch of `rows` rows at `position`."""
        self.open(position)
        assert self._parts is not None
        parts = [next(self._parts) for _ in range(rows // self.rows)]
        self._next = position[0], position[1] + rows
        if len(parts) == 1:
            return parts[0]
        joined = {name: torch.cat([part[name] for part in parts]) for name in ("input_ids", "segment_ids", "row_ids")}
        return {**joined, "lengths": [lengths for part in parts for lengths in part["lengths"]]}

    def close(self) -> None:
        """Stop the loader's processes, in a thread, because they may need seconds to end."""
        iterator: Any = self.loader._iterator
        if iterator is not None:
            self._closing = Thread(target=iterator._shutdown_workers, daemon=True)
            self._closing.start()
        elif self._parts is not None and (reading := getattr(self.dataset, "_iterator", None)) is not None:
            reading.non_blocking_exit()  # Streaming's threads in this process, without loader processes
        self._parts = self._next = self.loader._iterator = None

    def wait_until_closed(self) -> None:
        if self._closing is not None:
            self._closing.join()


class TrainingBatches(Callback):
    """A rank's batches of a run. A batch depends on the progress alone: on the phase, and on what was read before it.

    An iteration ends with an epoch of the data, which Composer then counts, and not where a phase begins. As a callback
    it stores which phases have begun, and ends the loaders' processes with the run. `build` builds the loader of a
    phase's data for a number of rows per rank.
    """

    def __init__(self, phases: Sequence[ResolvedPhase], inputs: Sequence[PhaseRows], build: _Build):
        self._phases, self._inputs = phases, inputs
        ranks = dist.get_world_size()
        self._sources = dict[int, _Source]()
        for source in sorted({each.source for each in inputs}):
            sizes = [each.shape.rows for each in inputs if each.source == source]
            rows, largest, own = math.gcd(*sizes), max(sizes), inputs[source]
            loader = build(own, rows // ranks)
            epoch_rows: int = loader.dataset.epoch_size  # pyright: ignore[reportAttributeAccessIssue]
            if epoch_rows < largest:
                names = ", ".join(own.streams)
                raise UserError(f"{names}: an epoch has {epoch_rows:,} rows, fewer than a global batch ({largest:,})")
            start = divmod(own.first_row, epoch_rows // sizes[0] * sizes[0])
            self._sources[source] = _Source(loader, rows, start)
        self._starts = [0]
        self._reading: int | None = None
        self.batch_size = inputs[0].shape.rows // ranks
        self.progress: Callable[[], TrainingProgress] = lambda: TrainingProgress(0, 0, 0, 0)
        """Returns the run's progress when a batch is requested."""

    def __len__(self) -> int:
        """Return the number of batches in an epoch. Raises a TypeError if the phases' epochs have different lengths."""
        if len({(each.source, each.shape.rows) for each in self._inputs}) > 1:
            raise TypeError("the phases' epochs have different lengths")
        return self._sources[0].dataset.epoch_size // self._inputs[0].shape.rows

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches up to the end of the epoch, each with the counter of its masks."""
        while True:
            now = self.progress()
            span = phase_at(self._phases, now)
            self._starts += [now.batches] * (span.index + 1 - len(self._starts))
            positions, own = self._positions(now.batches), self._inputs[span.index]
            if now.epochs < self.ended_epochs(now.batches):
                return
            batch = self._sources[own.source].read(positions[own.source], own.shape.rows)
            # Also after a start that comes after the data's end.
            before = {each.source for each in self._inputs[: span.index]} if self._reading is None else {self._reading}
            for source in sorted(before - {own.source}):
                self._sources[source].close()
            self._reading = own.source
            following = self._inputs[min(span.index + 1, len(self._inputs) - 1)].source
            ahead = _BATCHES_AHEAD * own.shape.in_unit(span.end.unit) if following != own.source else 0
            if ahead and now.in_unit(span.end.unit) + ahead >= span.end.value:
                self._sources[following].open(positions[following])
            # In a mix, a row may occur several times in an epoch.
            is_mix = any(stream.proportion is not None for stream in own.streams.values())
            yield {**batch, "counter": now.batches if is_mix else positions[own.source][0]}

    def loader(self, source: int) -> DataLoader[Batch]:
        return self._sources[source].loader

    def ended_epochs(self, batches: int) -> int:
        """Return the number of epochs that have ended after this many batches, of all data together."""
        positions = self._positions(batches).items()
        return sum(position[0] - self._sources[source].start[0] for source, position in positions)

    def _positions(self, batches: int) -> dict[int, _Position]:
        positions = {index: source.start for index, source in self._sources.items()}
        for own, start, end in zip(self._inputs, self._starts, [*self._starts[1:], batches], strict=False):
            epoch_rows = self._sources[own.source].dataset.epoch_size
            positions[own.source] = advance(positions[own.source], end - start, own.shape.rows, epoch_rows)
        return positions

    def close(self, state: State, logger: Logger) -> None:
        for source in self._sources.values():
            source.close()
        for source in self._sources.values():
            source.wait_until_closed()

    def state_dict(self) -> dict[str, Any]:
        """Return the first batch of each phase that has begun. With the run's progress it gives the position in the data."""
        # As one text, because PyTorch loads a list of a sharded checkpoint only if the run has as many entries.
        return {"phases": json.dumps({"starts": self._starts})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # `checkpoint.resume_overrides` may have left out phases, if all of them read the same.
        self._starts = json.loads(state["phases"])["starts"][: len(self._phases)]
