"""Write exported folders, which transformers and sentence-transformers load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from biphasic.data.tokenizer import Tokenizer
from biphasic.errors import UserError
from biphasic.export.bidirectional import bidirectional_format
from biphasic.export.folder import CARD_FILE, EXPORT_FILE
from biphasic.export.formats import Format, Kind, eurobert_format, is_llama_shaped
from biphasic.export.weights import Weights, unique_weights, write_weights
from biphasic.model.pooling import SentenceSettings

HEAD_FILE = "head.safetensors"
"""File for a head that the format has no class for."""


def choose_format(config: Any, tokenizer: Tokenizer) -> Format:
    """Return EuroBERT's format if it can represent the network, else the family's format.

    Args:
        config: the backbone's Hugging Face configuration.
        tokenizer: the encoder's tokenizer, whose special tokens are written into the configuration.

    Raises:
        UserError: neither format can represent the network.
    """
    if is_llama_shaped(config):
        return eurobert_format(config, tokenizer)
    if config.model_type == "eurobert":
        raise UserError("export: a eurobert model with rope scaling or biases can't be written as a plain eurobert one")
    return bidirectional_format(config, tokenizer)


def write_language_model(
    fmt: Format,
    weights: Weights,
    tokenizer: Tokenizer,
    out: Path,
    card: str,
    *,
    dtype: torch.dtype,
    force: bool = False,
) -> int:
    """Write backbone and head to a folder that loads as a masked language model and as a bare encoder.

    Args:
        fmt: the network's export format.
        weights: the weights, named as in `LanguageModel`.
        tokenizer: the network's tokenizer.
        out: the folder, which is written atomically.
        card: the text of README.md.
        dtype: the dtype of the weights on disk.
        force: replace an earlier export.

    Returns:
        The number of parameters.

    Raises:
        UserError: the weights don't fit the network, `out` exists and can't be replaced, or it can't be written.
    """
    named = weights.renamed(lambda name: f"model.{part}" if (part := name.removeprefix("backbone.")) != name else name)
    settings = SentenceSettings(max_length=fmt.config.max_position_embeddings)
    return write_folder(fmt, "masked_lm", named, tokenizer, out, card, settings, dtype=dtype, force=force)


def export_encoder(
    backbone: nn.Module,
    tokenizer: Tokenizer,
    out: Path,
    card: str,
    *,
    prompts: dict[str, str] | None = None,
    max_length: int | None = None,
    lowercase: bool = False,
    **options: Any,
) -> None:
    """Export an encoder in memory, without a head. Other arguments and errors are as for `write_folder`.

    `prompts` (`query`, `document`) is the text that sentence-transformers prepends to inputs. `max_length` is the length in
    tokens to which it truncates them. Default: the context length. With `lowercase` it lowercases them.
    """
    fmt = choose_format(backbone.config, tokenizer)
    max_length = max_length or fmt.config.max_position_embeddings
    settings = SentenceSettings(prompts or {}, max_length=max_length, lowercase=lowercase)
    write_folder(fmt, "model", Weights.in_memory(backbone.state_dict()), tokenizer, out, card, settings, **options)


def write_folder(
    fmt: Format,
    kind: Kind,
    weights: Weights,
    tokenizer: Tokenizer,
    out: Path,
    card: str,
    settings: SentenceSettings,
    *,
    dtype: torch.dtype = torch.float32,
    force: bool = False,
    keep_special_tokens: bool = False,
    head: dict[str, Tensor] | None = None,
) -> int:
    """Write a network, its tokenizer and its card.

    Args:
        fmt: the export format.
        kind: the network to export.
        weights: the weights, named as in that network.
        tokenizer: the network's tokenizer.
        out: the folder, which is written atomically.
        card: the text of README.md.
        settings: prompts and maximum length for sentence-transformers.
        dtype: the dtype of the weights on disk.
        force: replace an earlier export.
        keep_special_tokens: whether the tokenizer adds its special tokens to a text.
        head: weights that the format has no class for, written to `head.safetensors`.

    Returns:
        The number of parameters.

    Raises:
        UserError: the weights don't fit the network, `out` exists and can't be replaced, or it can't be written.
    """
    require_free(out, force)
    network = fmt.network(kind)
    config = fmt.config
    config.architectures, config.dtype = [type(network).__name__], str(dtype).removeprefix("torch.")

    def fill(folder: Path) -> None:
        config.save_pretrained(folder)
        for name, text in fmt.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        write_weights(weights, network, folder, dtype)
        tokenizer.save(folder)
        if not keep_special_tokens:
            _remove_special_tokens(folder / "tokenizer.json")
        _replace_tokenizer_settings(folder, settings.max_length)
        write_shared_files(folder, config.hidden_size, settings, card, head)

    write_atomically(out, fill)
    return sum(weight.numel() for weight in unique_weights(network).values())


def require_free(out: Path, force: bool) -> None:
    """Raise a UserError if `out` exists, unless it is an empty folder, or an earlier export and `force` is set."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / EXPORT_FILE).is_file():
        raise UserError(f"{out} exists and is not an export: choose another folder")
    if not force:
        raise UserError(f"{out} holds an earlier export: add --force to replace it, or choose another folder")


def write_atomically(out: Path, fill: Callable[[Path], None]) -> None:
    """Call `fill` with a temporary folder beside `out`, then replace `out` by that folder.

    Raises:
        UserError: the folder can't be written, or the disk is full.
    """
    out = out.resolve()
    partial, earlier = (out.with_name(f".{out.name}.{suffix}") for suffix in ("partial", "earlier"))
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        fill(partial)
        if out.exists():
            shutil.rmtree(earlier, ignore_errors=True)
            out.rename(earlier)
        partial.rename(out)
        shutil.rmtree(earlier, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out} can't be written: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_special_tokens(file: Path) -> None:
    """Stop the tokenizer from adding special tokens, because training had none (Llama 3's adds beginning-of-text)."""
    content = json.loads(file.read_text(encoding="utf-8"))
    processor = content.get("post_processor") or {}
    parts = processor.get("processors", [processor])
    content["post_processor"] = next((part for part in parts if part.get("type") == "ByteLevel"), None)
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _replace_tokenizer_settings(folder: Path, max_length: int | None) -> None:
    """Replace the original tokenizer's settings, such as its class, beginning-of-text token, path and chat template."""
    names = json.loads((folder / "special_tokens_map.json").read_text(encoding="utf-8"))
    settings = {
        **names,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False, sort_keys=True)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def write_shared_files(
    folder: Path, width: int, settings: SentenceSettings, card: str, head: dict[str, Tensor] | None
) -> None:
    """Write the files of every export: sentence-transformers' modules (encoder, mean pooling), a head if given, the card."""
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    # A flag for each mode: the format of sentence-transformers before version 6 and of text-embeddings-inference.
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    files = {
        "modules.json": modules,
        "1_Pooling/config.json": {**pooling, "include_prompt": True},
        "sentence_bert_config.json": {"max_seq_length": settings.max_length, "do_lower_case": settings.lowercase},
        "config_sentence_transformers.json": {
            "prompts": settings.prompts,
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
        EXPORT_FILE: {"format": 1},
    }
    (folder / "1_Pooling").mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / CARD_FILE).write_text(card, encoding="utf-8")
    if head:
        save_file(head, folder / HEAD_FILE)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors makes files readable only for the owner
