"""Load encoders for fine-tuning and evaluation, and compute their hidden states and embeddings."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import yaml
from tokenizers.normalizers import Lowercase
from torch import Tensor, nn
from tqdm import tqdm

from biphasic.data.tokenizer import Tokenizer, load_tokenizer
from biphasic.durations import longest_row
from biphasic.errors import UserError
from biphasic.grouping import groups_up_to
from biphasic.model import attention
from biphasic.model.architecture import rope_threshold
from biphasic.model.backbone import (
    config_content,
    is_decoder_export,
    is_papers,
    load_hf_config,
    load_language_model,
    load_network,
)
from biphasic.model.checkpoint import is_checkpoint, read_record
from biphasic.model.forward import packed_forward, padded_forward, reserved_positions
from biphasic.model.language_model import MODERNBERT_HEADS
from biphasic.model.pooling import Pooling, SentenceSettings, read_sentence_settings
from biphasic.model.probe import is_bidirectional, switch_to_packed_attention
from biphasic.model.segments import Segments
from biphasic.storage import is_remote
from biphasic.storage.hub import why_missing

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextTokenizer:
    """Converts texts to token ids for an encoder, at most `max_length` with the special tokens `prefix` and `suffix`.

    Of the models trained by Biphasic, only those that started from ModernBERT or whose rows had BOS have special tokens.
    """

    tokenizer: Tokenizer
    max_length: int
    settings: SentenceSettings = field(default_factory=SentenceSettings)
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    @property
    def empty_text_token(self) -> int:
        """Token that represents an empty text: end of text."""
        return self.tokenizer.pad_id if self.tokenizer.eos_id is None else self.tokenizer.eos_id

    @property
    def fingerprint(self) -> list[Any]:
        """Everything that a text's tokens depend on, except the maximum length, as JSON types."""
        tokenizer, special = self.tokenizer, [list(self.prefix), list(self.suffix)]
        # The hash is of tokenizer.json alone; separator and EOS are named in tokenizer_config.json.
        return [tokenizer.sha256, *special, tokenizer.separator_id, self.empty_text_token, self.settings.lowercase]

    def with_end_of_text(self) -> TextTokenizer:
        """Return this tokenizer with EOS after each text, also when it is saved. Raises a UserError if it has none."""
        if (eos := self.tokenizer.eos_id) is None:
            raise UserError(f"tokenizer {self.tokenizer.source}: task.end_of_text: it has no EOS token")
        if self.suffix[-1:] == (eos,):
            return self
        suffix = (*self.suffix, eos)
        return replace(self, tokenizer=self.tokenizer.adding_special_tokens(self.prefix, suffix), suffix=suffix)

    def with_special_tokens(self, ids: Sequence[int], max_length: int) -> list[int]:
        """Add prefix and suffix to a text, truncated so that the result has 1 to `max_length` tokens."""
        tokens = [*self.prefix, *ids[: self._room(max_length)], *self.suffix]
        return tokens[:max_length] or [self.empty_text_token]

    def _room(self, max_length: int) -> int:
        return max(max_length - len(self.prefix) - len(self.suffix), 0)

    def tokenize_and_count(
        self, texts: Sequence[str], max_length: int, title: str = ""
    ) -> Iterator[tuple[list[int], int]]:
        """Yield each text's token ids, and the number of tokens that were cut from its end.

        With a `title`, show a progress bar if this takes more than five seconds.
        """
        for portion in _portions(texts, title):
            if self.settings.lowercase:
                portion = [lowercased(text) for text in portion]
            for ids in self.tokenizer.encode(portion):
                yield self.with_special_tokens(ids, max_length), max(len(ids) - self._room(max_length), 0)

    def tokenize_with_offsets(
        self, texts: Sequence[str], title: str = ""
    ) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
        """Yield each text's token ids, without special tokens or truncation, and their character spans (start, end)."""
        for portion in _portions(texts, title):
            yield from self.tokenizer.encode_with_offsets(portion)


def lowercased(text: str) -> str:
    """Return a text in lower case as sentence-transformers does it, without a special form of the last sigma."""
    return Lowercase().normalize_str(text)


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


def _portions(texts: Sequence[str], title: str) -> Iterator[list[str]]:
    with tqdm(total=len(texts), desc=title, unit="text", delay=5, leave=False, disable=None if title else True) as bar:
        for portion in groups_up_to(5000, texts):
            yield portion
            bar.update(len(portion))


