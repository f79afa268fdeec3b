"""Embed texts for evaluation, with an encoder and its stored settings."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from biphasic.errors import UserError
from biphasic.model.encoder import Encoder
from biphasic.model.pooling import SentenceSettings


@dataclass
class EncoderEmbedder:
    """Embeds texts with an encoder in evaluation mode; `name` is `organisation/model`."""

    encoder: Encoder
    name: str
    revision: str
    """Revision of the weights and settings."""
    bf16: bool = False
    dimension: int | None = None
    """Number of first values of each embedding; None: as many as the model's files say (`truncate_dim`), or all."""

    def __post_init__(self) -> None:
        self.encoder.backbone.eval()
        self.sentence_settings: SentenceSettings = self.encoder.text_tokenizer.settings
        truncate_dim = self.sentence_settings.truncate_dim
        if self.dimension is None and truncate_dim is not None and truncate_dim < self.encoder.width:
            self.dimension = truncate_dim
        self.width: int = self.dimension or self.encoder.width
        self.device: torch.device = self.encoder.device
        self.cut = 0
        """Number of texts so far that were longer than the model's maximum length."""

    @property
    def settings(self) -> dict[str, Any]:
        """Everything besides the weights that affects an embedding, as JSON types."""
        settings = asdict(self.sentence_settings)
        settings.pop("truncate_dim")  # `dimension` has it
        return {
            **settings,
            "pooling": asdict(self.encoder.pooling),
            "max_length": self.encoder.text_tokenizer.max_length,
            "precision": "amp_bf16" if self.bf16 else "fp32",
            "tokens": self.encoder.text_tokenizer.fingerprint,
            **({"dimension": self.dimension} if self.dimension else {}),
        }

    def embed(self, texts: Sequence[str], progress: Callable[[int], object]) -> np.ndarray:
        """Return embeddings fp32 [texts, width]; `progress` is called with the number of texts just finished.

        Raises a UserError if an embedding is not finite.
        """
        tokenizer = self.encoder.text_tokenizer
        ids, cut = zip(*tokenizer.tokenize_and_count(texts, tokenizer.max_length), strict=True) if texts else ((), ())
        self.cut += sum(map(bool, cut))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            embeddings = self.encoder.embed(ids, progress)[:, : self.width]
        finite = embeddings.isfinite().all(1)
        if not bool(finite.all()):
            text = texts[int((~finite).nonzero()[0])]
            problem = f"the embedding of {text[:60]!r} is not finite"
            advice = "its weights are damaged, or overflow in this precision (precision=fp32)"
            raise UserError(f"model {self.name}: {problem}: {advice}")
        return embeddings.numpy()
