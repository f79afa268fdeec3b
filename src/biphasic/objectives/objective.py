"""Training objectives: everything that distinguishes one from another, in one object each.

Imports neither torch nor Composer, so that a plan can read objectives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from biphasic.durations import Duration

if TYPE_CHECKING:
    from torch import Tensor

    from biphasic.objectives.targets import Vocabulary


@dataclass(frozen=True)
class Draws:
    """What the random numbers of a batch are a function of, besides their purpose."""

    row_ids: Tensor  # int64 [rows]
    seed: int
    counter: int
    """A number that changes each time a row is seen again. 0 in validation."""


@dataclass(frozen=True)
class Objective:
    """A training objective, and the phase of a run that trains with it. Subclasses are frozen dataclasses.

    A subclass sets the class attributes and defines `inputs_and_targets` and `predicted_share`. Its fields are the keys of
    its phase in a YAML, where `name: MODULE.CLASS` chooses it.
    """

    name: ClassVar[str]
    """Its name in metrics: `loss/train/<name>`."""
    causal: ClassVar[bool]
    """Whether a token attends only to itself and earlier tokens of its segment."""
    words: ClassVar[str]
    """What it is called in a model card."""

    until: Duration | str | None = None
    """End of the phase, counted from the start of the run (`21000ba`, `0.5dur`); None for the last phase."""
    reset_optimizer: bool = False
    """Whether to reset the optimizer state when the phase begins."""

    def inputs_and_targets(
        self, tokens: Tensor, segment_ids: Tensor, vocabulary: Vocabulary, draws: Draws, share: Callable[[], float]
    ) -> tuple[Tensor, Tensor]:
        """Return a batch's inputs and targets, int64 [rows, length] each; targets are -100 where nothing is predicted.

        Tokens are int64 [rows, length], and `segment_ids` int [rows, length]: 1 for a row's first segment, 2 for the
        second, …; 0 for padding. `draws` are for `biphasic.objectives.targets.random_integers`, and `share` returns the
        share of the phase that has passed, from 0 to 1.
        """
        raise NotImplementedError

    def predicted_share(self, share: float) -> float:
        """Return the expected share of positions with a target, after the given share of the phase."""
        raise NotImplementedError

    def metrics(self, share: Callable[[], float]) -> dict[str, float]:
        """Return what is logged with each batch, besides its phase."""
        return {}

    def validating(self, masking_ratio: float) -> Objective:
        """Return the objective of validation, with the fixed masking ratio that all runs share, if it has one."""
        return self

    def __str__(self) -> str:
        return self.name.upper()


@dataclass(frozen=True)
class CLM(Objective):
    """Causal language modeling: each token predicts the next token of its segment."""

    name = "clm"
    causal = True
    words = "causal language modeling"

    def inputs_and_targets(
        self, tokens: Tensor, segment_ids: Tensor, vocabulary: Vocabulary, draws: Draws, share: Callable[[], float]
    ) -> tuple[Tensor, Tensor]:
        from biphasic.objectives.targets import clm_targets

        return tokens, clm_targets(tokens, segment_ids)

    def predicted_share(self, share: float) -> float:
        return 1.0


@dataclass(frozen=True)
class Ramp:
    """A masking ratio that changes linearly during its phase."""

    start: float
    end: float


@dataclass(frozen=True)
class Replacement:
    """Shares of the selected tokens that become the mask token, become a random token, or stay; together 1."""

    mask: float = 1.0
    random: float = 0.0
    keep: float = 0.0

    def __post_init__(self) -> None:
        shares = self.mask, self.random, self.keep
        if not (min(shares) >= 0 and abs(sum(shares) - 1) < 1e-9):
            raise ValueError(f"mask, random and keep: expected shares that add up to 1; got {' + '.join(map(str, shares))}")


@dataclass(frozen=True)
class MLM(Objective):
    """Masked language modeling: masked tokens are predicted from the tokens on both sides in their segment."""

    name = "mlm"
    causal = False
    words = "masked language modeling"

    masking_ratio: Any = 0.4
    """Probability with which each token is selected; a number in (0, 1) or a `Ramp`."""
    replacement: Any = Replacement()
    """What stands in place of the selected tokens."""
    target: Literal["same", "next"] = "same"
    """`same` predicts a masked token at its own position, `next` at the position before it, as CLM does."""

    def __post_init__(self) -> None:
        ratio = self.masking_ratio
        for number in (ratio,) if isinstance(ratio, int | float) else (ratio.start, ratio.end):
            if not 0 < number < 1:
                raise ValueError(f"masking_ratio: expected numbers between 0 and 1; got {number}")

    def inputs_and_targets(
        self, tokens: Tensor, segment_ids: Tensor, vocabulary: Vocabulary, draws: Draws, share: Callable[[], float]
    ) -> tuple[Tensor, Tensor]:
        from biphasic.objectives.targets import mlm_inputs_and_targets

        return mlm_inputs_and_targets(
            tokens,
            segment_ids,
            draws.row_ids,
            vocabulary,
            seed=draws.seed,
            counter=draws.counter,
            masking_ratio=self._ratio(share),
            random_share=self.replacement.random,
            keep_share=self.replacement.keep,
            target=self.target,
        )

    def predicted_share(self, share: float) -> float:
        return self._ratio(lambda: share)

    def metrics(self, share: Callable[[], float]) -> dict[str, float]:
        return {"objective/masking_ratio": self._ratio(share)}

    def validating(self, masking_ratio: float) -> MLM:
        """Return MLM with a fixed ratio and the mask token alone. A head that predicts at the position before still does."""
        return MLM(masking_ratio=masking_ratio, target=self.target)

    def _ratio(self, share: Callable[[], float]) -> float:
        ratio = self.masking_ratio
        # Only a ramp asks how much of its phase has passed, which a phase whose times have different units can't say.
        return ratio if isinstance(ratio, int | float) else ratio.start + (ratio.end - ratio.start) * share()

    def __str__(self) -> str:
        ratio = self.masking_ratio
        return f"MLM {ratio:.0%}" if isinstance(ratio, int | float) else f"MLM {ratio.start:.0%} to {ratio.end:.0%}"
