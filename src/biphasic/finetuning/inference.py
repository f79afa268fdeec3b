"""Run a fine-tuned model over many texts, divided among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from biphasic.downstream.array_cache import Ragged
from biphasic.model.encoder import Encoder, length_batches
from biphasic.model.pooling import mean_pool
from biphasic.model.segments import Segments


@dataclass(frozen=True)
class TrainedModel:
    """A fine-tuned encoder and its head, with the settings for scoring."""

    encoder: Encoder
    head: nn.Module
    tokens_per_pass: int
    bf16: bool

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.encoder.backbone.parameters()).device

    def predict(
        self, texts: Ragged, predict_pass: Callable[[Tensor, Segments, list[int]], Sequence[Any]], title: str
    ) -> list[Any]:
        """Return the predictions for all texts, in the order of the texts, on every rank.

        Args:
            texts: token ids.
            predict_pass: maps hidden states [tokens, width], segments and text indices to the predictions for these texts.
            title: label of the progress bar.
        """
        from composer.utils import dist

        local: list[tuple[int, Any]] = []
        for indices, hidden, segments in self._forward_passes(texts, title):
            local += zip(indices, predict_pass(hidden, segments, indices), strict=True)
        predictions = dict(pair for rank in dist.all_gather_object(local) for pair in rank)
        return [predictions[index] for index in range(len(texts))]

    def embed(self, texts: Ragged, title: str) -> Tensor:
        """Return mean-pooled embeddings, fp32 [texts, width] on the model's device, on every rank."""
        from composer.utils import dist

        embeddings = torch.zeros((len(texts), self.encoder.width), device=self.device)
        for indices, hidden, segments in self._forward_passes(texts, title):
            embeddings[indices] = mean_pool(hidden, segments)
        dist.all_reduce(embeddings, reduce_operation="SUM")
        return embeddings

    def _forward_passes(self, texts: Ragged, title: str) -> Iterator[tuple[list[int], Tensor, Segments]]:
        """Yield text indices, hidden states and segments of each of this rank's forward passes."""
        # Imported here because Composer takes seconds to import and naming a trial doesn't need it.
        from composer.utils import dist

        rank, ranks = dist.get_global_rank(), dist.get_world_size()
        bar = tqdm(total=len(texts), desc=title, unit="text", delay=10, leave=False, disable=rank > 0)
        self.encoder.backbone.eval()
        self.head.eval()
        with torch.inference_mode(), torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16), bar:
            for number, indices in enumerate(length_batches(texts.lengths.tolist(), self.tokens_per_pass)):
                if number % ranks == rank:
                    tokens, lengths = texts.concatenate(indices)
                    segments = Segments.of(lengths, self.device)
                    on_device = torch.from_numpy(tokens).long().to(self.device, non_blocking=True)
                    yield indices, self.encoder.hidden(on_device, segments), segments
                bar.update(len(indices))
