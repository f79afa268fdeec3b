"""Export fine-tuned models, with their heads if the format has a class for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from biphasic.errors import UserError
from biphasic.export.card import ExportForm
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
        export_form(encoder, nn.Identity(), None)
    except UserError as error:
        raise UserError(f"{error}; save_model=false trains and scores without writing the model") from None


def export_form(encoder: Encoder, head: nn.Module, label_names: list[str] | None) -> ExportForm:
    """Return the form in which `export_finetuned` writes a model. Arguments and errors are the same."""
    config: Any = encoder.backbone.config
    if encoder.is_own_family:
        family, has_code = config.model_type, bool(getattr(config, "auto_map", None))
        has_head_class = _own_network(encoder, head, label_names) is not None
    else:
        fmt = choose_format(config, encoder.tokenizer)
        family, has_code = fmt.name.removeprefix(BIDIRECTIONAL), bool(fmt.files)
        has_head_class = type(head) in _KINDS and label_names is not None
    prefix = getattr(encoder.tokenizer.tokenizer.model, "continuing_subword_prefix", None)
    return ExportForm(family, has_code, has_head_class, bool(prefix), encoder.text_tokenizer.settings.lowercase)


def _own_network(encoder: Encoder, head: nn.Module, label_names: list[str] | None) -> Any:
    """Return an encoder of its own family in transformers' class with this head, or None if there is no such class.

    The classes for tokens and for questions have a linear head in most families (not in ModernBERT's). No family has the
    head of a text classifier: mean pooling with two layers.
    """
    from transformers import MODEL_FOR_QUESTION_ANSWERING_MAPPING, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

    backbone: Any = encoder.backbone
    classes: Any = (
        MODEL_FOR_QUESTION_ANSWERING_MAPPING if label_names is None else MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    )
    if not isinstance(head, TokenHead) or type(backbone.config) not in classes:
        return None
    backbone.config.num_labels = head.classifier.out_features
    with torch.device("meta"):
        network: Any = classes[type(backbone.config)](backbone.config)
    prefix = network.base_model_prefix
    own = {name: weight for name, weight in network.state_dict().items() if not name.startswith(f"{prefix}.")}
    trained = list(head.state_dict().values())
    if [weight.shape for weight in own.values()] != [weight.shape for weight in trained]:
        return None
    network.load_state_dict(dict(zip(own, trained, strict=True)), strict=False, assign=True)
    setattr(network, prefix, backbone)
    return network


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
    Both have classes for classifiers of sequences and tokens. Other encoders are written in their own format, in
    transformers' class with the head if there is one. `biphasic predict` reads the head from `head.safetensors`.

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
        network = _own_network(encoder, head, label_names) or backbone
        if label_names is not None:
            _set_labels(backbone.config, label_names)

        def fill(folder: Path) -> None:
            network.save_pretrained(folder)
            replace(tokenizer, settings={**tokenizer.settings, "model_max_length": max_length}).save(folder)
            write_shared_files(folder, encoder.width, settings, card, head.state_dict())

        write_atomically(out, fill)
        return
    options: dict[str, Any] = {
        "force": True,
        "keep_special_tokens": bool(encoder.text_tokenizer.prefix or encoder.text_tokenizer.suffix),
        "head": head.state_dict(),
    }
    if type(head) not in _KINDS or label_names is None:
        options |= {"prompts": prompts, "max_length": max_length, "lowercase": lowercase}
        export_encoder(backbone, tokenizer, out, card, **options)
        return
    fmt = choose_format(backbone.config, tokenizer)
    _set_labels(fmt.config, label_names)
    weights = {**{f"model.{name}": weight for name, weight in backbone.state_dict().items()}, **head.state_dict()}
    write_folder(fmt, _KINDS[type(head)], Weights.in_memory(weights), tokenizer, out, card, settings, **options)


def _set_labels(config: Any, label_names: list[str]) -> None:
    config.id2label = dict(enumerate(label_names))
    config.label2id = {name: number for number, name in enumerate(label_names)}
