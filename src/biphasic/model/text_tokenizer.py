"""Tokenize texts as an encoder reads them: with its special tokens, up to its maximum length."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import yaml
from tqdm import tqdm

from biphasic.data.tokenizer import Tokenizer, load_tokenizer
from biphasic.durations import longest_row
from biphasic.errors import UserError
from biphasic.grouping import groups_up_to
from biphasic.model.architecture import MODERNBERT_HEADS, rope_threshold
from biphasic.model.checkpoint import is_checkpoint, read_record
from biphasic.model.hf_config import config_content, is_papers, load_hf_config
from biphasic.model.pooling import SentenceSettings, read_sentence_settings
from biphasic.model.segments import reserved_positions
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

    def tokenize_and_count(self, texts: Sequence[str], max_length: int, title: str = "") -> Iterator[tuple[list[int], int]]:
        """Yield each text's token ids, and the number of tokens that were cut from its end.

        With a `title`, show a progress bar if this takes more than five seconds.
        """
        for portion in _portions(texts, title):
            for ids in self.tokenizer.encode(portion):
                yield self.with_special_tokens(ids, max_length), max(len(ids) - self._room(max_length), 0)

    def tokenize_with_offsets(
        self, texts: Sequence[str], title: str = ""
    ) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
        """Yield each text's token ids, without special tokens or truncation, and their character spans (start, end)."""
        for portion in _portions(texts, title):
            yield from self.tokenizer.encode_with_offsets(portion)


def _portions(texts: Sequence[str], title: str) -> Iterator[list[str]]:
    with tqdm(total=len(texts), desc=title, unit="text", delay=5, leave=False, disable=None if title else True) as bar:
        for portion in groups_up_to(5000, texts):
            yield portion
            bar.update(len(portion))


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


def load_encoder_config(path: str, revision: str | None, trust_remote_code: bool) -> Any:
    """Load a model's configuration. A folder without one, of other modules of sentence-transformers, is refused as such."""
    try:
        return load_hf_config(path, revision, trust_remote_code)
    except UserError:
        if not is_remote(path) and why_missing(path, revision) is None:
            read_sentence_settings(path, revision)
        raise


def require_embeddings(path: str, tokenizer: Tokenizer, embeddings: int) -> None:
    """Raise a UserError if a model's tokenizer has more tokens than its embedding, of so many rows."""
    # The last token may be a mask token that was added to a tokenizer without one; it needs no embedding.
    tokens = tokenizer.vocab_size - (tokenizer.mask_id == tokenizer.vocab_size - 1)
    if tokens > embeddings:
        counts = f"its tokenizer has {tokens:,} tokens, its embedding {embeddings:,}"
        raise UserError(f"model {path}: {counts}: they don't belong together")


def load_text_tokenizer(path: str, revision: str | None = None, trust_remote_code: bool = False) -> TextTokenizer:
    """Load an encoder's tokenizer and settings, without its weights. Arguments and errors are as in `load_encoder`.

    Its maximum length is at most the one up to which hidden states don't depend on the other texts of a batch.
    """
    if is_checkpoint(path):
        return trained_text_tokenizer(read_record(path))
    from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoModel

    config = load_encoder_config(path, revision, trust_remote_code)
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if positions is None:
        raise UserError(f"model {path}: {config.model_type} isn't supported: it has no max_position_embeddings")
    tokenizer = load_tokenizer(path, revision)
    settings = read_sentence_settings(path, revision)
    if settings.lowercase:
        tokenizer = tokenizer.lowercasing()
    has_table = False
    # A family with rotary positions has no table of them; its classes would take a second to import.
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "rope_parameters", None):
        with torch.device("meta"):
            network = AutoModel.from_config(config)
        # The configuration may include reserved positions (RoBERTa); the tokenizer's limit should not, but some do.
        positions -= reserved_positions(network)
        has_table = any(
            isinstance(part, torch.nn.Embedding) and "position" in name for name, part in network.named_modules()
        )
    limit = min(int(tokenizer.settings.get("model_max_length") or positions), positions)
    if has_table and (settings.max_length or 0) > positions:
        message = "model %s: texts are truncated to the %d tokens that it has positions for, below its max_seq_length of %d"
        _log.warning(message, path, positions, settings.max_length)
        settings = replace(settings, max_length=positions)
    # The paper's models were trained without the beginning-of-text token that their tokenizer, Llama 3's, adds.
    special = ((), ()) if is_papers(config_content(path, revision)) else tokenizer.prefix_and_suffix()
    limit, rope = settings.max_length or limit, rope_threshold(config.to_dict())
    if rope is not None and rope.length < limit:
        message = "model %s: texts are truncated to its %s (%d): beyond, %s positions depend on a batch's other texts"
        _log.warning(message, path, rope.key, limit := rope.length, rope.kind)
    return TextTokenizer(tokenizer, limit, settings, *special)
