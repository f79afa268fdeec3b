"""An encoder ready to embed texts: a backbone that looks both ways, its tokenizer, its limits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from biphasic.config.errors import UserError
from biphasic.data.tokenizer import Tokenizer, load_tokenizer
from biphasic.model import attention
from biphasic.model.backbone import load_language_model
from biphasic.model.checkpoint import is_checkpoint, read_checkpoint
from biphasic.model.packed import encode_texts, mean_pool

TOKENS_AT_ONCE = 8192
"""Tokens in a forward pass of `Encoder.embed`."""


@dataclass
class Encoder:
    """`prompts` go before texts, by role (`query`, `document`); `max_length` counts tokens, the prompt's included."""

    backbone: nn.Module
    tokenizer: Tokenizer
    max_length: int
    prompts: dict[str, str] = field(default_factory=dict)

    def tokenize(self, texts: Sequence[str], prompt: str = "") -> list[list[int]]:
        """Token ids of each text behind the prompt, cut to `max_length`; an empty text is one end-of-text token."""
        ids = self.tokenizer.encode([prompt + text for text in texts])
        nothing = [self.tokenizer.pad_id if self.tokenizer.eos_id is None else self.tokenizer.eos_id]
        return [found[: self.max_length] or nothing for found in ids]

    @torch.inference_mode()
    def embed(self, texts: Sequence[Sequence[int]], progress: Callable[[int], object] | None = None) -> Tensor:
        """Mean-pooled embeddings of token lists, fp32 [texts, width] on the CPU.

        Texts of like length share a forward pass, without padding.

        Args:
            texts: token ids, none empty.
            progress: is told how many more texts are done.
        """
        device = next(self.backbone.parameters()).device
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        found: list[Tensor] = []
        at = 0
        while at < len(order):
            end, tokens = at, 0
            while end < len(order) and (end == at or tokens + len(texts[order[end]]) <= TOKENS_AT_ONCE):
                tokens += len(texts[order[end]])
                end += 1
            hidden, segments = encode_texts(self.backbone, [texts[index] for index in order[at:end]], device)
            found.append(mean_pool(hidden, segments).cpu())
            if progress is not None:
                progress(end - at)
            at = end
        width: int = self.backbone.config.hidden_size  # pyright: ignore
        embeddings = torch.empty((len(texts), width))
        if found:
            embeddings[order] = torch.cat(found)
        return embeddings


def load_encoder(path: str, trust_remote_code: bool = False) -> Encoder:
    """An encoder from an exported folder, a Biphasic checkpoint, or a Hugging Face decoder's folder.

    Raises:
        UserError: nothing usable is there.
    """
    if is_checkpoint(path):
        config = yaml.safe_load(read_checkpoint(path).record["config"])
        backbone = load_language_model(path).backbone
        return Encoder(backbone, load_tokenizer(config["tokenizer"]), config["data"]["sequence_length"])
    backbone = _bare_encoder(path) or load_language_model(path, trust_remote_code).backbone
    tokenizer = load_tokenizer(path)
    longest: int = backbone.config.max_position_embeddings  # pyright: ignore
    settings = _json(Path(path) / "sentence_bert_config.json")
    prompts = _json(Path(path) / "config_sentence_transformers.json").get("prompts") or {}
    return Encoder(backbone, tokenizer, settings.get("max_seq_length") or longest, prompts)


def _bare_encoder(path: str) -> nn.Module | None:
    """The backbone of an exported folder, which may lack a language-model head; None if the folder is something else."""
    if _json(Path(path) / "config.json").get("model_type") != "eurobert":
        return None
    from safetensors import SafetensorError
    from transformers import AutoModel

    attention.register()
    try:
        return AutoModel.from_pretrained(path, attn_implementation=attention.NAME, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"model {path}: can't be loaded ({str(error).strip().splitlines()[0]})") from None


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
