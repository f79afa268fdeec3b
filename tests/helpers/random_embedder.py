"""An embedder without a model, for tests of what is done with embeddings."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from biphasic.model.pooling import SentenceSettings


class RandomEmbedder:
    """Embeds each text as random numbers that depend only on a hash of the text."""

    name, revision, width = "biphasic/random", "random-1", 64
    sentence_settings = SentenceSettings()
    settings: dict[str, Any] = {"max_length": None}
    device = torch.device("cpu")
    cut = 0

    def embed(self, texts: Sequence[str], progress: Callable[[int], object]) -> np.ndarray:
        """Return standard normal embeddings, fp32 [texts, width]."""
        embeddings = np.empty((len(texts), self.width), np.float32)
        for row, text in enumerate(texts):
            seed = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            embeddings[row] = np.random.default_rng(int.from_bytes(seed, "big")).standard_normal(self.width, np.float32)
        progress(len(texts))
        return embeddings
