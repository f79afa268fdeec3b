"""Compare the losses of benchmark runs: what is timed must train the same model."""

from __future__ import annotations

from workload import Run

AGREE = 1e-4
"""Nats by which two losses of the same step may differ."""


class Disagreement(Exception):
    """Two runs that should train the same model do not."""


def require_same(first: Run, second: Run, label: str) -> float:
    """Compare the losses of every step.

    Returns:
        The largest difference, in nats.

    Raises:
        Disagreement: at some step they differ by more than `AGREE`, or a run has fewer steps.
    """
    if len(first.losses) != len(second.losses):
        raise Disagreement(f"{label}: {len(first.losses)} steps against {len(second.losses)}")
    largest = 0.0
    for step, (first_loss, second_loss) in enumerate(zip(first.losses, second.losses, strict=True), 1):
        # In this form a NaN counts as a difference.
        if not abs(first_loss - second_loss) <= AGREE:
            raise Disagreement(
                f"{label}: at step {step} the losses are {first_loss:.6f} and {second_loss:.6f}, more than {AGREE} apart: "
                "they don't train the same model on the same batches, so their times can't be compared"
            )
        largest = max(largest, abs(first_loss - second_loss))
    return largest


class Agreement:
    """Compares each run's losses with the first run's as soon as it ends, so that a wrong benchmark stops early."""

    def __init__(self) -> None:
        self.largest = 0.0
        """Largest difference so far, in nats."""
        self._first: Run | None = None

    def __call__(self, run: Run, label: str) -> Run:
        """Returns the run if its losses agree.

        Raises:
            Disagreement: they don't.
        """
        self._first = self._first or run
        self.largest = max(self.largest, require_same(self._first, run, label))
        return run
