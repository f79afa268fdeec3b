"""Texts to embeddings, for evaluation: an encoder as its own files say, and one that knows nothing, to compare with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from biphasic.config.errors import UserError
from biphasic.model.encoder import Encoder
from biphasic.model.pooling import Sentences


class Embedder(Protocol):
    """What evaluation asks of a model."""

    name: str
    """`organisation/model`."""
    revision: str
    """Of its weights and settings."""

    @property
    def sentences(self) -> Sentences:
        """Prompts, and how embeddings are compared."""
        ...

    @property
    def width(self) -> int:
        """Of the embeddings."""
        ...

    @property
    def device(self) -> torch.device:
        """On which embeddings are compared."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """Everything else that decides an embedding, as JSON's types."""
        ...

    def embed(self, texts: Sequence[str], progress: Callable[[int], object]) -> np.ndarray:
        """Embeddings fp32 [texts, width] of texts with their prompts; `progress` is told how many more are done."""
        ...


@dataclass
class EncoderEmbedder:
    """An encoder in evaluation mode, on its device.

    Args:
        encoder: the encoder.
        name: see `Embedder`.
        revision: see `Embedder`.
        half: compute in bf16 (autocast).
        tokens_at_once: in a forward pass, about; None: by the device.
    """

    encoder: Encoder
    name: str
    revision: str
    half: bool = False
    tokens_at_once: int | None = None

    def __post_init__(self) -> None:
        self.encoder.backbone.eval()

    @property
    def sentences(self) -> Sentences:
        """See `Embedder`."""
        return self.encoder.reader.sentences

    @property
    def width(self) -> int:
        """Of the embeddings."""
        return self.encoder.width

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return next(self.encoder.backbone.parameters()).device

    @property
    def settings(self) -> dict[str, Any]:
        """See `Embedder`."""
        return {
            **asdict(self.sentences),
            "pooling": asdict(self.encoder.pooling),
            "longest": self.encoder.max_length,
            "precision": "amp_bf16" if self.half else "fp32",
            "tokenizer": self.encoder.tokenizer.sha256,
            "around": [list(self.encoder.reader.prefix), list(self.encoder.reader.suffix)],
        }

    def embed(self, texts: Sequence[str], progress: Callable[[int], object]) -> np.ndarray:
        """See `Embedder`.

        Raises:
            UserError: an embedding is not finite.
        """
        ids = self.encoder.tokenize(texts)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            found: Tensor = self.encoder.embed(ids, progress, self.tokens_at_once)
        if not bool(found.isfinite().all()):
            at = int((~found.isfinite().all(1)).nonzero()[0])
            raise UserError(
                f"model {self.name}: the embedding of {texts[at][:60]!r} is not finite: its weights are damaged, or "
                "overflow in this precision (precision=fp32)"
            )
        return found.numpy()


class RandomEmbedder:
    """Vectors that depend on the text's hash alone: what a number is worth that knows nothing."""

    name, revision, width = "biphasic/random", "random-1", 64
    sentences = Sentences()
    settings: Mapping[str, Any] = {}
    device = torch.device("cpu")

    def embed(self, texts: Sequence[str], progress: Callable[[int], object]) -> np.ndarray:
        """See `Embedder`."""
        found = np.empty((len(texts), self.width), np.float32)
        for row, text in enumerate(texts):
            seed = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            found[row] = np.random.default_rng(int.from_bytes(seed, "big")).standard_normal(self.width, np.float32)
        progress(len(texts))
        return found


def named_prompts(sentences: Sentences) -> dict[str, str]:
    """A model's prompts as mteb sees them: sentence-transformers gives each model an empty one for `query` and `document`.

    So mteb always finds one for these roles, and neither a `passage` prompt nor the default one ever stands before them.
    """
    return {"query": "", "document": "", **sentences.prompts}


def prompt_of(sentences: Sentences, named: str | None) -> str:
    """What goes before a text, as sentence-transformers and mteb choose it together.

    Args:
        sentences: what the model's files say.
        named: the name that mteb finds among `named_prompts` for a task and role (`NQ-query`, `Retrieval-document`,
            `query`); None: it finds none, and the default one is meant.
    """
    name = sentences.default_prompt if named is None else named
    return "" if name is None else sentences.prompts.get(name, "")
