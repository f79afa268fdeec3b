"""The weights of checkpoints in a mean of them, as numbers or by the decay that the mean equals."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Literal, get_args

from biphasic.config.phases import ScheduleConfig
from biphasic.durations import Duration, TrainingProgress
from biphasic.errors import UserError
from biphasic.storage import user_errors
from biphasic.timeline import learning_rate_factor

MergeShape = Literal["mean", "linear", "1-sqrt", "cosine"]


def merge_weights(weights: str | Sequence[float], batches: Sequence[int]) -> list[float]:
    """Return the weights of checkpoints at these batches, with the sum 1.

    They are given as numbers, as text with commas between numbers, as `mean`, or by the decay that they equal (`linear`,
    `1-sqrt`, `cosine`): the mean is then what the run would have become if its updates had been scaled by a decay to 0
    from the first checkpoint to the last, all those between two checkpoints by the same mean rate (WSM, arXiv 2507.17634).
    Raises a UserError if they are none of these, or the batches of a decay don't increase.
    """
    expected = f"weights {weights}: expected {len(batches)} numbers of at least 0, or {', '.join(get_args(MergeShape))}"
    if weights == "mean":
        weights = [1.0] * len(batches)
    elif weights in get_args(MergeShape):
        if any(before >= after for before, after in pairwise(batches)):
            raise UserError(f"weights {weights}: expected checkpoints at increasing batches; got {batches}")
        length = Duration(batches[-1] - batches[0], "ba")
        schedule = ScheduleConfig.model_validate({"decay": length, "decay_shape": weights})
        times = [TrainingProgress(batch, 0, 0, 0) for batch in range(int(length.value))]
        factors = [learning_rate_factor(schedule, length, time) for time in times]
        rates = [fmean(factors[before - batches[0] : after - batches[0]]) for before, after in pairwise(batches)]
        weights = [before - after for before, after in pairwise([1.0, *rates, 0.0])]
    elif isinstance(weights, str):
        with user_errors(expected, ValueError):
            weights = [float(number) for number in weights.split(",")]
    if len(weights) != len(batches) or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise UserError(expected)
    return [weight / sum(weights) for weight in weights]
