"""Define the batch that the model trains on, after the objective was applied to the raw tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from composer.core import DataSpec
from torch import Tensor

from biphasic.data.streaming import Batch
from biphasic.model.segments import Segments, rounded_count


@dataclass(frozen=True, eq=False)
class PreparedBatch:
    """A rank's batch or microbatch, with inputs and targets. `ObjectiveSchedule` creates one for each raw batch.

    Attributes:
        objective: `clm` or `mlm`.
        phase: index of the phase in the YAML; None in validation.
        causal: whether a token attends only to itself and to tokens before it.
        inputs: int64 [rows, length].
        targets: int64 [rows, length]; `IGNORE` where nothing is predicted.
        row_ids: int64 [rows], ids in the dataset.
        lengths: segment lengths of each row, without the padding at the row's end.
        targets_per_rank: fp32 scalar, the number of targets in the global batch divided by the number of ranks.
        rows_per_rank: number of rows in the rank's batch, before it is split.
        attention: attention backend.
    """

    objective: str
    phase: int | None
    causal: bool
    inputs: Tensor
    targets: Tensor
    row_ids: Tensor
    lengths: list[list[int]]
    targets_per_rank: Tensor
    rows_per_rank: int
    attention: str = "auto"

    @property
    def segment_lengths(self) -> list[int]:
        """Lengths of all segments of the flattened rows; the padding at a row's end is a segment of its own."""
        length, segments = self.inputs.shape[1], list[int]()
        for lengths in self.lengths:
            segments += lengths
            if (padding := length - sum(lengths)) > 0:
                segments.append(padding)
        return segments

    @cached_property
    def segments(self) -> Segments:
        """Segments of the flattened rows, computed once."""
        # Attention kernels may be prepared for each combination of number of segments and maximum length. The row length is
        # an upper bound of the segment lengths that is the same for every batch.
        lengths, count = self.segment_lengths, rounded_count(len(self.segment_lengths))
        return Segments.of(lengths, self.inputs.device, self.inputs.shape[1], self.attention, count)

    def split(self, rows: int) -> list[PreparedBatch]:
        """Split the batch into microbatches of up to `rows` rows."""
        by_row = ("inputs", "targets", "row_ids", "lengths")
        parts = [slice(start, start + rows) for start in range(0, len(self.lengths), rows)]
        return [replace(self, **{name: getattr(self, name)[part] for name in by_row}) for part in parts]

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedBatch:
        """Return the batch itself: Composer copies each microbatch for training metrics, of which there are none."""
        return self


def data_spec(batches: Iterable[Any]) -> DataSpec:
    """Return a DataSpec that tells Composer how to count and split a dataloader's batches."""
    return DataSpec(
        batches,
        split_batch=lambda batch, rows: batch.split(int(rows)),  # pyright: ignore[reportAttributeAccessIssue]
        get_num_samples_in_batch=lambda batch: len(_lengths(batch)),
        get_num_tokens_in_batch=lambda batch: sum(map(sum, _lengths(batch))),
    )


def _lengths(batch: Batch | PreparedBatch) -> list[list[int]]:
    """Return each row's segment lengths. Composer counts a batch both before and after it is prepared."""
    return batch.lengths if isinstance(batch, PreparedBatch) else batch["lengths"]
