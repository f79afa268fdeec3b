"""The batches that the objective switch takes and returns: dictionaries, which Composer counts and splits by itself.

A loader's batch has

    input_ids      int64 [rows, length]
    segment_ids    int [rows, length]: 1 for a row's first segment, 2 for the second, …; 0 at padding. Optional: by default
                   segments are those of `lengths`, or one begins where `position_ids` doesn't go on by 1, or a row is one
                   segment; padding is where `attention_mask` is 0.
    row_ids        int64 [rows], from which a row's masks are drawn. Optional: by default a hash of the row's tokens.
    lengths        a list of segment lengths for each row, optionally without the padding at its end. Optional.
    counter        a number that changes each time a row is seen again. Optional: by default that of the batch.
    labels         no others than `input_ids` are accepted, because the objective makes its own.

and the switch returns

    input_ids      int64 [rows, length], with masks
    labels         int64 [rows, length]: what is predicted at each position; -100 where nothing is
    segment_ids    as above
    row_ids        as above
    lengths        as above
    step           for each row, the same `Step`

Every value has an entry for each row, so that a part of a batch is a batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
from torch import Tensor

from biphasic.errors import UserError
from biphasic.model.losses import IGNORE
from biphasic.model.segments import Segments, rounded_count, run_lengths
from biphasic.objectives.objective import Objective
from biphasic.objectives.targets import row_hashes

Batch = dict[str, Any]
"""A dictionary as described above."""


@dataclass(frozen=True, eq=False)
class Step:
    """What is the same for all rows of a global batch. Tensors are fp32 scalars."""

    objective: Objective
    phase: int | None
    """Index of the phase; None in validation."""
    mean_targets_per_rank: Tensor
    """Number of targets in the global batch, divided by the number of ranks."""
    mean_rows_per_rank: Tensor | float
    """Number of rows in the global batch, divided by the number of ranks."""
    bytes_per_target: Tensor
    """Mean number of bytes of text of a target in the global batch; NaN if unknown."""

    @property
    def causal(self) -> bool:
        return self.objective.causal

    def mean_loss(self, total: Tensor, rows: int) -> Tensor:
        return mean_over_global_batch(total, self.mean_targets_per_rank, rows, self.mean_rows_per_rank)

    def __deepcopy__(self, memo: dict[int, Any]) -> Step:
        return self  # Composer copies each microbatch


def mean_over_global_batch(
    total: Tensor, mean_targets_per_rank: Tensor | float, rows: int, mean_rows_per_rank: Tensor | float
) -> Tensor:
    """Scale a microbatch's summed loss so that Composer's sum is the mean over the global batch's targets.

    Composer multiplies the loss of a microbatch by its share of a rank's mean number of rows, which is cancelled here. DDP
    and FSDP divide gradients by the number of ranks, which is why `mean_targets_per_rank` is the number of targets in the
    global batch divided by the number of ranks.
    """
    return total / mean_targets_per_rank / (rows / mean_rows_per_rank)


def step_of(batch: Mapping[str, Any]) -> Step:
    """Return the step of a batch that the objective switch has prepared."""
    return batch["step"][0]


def complete(batch: Any, special_ids: Collection[int] = ()) -> Batch:
    """Return a loader's batch with the keys that it may leave out, except `counter`.

    Raises:
        ValueError: a value hasn't the form above.
        UserError: `labels` differ from `input_ids`. They may be -100 at `special_ids`, since an end of text may be the
            padding token, and at a segment's first token, which CLM never predicts.
    """
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(tokens, Tensor) or tokens.dim() != 2:
        keys = f" with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
        raise ValueError(
            "expected batches that are dictionaries with `input_ids`, int64 [rows, length], and optionally `segment_ids` or "
            f"`position_ids`, and `attention_mask`; got {type(batch).__name__}{keys}"
        )
    tokens, mask, lengths = tokens.long(), batch.get("attention_mask"), batch.get("lengths")
    if mask is not None and (mask.shape != tokens.shape or mask.max() > 1):
        expected = f"attention_mask: expected 1 at tokens and 0 at padding, {list(tokens.shape)}; got {list(mask.shape)}"
        raise ValueError(f"{expected}, up to {mask.max()}; numbers of segments are `segment_ids`")
    segment_ids = batch.get("segment_ids")
    if lengths is not None:
        lengths = _checked_lengths(lengths, *tokens.shape)
    if segment_ids is None and lengths is not None:
        of_rows = ((torch.tensor([*row, tokens.shape[1] - sum(row)]), [*range(1, len(row) + 1), 0]) for row in lengths)
        segment_ids = torch.stack([torch.tensor(ids).repeat_interleave(counts) for counts, ids in of_rows]).to(tokens.device)
    if segment_ids is None:
        segment_ids = torch.ones_like(tokens)
        if (positions := batch.get("position_ids")) is not None:
            # Not where they are 0: RoBERTa's begin at 2, and a row that is cut from a stream may go on with a document.
            segment_ids[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
            segment_ids = segment_ids.cumsum(1)
    else:
        rows = segment_ids.any(1)  # others are all padding, such as rows that a validation repeats
        before = (segment_ids.cumsum(1) == 0)[rows]  # the first segment
        # Without a mask: padding on the left would be one token again and again.
        is_text = (tokens != tokens[:, :1] if mask is None else mask > 0)[rows]
        if len(before) and before[:, 0].all() and (before & is_text).any():
            problem = "got 0, which is padding, at the text that each row begins with"
            raise ValueError(f"segment_ids: expected numbers from 1 on; {problem}")
    if mask is not None:
        segment_ids, lengths = segment_ids * (mask > 0), None
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and labels.shape == tokens.shape:
        may_lack = torch.isin(tokens, torch.tensor([*special_ids], dtype=torch.int64, device=tokens.device))
        may_lack[:, 0] = True
        may_lack[:, 1:] |= segment_ids[:, 1:] != segment_ids[:, :-1]
        if ((labels != tokens) & (segment_ids > 0) & ~(may_lack & (labels == IGNORE))).any():
            raise UserError(
                "the batches have `labels` that differ from `input_ids`, but the objective makes its own, of all tokens: "
                "leave them out, and masks too (DataCollatorForLanguageModeling: mlm=False)"
            )
    row_ids = batch.get("row_ids")
    return {
        "input_ids": tokens,
        "segment_ids": segment_ids,
        "row_ids": row_hashes(tokens) if row_ids is None else row_ids,
        "lengths": run_lengths(segment_ids) if lengths is None else lengths,
    }


def _checked_lengths(lengths: Any, rows: int, length: int) -> list[list[int]]:
    with suppress(TypeError):
        checked = [[index(each) for each in row] for row in lengths]
        if len(checked) == rows and all(min(row, default=1) > 0 and sum(row) <= length for row in checked):
            return checked
    expected = f"for each of {rows} rows a list of its segments' lengths, each at least 1 and together at most {length}"
    raise ValueError(f"lengths: expected {expected}; got {str(lengths)[:200]}")


def segment_lengths(batch: Mapping[str, Any]) -> list[int]:
    """Return the lengths of all segments of the flattened rows. The padding at a row's end is a separate segment."""
    length, segments = batch["input_ids"].shape[1], list[int]()
    for lengths in batch["lengths"]:
        segments += lengths
        if (padding := length - sum(lengths)) > 0:
            segments.append(padding)
    return segments


def segments_of(batch: Mapping[str, Any]) -> Segments:
    """Return the segments of the flattened rows."""
    # Some attention kernels are prepared for each combination of number of segments and maximum length. So that few
    # combinations occur, the number is rounded, and the row length is given as the maximum.
    lengths, inputs = segment_lengths(batch), batch["input_ids"]
    return Segments.of(lengths, inputs.device, inputs.shape[1], rounded_count(len(lengths)))
