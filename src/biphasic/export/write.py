"""Folders that transformers and sentence-transformers load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from biphasic.config.errors import UserError
from biphasic.data.tokenizer import Tokenizer
from biphasic.export.folder import CARD, MARK
from biphasic.export.formats import Format, Kind, format_of
from biphasic.export.weights import Weights, expected_of, write_weights
from biphasic.model.language_model import LanguageModel
from biphasic.model.pooling import Sentences

HEAD = "head.safetensors"
"""A head that an encoder's format has no place for."""


def export_checkpoint(
    path: str, fmt: Format, tokenizer: Tokenizer, out: Path, card: str, *, dtype: torch.dtype, force: bool = False
) -> int:
    """Write a run's checkpoint as `export_language_model` does, reading and writing a file of weights at a time.

    Args:
        path: of the checkpoint, on this machine.
        fmt: of the configuration in its record (`biphasic.model.checkpoint.read_record`).
        tokenizer: as for `export_language_model`, like all others.

    Returns:
        How many parameters were written.

    Raises:
        UserError: besides, when the checkpoint is damaged or its weights aren't those of its configuration.
    """
    return _write_language_model(fmt, Weights.of_checkpoint(path), tokenizer, out, card, dtype, force)


def export_language_model(
    model: LanguageModel, tokenizer: Tokenizer, out: Path, card: str, *, dtype: torch.dtype, force: bool = False
) -> int:
    """Write backbone and head, so that the folder loads as a masked language model and as a plain encoder.

    Args:
        model: what to write.
        tokenizer: its tokenizer.
        out: the folder; it appears whole or not at all.
        card: README.md.
        dtype: of the weights on disk.
        force: replace an earlier export.

    Returns:
        How many parameters were written.

    Raises:
        UserError: no format can hold the family, or `out` is taken or can't be written.
    """
    fmt = format_of(model.config, tokenizer)
    return _write_language_model(fmt, Weights.held(model.state_dict()), tokenizer, out, card, dtype, force)


def _write_language_model(
    fmt: Format, weights: Weights, tokenizer: Tokenizer, out: Path, card: str, dtype: torch.dtype, force: bool
) -> int:
    named = weights.renamed(lambda name: f"model.{part}" if (part := name.removeprefix("backbone.")) != name else name)
    sentences = Sentences(longest=fmt.config.max_position_embeddings)
    return write_folder(fmt, "masked_lm", named, tokenizer, out, card, sentences, dtype, force)


def export_encoder(
    backbone: nn.Module,
    tokenizer: Tokenizer,
    out: Path,
    card: str,
    *,
    prompts: dict[str, str] | None = None,
    max_length: int | None = None,
    dtype: torch.dtype = torch.float32,
    force: bool = False,
    around: bool = False,
    rest: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a fine-tuned encoder, without a head. Arguments and errors as for `export_language_model`.

    `prompts` (`query`, `document`) are what sentence-transformers puts before texts, `max_length` (tokens) is where it
    cuts them; default: the context's length. `around` and `rest`: see `write_folder`.
    """
    fmt = format_of(backbone.config, tokenizer)
    settings = Sentences(prompts or {}, longest=max_length or fmt.config.max_position_embeddings)
    weights = Weights.held(backbone.state_dict())
    write_folder(fmt, "model", weights, tokenizer, out, card, settings, dtype, force, around, rest)


def write_folder(
    fmt: Format,
    kind: Kind,
    weights: Weights,
    tokenizer: Tokenizer,
    out: Path,
    card: str,
    sentences: Sentences,
    dtype: torch.dtype,
    force: bool,
    around: bool = False,
    rest: dict[str, torch.Tensor] | None = None,
) -> int:
    """Write a network, its tokenizer and its card.

    Args:
        fmt: the format; its configuration is written as it is.
        kind: what of it.
        weights: named as in the format's class for that kind.
        tokenizer: its tokenizer.
        out: the folder; it appears whole or not at all.
        card: README.md.
        sentences: for sentence-transformers: prompts, and where texts are cut.
        dtype: of the weights on disk.
        force: replace an earlier export.
        around: keep what the tokenizer puts around a text.
        rest: weights that the format has no place for, written to `head.safetensors`.

    Returns:
        How many parameters were written.

    Raises:
        UserError: the weights aren't the network's, or `out` is taken or can't be written.
    """
    refuse_taken(out, force)
    network = fmt.network(kind)

    def fill(folder: Path) -> None:
        _write_config(fmt, network, folder, dtype)
        for name, text in fmt.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        write_weights(weights, network, folder, dtype)
        if rest:
            save_file(rest, folder / HEAD)
        for file in folder.iterdir():
            file.chmod(0o644)  # safetensors writes for the owner only
        tokenizer.save(folder)
        if not around:
            _add_nothing(folder / "tokenizer.json")
        _plain_settings(folder, sentences.longest)
        write_sentence_transformers(folder, fmt.config.hidden_size, sentences)
        (folder / CARD).write_text(card, encoding="utf-8")

    whole_or_absent(out, fill)
    return sum(weight.numel() for weight in expected_of(network).values())


def _write_config(fmt: Format, network: Any, folder: Path, dtype: torch.dtype) -> None:
    config = fmt.config
    config.architectures, config.dtype = [type(network).__name__], str(dtype).removeprefix("torch.")
    config.save_pretrained(folder)


def refuse_taken(out: Path, force: bool) -> None:
    """Raise a UserError when `out` is something else than what may be (re)placed there."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MARK).is_file():
        raise UserError(f"{out} exists and is not an export: choose another folder")
    if not force:
        raise UserError(f"{out} holds an earlier export: add --force to replace it, or choose another folder")


def whole_or_absent(out: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write into a folder beside `out`, and put it there when it is done.

    Raises:
        UserError: the place can't be written to, or is full.
    """
    out = out.resolve()
    partial, earlier = (out.with_name(f".{out.name}.{what}") for what in ("partial", "earlier"))
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        fill(partial)
        (partial / MARK).write_text(json.dumps({"format": 1}) + "\n", encoding="utf-8")
        if out.exists():
            shutil.rmtree(earlier, ignore_errors=True)
            out.rename(earlier)
        partial.rename(out)
        shutil.rmtree(earlier, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{out} can't be written: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _add_nothing(file: Path) -> None:
    """Take out what would put special tokens around a text: training saw none (Llama 3's would add a beginning)."""
    content = json.loads(file.read_text(encoding="utf-8"))
    processor = content.get("post_processor") or {}
    parts = processor.get("processors", [processor])
    kept = [part for part in parts if part.get("type") == "ByteLevel"]
    content["post_processor"] = kept[0] if kept else None
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _plain_settings(folder: Path, max_length: int | None) -> None:
    """Replace what the tokenizer's first owner set (its own class, a beginning of text, a path, a chat's template)."""
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


def write_sentence_transformers(folder: Path, width: int, sentences: Sentences) -> None:
    """The module list that sentence-transformers reads: the encoder, then mean pooling."""
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    files = {
        "modules.json": modules,
        "1_Pooling/config.json": {**pooling, "pooling_mode_cls_token": False, "include_prompt": True},
        "sentence_bert_config.json": {"max_seq_length": sentences.longest, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "prompts": sentences.prompts,
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }
    (folder / "1_Pooling").mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
