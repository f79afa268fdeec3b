"""An objective of one's own, in its own file: mask spans of tokens (CONTRIBUTING.md shows it)."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import max_pool1d, pad

from biphasic import Objective, Vocabulary
from biphasic.objectives.objective import Draws
from biphasic.objectives.targets import random_integers, with_probability

_SPANS = 11  # a purpose of its own for the random numbers


@dataclass(frozen=True)
class MaskedSpans(Objective):
    """Predict the tokens of masked spans of `span` tokens, which may overlap and end with their segment."""

    name = "spans"
    causal = False
    words = "span masking"

    span: int = 3
    masking_ratio: float = 0.3

    def inputs_and_targets(
        self, tokens: Tensor, segment_ids: Tensor, vocabulary: Vocabulary, draws: Draws, share: Callable[[], float]
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens with masked spans, and the masked tokens as targets."""
        integers = random_integers(draws.seed, _SPANS, draws.counter, draws.row_ids, tokens.shape[1])
        begins = with_probability(integers, 1 - (1 - self.masking_ratio) ** (1 / self.span))
        # A position is masked if a span begins at it or at one of the `span - 1` before it.
        within = max_pool1d(pad(begins.float(), (self.span - 1, 0)), self.span, stride=1) > 0
        masked = within & (segment_ids > 0)
        return tokens.masked_fill(masked, vocabulary.mask_id), tokens.masked_fill(~masked, -100)

    def predicted_share(self, share: float) -> float:
        """Return the masking ratio."""
        return self.masking_ratio
