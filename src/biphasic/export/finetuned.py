"""Folders of fine-tuned models, with their heads where the format has a place for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from biphasic.config.errors import UserError
from biphasic.export.folder import CARD
from biphasic.export.formats import Kind, format_of
from biphasic.export.weights import Weights
from biphasic.export.write import (
    HEAD,
    export_encoder,
    refuse_taken,
    whole_or_absent,
    write_folder,
    write_sentence_transformers,
)
from biphasic.model.backbone import BIDIRECTIONAL
from biphasic.model.encoder import Encoder
from biphasic.model.heads import TextHead, TokenHead
from biphasic.model.pooling import Sentences


def require_exportable(encoder: Encoder) -> None:
    """Say now, and not after training, that a model can't be written.

    Raises:
        UserError: it is a decoder that no format can hold, see `biphasic.export.formats`.
    """
    if encoder.packs:
        try:
            format_of(encoder.backbone.config, encoder.tokenizer)
        except UserError as error:
            raise UserError(f"{error}; save_model=false trains and scores without writing the model") from None


def written_as(encoder: Encoder) -> tuple[str, bool]:
    """The family that `export_finetuned` writes a model as, and whether the folder holds code. Errors as there."""
    if not encoder.packs:
        return encoder.backbone.config.model_type, False  # pyright: ignore
    fmt = format_of(encoder.backbone.config, encoder.tokenizer)
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
    """Write an encoder and its head, in fp32.

    What is of Llama's shape is written in EuroBERT's format, whose sequence and token classification have these heads;
    other decoders in their family's, with a file of code that has them too; other encoders in their own. A head without a
    place there is `head.safetensors`.

    Args:
        encoder: what was trained.
        head: on top of it.
        label_names: in the order of their numbers, for a classifier.
        out: the folder; it appears whole or not at all, in place of an earlier export.
        card: README.md.
        prompts: what sentence-transformers puts before texts, by role (`query`, `document`).
        max_length: where it cuts them, in tokens.

    Raises:
        UserError: no format can hold the family, or `out` is taken or can't be written.
    """
    sentences = Sentences(prompts, longest=max_length)
    if not encoder.packs:
        _write_own(encoder, head, out, card, sentences)
        return
    backbone, tokenizer = encoder.backbone, encoder.tokenizer
    around = bool(encoder.reader.prefix or encoder.reader.suffix)
    kinds: dict[type[nn.Module], Kind] = {TextHead: "sequence", TokenHead: "token"}
    if type(head) not in kinds or label_names is None:
        export_encoder(
            backbone, tokenizer, out, card, prompts=prompts, max_length=max_length, force=True, around=around,
            rest=head.state_dict(),
        )  # fmt: skip
        return
    fmt = format_of(backbone.config, tokenizer)
    fmt.config.id2label = dict(enumerate(label_names))
    fmt.config.label2id = {name: number for number, name in enumerate(label_names)}
    named = {**{f"model.{name}": weight for name, weight in backbone.state_dict().items()}, **head.state_dict()}
    weights = Weights.held(named)
    write_folder(fmt, kinds[type(head)], weights, tokenizer, out, card, sentences, torch.float32, True, around)


def _write_own(encoder: Encoder, head: nn.Module, out: Path, card: str, sentences: Sentences) -> None:
    refuse_taken(out, True)
    backbone: Any = encoder.backbone

    def fill(folder: Path) -> None:
        backbone.save_pretrained(folder)
        encoder.tokenizer.save(folder)
        write_sentence_transformers(folder, encoder.width, sentences)
        if head.state_dict():
            save_file(head.state_dict(), folder / HEAD)
        for file in folder.glob("*.safetensors"):
            file.chmod(0o644)  # safetensors writes for the owner only
        (folder / CARD).write_text(card, encoding="utf-8")

    whole_or_absent(out, fill)
