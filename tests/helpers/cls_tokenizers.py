"""Tokenizers that put [CLS] and [SEP] around a text, as BERT's does."""

from pathlib import Path

from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
"""The special tokens. They are the first of a vocabulary."""
NAMES = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL}
"""transformers' names for the special tokens."""
AROUND = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
)


def save(tokenizer: Tokenizer, folder: Path, longest: int = 62) -> None:
    """Write a tokenizer, with [CLS] and [SEP] around a text of at most `longest` tokens, in the hub's format."""
    tokenizer.post_processor = AROUND
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=longest, **NAMES).save_pretrained(folder)
