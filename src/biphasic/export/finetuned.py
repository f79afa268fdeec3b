"""Export fine-tuned models, with their heads if the format has a class for them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from biphasic.errors import UserError
from biphasic.export.formats import Kind, add_older_keys, choose_format
from biphasic.export.write import make_pairs_errors, require_free, write_atomically, write_folder, write_shared_files
from biphasic.model.encoder import Encoder
from biphasic.model.heads import TextHead, TokenHead
from biphasic.model.pooling import SentenceSettings
from biphasic.model.probe import computes_head_logits

_KINDS: dict[type[nn.Module], Kind] = {TextHead: "ForSequenceClassification", TokenHead: "ForTokenClassification"}


def require_exportable(encoder: Encoder) -> None:
    """Raise a UserError, before training, if the model can't be exported afterwards; see `choose_format`."""
    try:
        if not encoder.is_own_family:
            choose_format(encoder.backbone.config, encoder.tokenizer)
    except UserError as error:
        raise UserError(f"{error}; save_model=false trains and scores without writing the model") from None


def _own_network(encoder: Encoder, head: nn.Module, label_names: list[str] | None) -> Any:
    """Return the encoder in its family's transformers class with this head, or None if there is no such class.

    The classes for tokens and for questions have a linear head in most families (not in ModernBERT's). No family has
    the head of a text classifier: mean pooling with two layers. Longformer's class for questions attends otherwise.
    """
    from transformers import MODEL_FOR_QUESTION_ANSWERING_MAPPING as QUESTION_CLASSES
    from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING as TOKEN_CLASSES

    backbone: Any = encoder.backbone
    classes: Any = QUESTION_CLASSES if label_names is None else TOKEN_CLASSES
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
    return network if computes_head_logits(network.eval(), head, encoder.tokenizer.separator_id) else None


def export_finetuned(
    encoder: Encoder,
    head: nn.Module,
    label_names: list[str] | None,
    out: Path,
    card: Callable[..., str],
    *,
    prompts: dict[str, str],
    max_length: int,
    problem_type: str | None = None,
    truncate_dim: int | None = None,
    refuse_pairs: bool = False,
) -> None:
    """Export a trained encoder and its head in fp32, atomically, in place of an earlier export.

    Decoders and checkpoints are written in the format of `choose_format`, and other encoders in their own format, in
    transformers' class with the head if there is one. `biphasic predict` reads the head from `head.safetensors`.

    Args:
        label_names: a classifier's label names, in the order of the label ids.
        card: returns the text of README.md for `family`, `has_code`, `has_own_code` and `has_head_class`, which are as in
            `finetuned_card`.
        prompts: what sentence-transformers puts before inputs, by role (`query`, `document`).
        max_length: number of tokens to which sentence-transformers truncates inputs.
        problem_type: transformers' name of the loss, which also decides how its pipelines turn logits into scores.
        truncate_dim: number of first values of an embedding that sentence-transformers keeps.
        refuse_pairs: whether the model was trained on pairs, by a template; see `make_pairs_errors`.

    Raises:
        UserError: no format can represent the family, `out` exists and is not an export, or it can't be written.
    """
    backbone: Any = encoder.backbone
    tokenizer, lowercase = encoder.tokenizer, encoder.text_tokenizer.settings.lowercase
    settings = SentenceSettings(prompts, max_length=max_length, lowercase=lowercase, truncate_dim=truncate_dim)
    if encoder.is_own_family:
        require_free(out, True)
        network, config = _own_network(encoder, head, label_names), backbone.config
        own = bool(getattr(config, "auto_map", None))
        text = card(family=config.model_type, has_code=own, has_own_code=own, has_head_class=network is not None)
        _set_labels(config, label_names, problem_type)

        def fill(folder: Path) -> None:
            (network or backbone).save_pretrained(folder)
            add_older_keys(folder)
            replace(tokenizer, settings=_older_settings(tokenizer.settings, max_length)).save(folder)
            if refuse_pairs:
                make_pairs_errors(folder / "tokenizer.json", tokenizer)
            write_shared_files(folder, encoder.width, settings, text, head.state_dict())

        write_atomically(out, fill)
        return
    fmt = choose_format(backbone.config, tokenizer)
    kind: Kind = "Model" if label_names is None else _KINDS.get(type(head), "Model")
    kind = kind if kind in fmt.classes else "Model"
    weights = {name: weight.detach().cpu() for name, weight in backbone.state_dict().items()}
    if kind != "Model":
        weights = {f"model.{name}": weight for name, weight in weights.items()}
        weights |= {name: weight.cpu() for name, weight in head.state_dict().items()}
    _set_labels(fmt.config, label_names, problem_type)
    text = card(family=fmt.family, has_code=bool(fmt.files), has_head_class=kind != "Model")
    special = bool(encoder.text_tokenizer.prefix or encoder.text_tokenizer.suffix)
    options: Any = {"keep_special_tokens": special, "refuse_pairs": refuse_pairs, "head": head.state_dict()}
    write_folder(fmt, kind, weights, tokenizer, out, text, settings, force=True, **options)


def _older_settings(settings: dict[str, Any], max_length: int) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, with what only transformers 5 reads as both generations read it."""
    settings = {**settings, "model_max_length": max_length}
    settings.pop("truncation_side", None)  # texts are cut at their end, here as in training
    if settings.get("tokenizer_class") == "TokenizersBackend":
        # The old class would return token types by default, which this one doesn't.
        settings = {"model_input_names": ["input_ids", "attention_mask"], **settings}
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    return settings


def _set_labels(config: Any, label_names: list[str] | None, problem_type: str | None) -> None:
    if label_names is not None:
        config.id2label = dict(enumerate(label_names))
        config.label2id = {name: number for number, name in enumerate(label_names)}
        if problem_type is not None:
            config.problem_type = problem_type
