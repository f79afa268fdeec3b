"""Load encoders for fine-tuning and evaluation, and compute their hidden states and embeddings."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers.normalizers import Lowercase
from torch import Tensor, nn

from biphasic.data.same_encoding import TELLING_TEXTS, encoding_difference
from biphasic.data.tokenizer import Tokenizer
from biphasic.errors import UserError
from biphasic.grouping import length_batches
from biphasic.model import attention
from biphasic.model.backbone import load_language_model, load_network
from biphasic.model.checkpoint import is_checkpoint
from biphasic.model.forward import packed_forward, padded_forward
from biphasic.model.hf_config import config_content, is_decoder_export, is_papers
from biphasic.model.pooling import Pooling
from biphasic.model.probe import is_bidirectional, sees_padding, switch_to_packed_attention
from biphasic.model.segments import Segments
from biphasic.model.text_tokenizer import TextTokenizer, load_encoder_config, load_text_tokenizer, require_embeddings
from biphasic.storage import user_errors

_log = logging.getLogger(__name__)


class _NoPooler(nn.Module):
    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden


@dataclass
class Encoder:
    """A bidirectional network and its tokenizer."""

    backbone: nn.Module
    text_tokenizer: TextTokenizer
    is_own_family: bool = False
    """Whether the network belongs to an encoder family (BERT) or has its own code, so that exports keep its format."""
    is_converted: bool = False
    """Whether it is a decoder that was made bidirectional here."""

    def __post_init__(self) -> None:
        self.pooling: Pooling = self.text_tokenizer.settings.pooling or Pooling()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text_tokenizer.tokenizer

    @property
    def device(self) -> torch.device:
        return next(self.backbone.parameters()).device

    @property
    def width(self) -> int:
        return self.backbone.config.hidden_size  # pyright: ignore

    @property
    def is_packed(self) -> bool:
        return self.backbone.config._attn_implementation == attention.ATTENTION_NAME  # pyright: ignore

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, at most `max_length`. An empty text is one end-of-text token."""
        return [ids for ids, _ in self.text_tokenizer.tokenize_and_count(texts, self.text_tokenizer.max_length)]

    def hidden(self, tokens: Tensor, segments: Segments) -> Tensor:
        """Compute bidirectional hidden states [tokens, width] from the token ids of concatenated texts, int64 [tokens]."""
        if self.is_packed:
            return packed_forward(self.backbone, tokens, segments, causal=False)
        return padded_forward(self.backbone, tokens, segments, self.tokenizer.pad_id)

    @torch.inference_mode()
    def embed(self, texts: Sequence[Sequence[int]], progress: Callable[[int], object] | None = None) -> Tensor:
        """Compute the pooled embeddings of tokenized texts, fp32 [texts, width] on the CPU. No text may be empty.

        Texts of similar length share a forward pass. `progress` is called after each pass with its number of texts.
        """
        device = self.device
        # On CPUs, hidden states then fit in the cache.
        at_once = 65536 if device.type == "cuda" else 1024
        embeddings = torch.empty((len(texts), self.width))
        for batch in length_batches([len(text) for text in texts], at_once):
            segments = Segments.of([len(texts[index]) for index in batch], device)
            tokens = torch.tensor([token for index in batch for token in texts[index]], dtype=torch.int64)
            hidden = self.hidden(tokens.to(device, non_blocking=True), segments)
            embeddings[batch] = self.pooling(hidden, segments).cpu()
            if progress is not None:
                progress(len(batch))
        return embeddings


def load_encoder(path: str, trust_remote_code: bool = False, revision: str | None = None) -> Encoder:
    """Load a bidirectional encoder, on the CPU in fp32.

    `path` is an exported folder, a Biphasic checkpoint, a Hugging Face folder (of an encoder, or of a decoder, which is made
    bidirectional) or a hub id, with a `revision`: branch, tag or commit. Raises a UserError if the model can't be loaded or
    used, or has its own code and isn't bidirectional.
    """
    if is_checkpoint(path):
        return Encoder(load_language_model(path).backbone, load_text_tokenizer(path))
    config = load_encoder_config(path, revision, trust_remote_code)
    from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoModel

    own_code = trust_remote_code and "AutoModel" in (getattr(config, "auto_map", None) or {})
    is_own_family = is_converted = False
    content = config_content(path, revision)
    if is_decoder_export(content) or is_papers(content) or (config.model_type == "eurobert" and not own_code):
        options = {"revision": revision, "attn_implementation": attention.ATTENTION_NAME}
        backbone = load_network(AutoModel, path, config, exact=True, **options)
        backbone.get_input_embeddings().padding_idx = None  # as in `LanguageModel`
    elif own_code or type(config) in MODEL_FOR_MASKED_LM_MAPPING:
        if config.model_type == "big_bird" and config.attention_type == "block_sparse":
            # transformers changes to full attention for good at the first short text. Exports say what was computed.
            config.attention_type = "original_full"
            _log.warning("model %s: its block_sparse attention is computed as full attention (original_full)", path)
        backbone = load_network(AutoModel, path, config, revision=revision, trust_remote_code=trust_remote_code)
        with user_errors(f"model {path}: can't be used as an encoder", Exception):  # its code may raise anything
            if not is_bidirectional(backbone.eval()):
                raise ValueError("its hidden states don't depend on later tokens: it is causal, or lacks a kernel here")
        is_own_family = True
    else:
        backbone = load_language_model(path, trust_remote_code, revision).backbone
        is_converted = True
    # A pooler is removed, because it gets no gradients here, and DDP would wait for them. Some families always call it.
    if isinstance(getattr(backbone, "pooler", None), nn.Module):
        backbone.pooler = _NoPooler()
    if is_own_family and not own_code:
        switch_to_packed_attention(backbone)
    text_tokenizer = load_text_tokenizer(path, revision, trust_remote_code)
    tokenizer = text_tokenizer.tokenizer
    embeddings: int = backbone.get_input_embeddings().weight.shape[0]  # pyright: ignore
    require_embeddings(path, tokenizer, embeddings)
    texts = map(Lowercase().normalize_str, TELLING_TEXTS) if text_tokenizer.settings.lowercase else TELLING_TEXTS
    if (difference := encoding_difference(tokenizer, texts, add_special_tokens=True, revision=revision)) is not None:
        _log.warning("%s", difference)
    if tokenizer.settings.get("truncation_side") == "left":
        _log.warning("model %s: long texts are cut at their end, although its tokenizer has truncation_side: left", path)
    encoder = Encoder(backbone, text_tokenizer, is_own_family=is_own_family, is_converted=is_converted)
    if not encoder.is_packed and sees_padding(backbone, tokenizer.pad_id):
        _log.warning("model %s: a text's hidden states depend on padding, and so on the other texts of its batch", path)
    return encoder


def load_embedder(path: str, trust_remote_code: bool = False, revision: str | None = None) -> Encoder:
    """Load an encoder for its embeddings. Arguments and errors are as in `load_encoder`.

    Also raises a UserError if it is a decoder that was trained to embed texts with causal attention.
    """
    encoder = load_encoder(path, trust_remote_code, revision)
    if encoder.is_converted and encoder.text_tokenizer.settings.pooling is not None:
        raise UserError(f"model {path}: embeds texts with causal attention, which isn't supported: expected an encoder")
    return encoder
