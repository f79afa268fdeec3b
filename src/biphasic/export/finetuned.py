"""Export fine-tuned models, with their heads if the format has a class for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from biphasic.errors import UserError
from biphasic.export.formats import Kind
from biphasic.export.weights import Weights
from biphasic.export.write import (
    choose_format,
    export_encoder,
    require_free,
    write_atomically,
    write_folder,
    write_shared_files,
)
from biphasic.model.backbone import BIDIRECTIONAL
from biphasic.model.encoder import Encoder
from biphasic.model.heads import TextHead, TokenHead
from biphasic.model.pooling import SentenceSettings

_KINDS: dict[type[nn.Module], Kind] = {TextHead: "sequence", TokenHead: "token"}


def require_exportable(encoder: Encoder) -> None:
    """Check before training that the model can be exported afterwards.

    Raises:
        UserError: the encoder was made from a decoder that no format can represent, see `choose_format`.
    """
    try:
        export_family(encoder)
    except UserError as error:
        raise UserError(f"{error}; save_model=false trains and scores without writing the model") from None


def export_family(encoder: Encoder) -> tuple[str, bool]:
    """Return the model type that `export_finetuned` writes, and whether the folder contains code. Raises the same errors."""
    if encoder.is_own_family:
        return encoder.backbone.config.model_type, False  # pyright: ignore
    fmt = choose_format(encoder.backbone.config, encoder.tokenizer)
    return fmt.name.removeprefix(BIDIRECTIONAL), bool(fmt.files)


def export_finetuned(
    encoder: Encoder,
    head: nn.Module,
    label_names: list[str] | None,
    out: Path,
    card: str,
    *,
    prompts: dict[str, str],
    max_length: int,
) -> None:
    """Export an encoder and its head in fp32.

    Llama-shaped networks are written in EuroBERT's format, and other decoders in their family's format with a Python file.
    Both have classes for classifiers of sequences and tokens. Other encoders are written in their own format. A head
    without a class in the format is written to `head.safetensors`.

    Args:
        encoder: the trained encoder.
        head: its head.
        label_names: a classifier's label names, in the order of the label ids.
        out: the folder, which is written atomically and replaces an earlier export.
        card: the text of README.md.
        prompts: the text that sentence-transformers prepends to inputs, by role (`query`, `document`).
        max_length: the length to which sentence-transformers truncates inputs, in tokens.

    Raises:
        UserError: no format can represent the family, `out` exists and is not an export, or it can't be written.
    """
    backbone: Any = encoder.backbone
    tokenizer, lowercase = encoder.tokenizer, encoder.text_tokenizer.settings.lowercase
    settings = SentenceSettings(prompts, max_length=max_length, lowercase=lowercase)
    if encoder.is_own_family:
        require_free(out, True)

        def fill(folder: Path) -> None:
            backbone.save_pretrained(folder)
            tokenizer.save(folder)
            write_shared_files(folder, encoder.width, settings, card, head.state_dict())

        write_atomically(out, fill)
        return
    options: dict[str, Any] = {
        "force": True,
        "keep_special_tokens": bool(encoder.text_tokenizer.prefix or encoder.text_tokenizer.suffix),
    }
    if type(head) not in _KINDS or label_names is None:
        options |= {"prompts": prompts, "max_length": max_length, "lowercase": lowercase, "head": head.state_dict()}
        export_encoder(backbone, tokenizer, out, card, **options)
        return
    fmt = choose_format(backbone.config, tokenizer)
    fmt.config.id2label = dict(enumerate(label_names))
    fmt.config.label2id = {name: number for number, name in enumerate(label_names)}
    weights = {**{f"model.{name}": weight for name, weight in backbone.state_dict().items()}, **head.state_dict()}
    write_folder(fmt, _KINDS[type(head)], Weights.in_memory(weights), tokenizer, out, card, settings, **options)