def length_batches(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yield batches of text indices, shortest first, of at most `tokens` tokens. A longer text has its own batch."""
    shortest_first = sorted(range(len(lengths)), key=lambda index: lengths[index])
    return groups_up_to(tokens, shortest_first, lambda index: lengths[index])


def trained_text_tokenizer(record: Mapping[str, Any]) -> TextTokenizer:
    """Load the tokenizer of a run (`read_record`), up to the longest row of training.

    It adds the special tokens that the rows had: BOS with `add_bos: true`, or ModernBERT's own.
    """
    run = yaml.safe_load(record["config"])
    tokenizer, around = load_tokenizer(run["tokenizer"]), ((), ())
    if json.loads(record["backbone"])["model_type"] in MODERNBERT_HEADS:
        around = tokenizer.prefix_and_suffix()
    elif record["data"].get("add_bos"):
        around = (tokenizer.require("bos"),), ()
        tokenizer = tokenizer.adding_special_tokens(*around)
    return TextTokenizer(tokenizer, longest_row(run), SentenceSettings(), *around)


def _load_config(path: str, revision: str | None, trust_remote_code: bool) -> Any:
    """Load a model's configuration. A folder without one, of other modules of sentence-transformers, is refused as such."""
    try:
        return load_hf_config(path, revision, trust_remote_code)
    except UserError:
        if not is_remote(path) and why_missing(path, revision) is None:
            read_sentence_settings(path, revision)
        raise


def load_text_tokenizer(path: str, revision: str | None = None, trust_remote_code: bool = False) -> TextTokenizer:
    """Load an encoder's tokenizer and settings, without its weights. Arguments and errors are as in `load_encoder`.

    Its maximum length is at most the one up to which hidden states don't depend on the other texts of a batch.
    """
    if is_checkpoint(path):
        return trained_text_tokenizer(read_record(path))
    from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoModel

    config = _load_config(path, revision, trust_remote_code)
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if positions is None:
        raise UserError(f"model {path}: {config.model_type} isn't supported: it has no max_position_embeddings")
    tokenizer = load_tokenizer(path, revision)
    settings = read_sentence_settings(path, revision)
    # The configuration may include reserved positions (RoBERTa); the tokenizer's limit, if there is one, doesn't.
    limit = int(tokenizer.settings.get("model_max_length") or positions)
    if limit >= positions:
        limit = positions
        if type(config) in MODEL_FOR_MASKED_LM_MAPPING:
            with torch.device("meta"):
                limit -= reserved_positions(AutoModel.from_config(config))
    # The paper's models were trained without the beginning-of-text token that their tokenizer, Llama 3's, adds.
    special = ((), ()) if is_papers(config_content(path, revision)) else tokenizer.prefix_and_suffix()
    limit, rope = settings.max_length or limit, rope_threshold(config.to_dict())
    if rope is not None and rope.length < limit:
        message = "model %s: texts are truncated to its %s (%d): beyond, %s positions depend on a batch's other texts"
        _log.warning(message, path, rope.key, limit := rope.length, rope.kind)
    return TextTokenizer(tokenizer, limit, settings, *special)


def load_encoder(path: str, trust_remote_code: bool = False, revision: str | None = None) -> Encoder:
    """Load a bidirectional encoder, on the CPU in fp32.

    `path` is an exported folder, a Biphasic checkpoint, a Hugging Face folder (of an encoder, or of a decoder, which is made
    bidirectional) or a hub id, with a `revision`: branch, tag or commit. Raises a UserError if the model can't be loaded or
    used, or has its own code and isn't bidirectional.
    """
    if is_checkpoint(path):
        return Encoder(load_language_model(path).backbone, load_text_tokenizer(path))
    config = _load_config(path, revision, trust_remote_code)
    from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoModel

    own_code = trust_remote_code and "AutoModel" in (getattr(config, "auto_map", None) or {})
    is_own_family = is_converted = False
    content = config_content(path, revision)
    if is_decoder_export(content) or is_papers(content) or (config.model_type == "eurobert" and not own_code):
        options = {"revision": revision, "attn_implementation": attention.ATTENTION_NAME}
        backbone = load_network(AutoModel, path, config, exact=True, **options)
        backbone.get_input_embeddings().padding_idx = None  # as in `LanguageModel`
    elif own_code or type(config) in MODEL_FOR_MASKED_LM_MAPPING:
        backbone = load_network(AutoModel, path, config, revision=revision, trust_remote_code=trust_remote_code)
        if not is_bidirectional(backbone.eval()):
            raise UserError(f"model {path}: its own code is causal: an encoder has to be bidirectional")
        is_own_family = True
    else:
        backbone = load_language_model(path, trust_remote_code, revision).backbone
        is_converted = True
    # A pooler is removed, because it gets no gradients here, and DDP would wait for them.
    if isinstance(getattr(backbone, "pooler", None), nn.Module):
        backbone.pooler = None  # pyright: ignore[reportArgumentType]
    if is_own_family and not own_code:
        switch_to_packed_attention(backbone)
    text_tokenizer = load_text_tokenizer(path, revision, trust_remote_code)
    tokenizer = text_tokenizer.tokenizer
    embeddings: int = backbone.get_input_embeddings().weight.shape[0]  # pyright: ignore
    # The last token may be a mask token that was added to a tokenizer without one; it needs no embedding.
    tokens = tokenizer.vocab_size - (tokenizer.mask_id == tokenizer.vocab_size - 1)
    if tokens > embeddings:
        counts = f"its tokenizer has {tokens:,} tokens, its embedding {embeddings:,}"
        raise UserError(f"model {path}: {counts}: they don't belong together")
    return Encoder(backbone, text_tokenizer, is_own_family=is_own_family, is_converted=is_converted)


def load_embedder(path: str, trust_remote_code: bool = False, revision: str | None = None) -> Encoder:
    """Load an encoder for its embeddings. Arguments and errors are as in `load_encoder`.

    Also raises a UserError if it is a decoder that was trained to embed texts with causal attention.
    """
    encoder = load_encoder(path, trust_remote_code, revision)
    if encoder.is_converted and encoder.text_tokenizer.settings.pooling is not None:
        raise UserError(f"model {path}: embeds texts with causal attention, which isn't supported: expected an encoder")
    return encoder
