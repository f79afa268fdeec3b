"""Folders that transformers and sentence-transformers load: EuroBERT's native format, no remote code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from biphasic.config.errors import UserError
from biphasic.data.tokenizer import Tokenizer
from biphasic.model.eurobert import EuroBertConfig, EuroBertForMaskedLM, EuroBertModel
from biphasic.model.language_model import LanguageModel

HEAD = "head.safetensors"
"""A head that an encoder's format has no place for."""
MARK = "biphasic.json"
"""In every export: says that the folder is one, and may be replaced by another."""
LLAMA_SHAPED = ("llama", "eurobert", "mistral")
"""Families whose layers are EuroBERT's, parameter by parameter."""


@dataclass(frozen=True)
class Sentences:
    """What sentence-transformers does to texts: what goes before them, by role, and where it cuts them (tokens)."""

    prompts: dict[str, str]
    max_length: int


def export_language_model(
    model: LanguageModel, tokenizer: Tokenizer, out: Path, card: str, *, dtype: torch.dtype, force: bool = False
) -> None:
    """Write backbone and head, so that the folder loads as a masked language model and as a plain encoder.

    Args:
        model: what to write.
        tokenizer: its tokenizer.
        out: the folder; it appears whole or not at all.
        card: README.md.
        dtype: of the weights on disk.
        force: replace an earlier export.

    Raises:
        UserError: the family has parts that the format lacks, or `out` is taken.
    """
    config = eurobert_config(model.config, tokenizer)
    with torch.device("meta"):
        target = EuroBertForMaskedLM(config)
    weights = {f"model.{name}": weight for name, weight in model.backbone.state_dict().items()}
    weights["lm_head.weight"] = model.lm_head.weight
    write_eurobert(target, weights, tokenizer, out, card, Sentences({}, config.max_position_embeddings), dtype, force)


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
    cuts them; default: the context's length. `around` and `rest`: see `write_eurobert`.
    """
    config = eurobert_config(backbone.config, tokenizer)
    with torch.device("meta"):
        target = EuroBertModel(config)
    settings = Sentences(prompts or {}, max_length or config.max_position_embeddings)
    write_eurobert(target, backbone.state_dict(), tokenizer, out, card, settings, dtype, force, around, rest)


def eurobert_config(config: Any, tokenizer: Tokenizer) -> EuroBertConfig:
    """The backbone's dimensions as a `eurobert` configuration.

    Raises:
        UserError: the backbone isn't of Llama's shape.
    """
    family = config.model_type
    shaped = family in LLAMA_SHAPED and not getattr(config, "sliding_window", None)
    plain = getattr(config, "rope_scaling", None) is None and not getattr(config, "attention_bias", False)
    if not (shaped and plain and not getattr(config, "mlp_bias", False)):
        raise UserError(
            f"export: a {family} model can't be written as eurobert, which has no place for some of its parts; only plain "
            f"Llama-shaped models can ({', '.join(LLAMA_SHAPED)}, without sliding window, rope scaling and biases)"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "initializer_range",
        "hidden_act",
        "tie_word_embeddings",
    )
    return EuroBertConfig(
        **{name: getattr(config, name) for name in names},
        head_dim=head_dim,
        pad_token_id=tokenizer.pad_id,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        mask_token_id=tokenizer.mask_id,
        classifier_pooling="mean",
    )


def write_eurobert(
    target: Any,
    weights: dict[str, torch.Tensor],
    tokenizer: Tokenizer,
    out: Path,
    card: str,
    sentences: Sentences,
    dtype: torch.dtype,
    force: bool,
    around: bool = False,
    rest: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a model of EuroBERT's format, its tokenizer and its card.

    Args:
        target: one of `biphasic.model.eurobert`'s classes, on the meta device.
        weights: its state.
        tokenizer: its tokenizer.
        out: the folder; it appears whole or not at all.
        card: README.md.
        sentences: for sentence-transformers.
        dtype: of the weights on disk.
        force: replace an earlier export.
        around: keep what the tokenizer puts around a text.
        rest: weights that the format has no place for, written to `head.safetensors`.

    Raises:
        UserError: `out` is taken, or can't be written.
    """
    refuse_taken(out, force)
    target.load_state_dict({name: weight.detach() for name, weight in weights.items()}, assign=True)
    target.config.dtype = dtype

    def fill(folder: Path) -> None:
        target.to(dtype).save_pretrained(folder, max_shard_size="5GB", safe_serialization=True)
        if rest:
            save_file(rest, folder / HEAD)
        for file in folder.iterdir():
            file.chmod(0o644)  # safetensors writes for the owner only
        tokenizer.save(folder)
        if not around:
            _add_nothing(folder / "tokenizer.json")
        _plain_settings(folder, sentences.max_length)
        write_sentence_transformers(folder, target.config.hidden_size, sentences)
        (folder / "README.md").write_text(card, encoding="utf-8")

    whole_or_absent(out, fill)


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


def _plain_settings(folder: Path, max_length: int) -> None:
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
        "sentence_bert_config.json": {"max_seq_length": sentences.max_length, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "prompts": sentences.prompts,
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }
    (folder / "1_Pooling").mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
