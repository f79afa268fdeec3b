"""Small models of other families, in folders of the hub's format."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    ModernBertConfig,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
    ModernBertForMaskedLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from helpers import cls_tokenizers
from helpers.cls_tokenizers import SPECIAL


def bert_tokenizer(folder: Path) -> None:
    """Write a word-level tokenizer that puts [CLS] and [SEP] around a text, as BERT's does."""
    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(60))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    cls_tokenizers.save(tokenizer, folder)


def _saved(model_class: Any, config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    model_class(config).save_pretrained(folder)
    bert_tokenizer(folder)
    return folder


def bert(folder: Path) -> Path:
    config = BertConfig(vocab_size=65, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
                        max_position_embeddings=64)  # fmt: skip
    return _saved(BertForMaskedLM, config, folder)


def modernbert(folder: Path) -> Path:
    config = ModernBertConfig(
        vocab_size=65, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, local_attention=16, global_attn_every_n_layers=3, pad_token_id=0, cls_token_id=2,
        sep_token_id=3, reference_compile=False,
    )  # fmt: skip
    return _saved(ModernBertForMaskedLM, config, folder)


def ettin(folder: Path) -> Path:
    """Write a decoder with ModernBERT's layers."""
    config = ModernBertDecoderConfig(
        vocab_size=65, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, local_attention=16, pad_token_id=0, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    return _saved(ModernBertDecoderForCausalLM, config, folder)


def qwen3(folder: Path) -> Path:
    """Write a decoder."""
    config = Qwen3Config(vocab_size=65, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                         head_dim=8, intermediate_size=48, max_position_embeddings=64)  # fmt: skip
    return _saved(Qwen3ForCausalLM, config, folder)


MAKERS: dict[str, Callable[[Path], Path]] = {"bert": bert, "modernbert": modernbert, "ettin": ettin, "qwen3": qwen3}
