"""Building the network that a YAML describes, or taking it from a folder or a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from biphasic.config.checks import architecture_of
from biphasic.config.errors import UserError
from biphasic.config.schema import ModelConfig
from biphasic.model import attention
from biphasic.model.checkpoint import Checkpoint, is_checkpoint, read_checkpoint
from biphasic.model.fresh import from_hf_config, llama_config
from biphasic.model.language_model import LanguageModel
from biphasic.model.packing_probe import packing_problem

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TESTED_FAMILIES = ("llama", "eurobert", "qwen3", "mistral", "olmo2", "smollm3", "gemma2", "gemma3_text")
"""Families for which the suite shows that no token sees what it must not, in either direction."""


BIDIRECTIONAL = "bidirectional_"
"""Before a family's name: the model type of an export that holds a decoder of that family as an encoder, and its code."""
BIDIRECTIONAL_CODE = "bidirectional.BidirectionalConfig"
"""Where such an export's config.json says that its configuration's class is."""


def build(
    config: ModelConfig, sequence_length: int, seed: int, vocabulary: int = 0, on_meta: bool = False
) -> LanguageModel:
    """The network of a YAML, on the CPU in fp32; the same weights for the same seed.

    Args:
        config: the YAML's `model:` section.
        sequence_length: tokens in a training row.
        seed: decides the initial weights.
        vocabulary: tokens that must have an embedding (the tokenizer's, its mask token included); a model taken from
            elsewhere is widened to it.
        on_meta: only shapes, for a rank that is given its weights by the first one. A model taken from elsewhere is
            loaded all the same.

    Raises:
        UserError: the folder or checkpoint can't be used, or the vocabulary is larger than a new model's.
    """
    attention.register()
    if config.init_from is not None:
        model = load_language_model(config.init_from, config.trust_remote_code)
        model.widen(vocabulary)
        return model
    size = architecture_of(config)
    assert size is not None, "the configuration's checks require dimensions"
    if vocabulary > size.vocab_size:
        raise UserError(
            f"model.vocab_size is {size.vocab_size}, but the tokenizer has {vocabulary} tokens: set model.vocab_size to "
            f"at least {vocabulary}"
        )
    hf_config = llama_config(
        size,
        config.max_position_embeddings or sequence_length,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_theta,
        initializer_range=config.initializer_range,
    )
    return from_hf_config(hf_config, seed, "meta" if on_meta else None)


def load_language_model(path: str, trust_remote_code: bool = False, revision: str | None = None) -> LanguageModel:
    """The network and its weights, on the CPU in fp32, from whatever `path` is.

    Args:
        path: a Biphasic checkpoint (file, or folder of a sharded one), an exported folder, a Hugging Face decoder's
            folder, or a hub id.
        trust_remote_code: let a Hugging Face folder run its own Python files.
        revision: of a hub id.

    Raises:
        UserError: nothing usable is there.
    """
    if is_checkpoint(path):
        return from_checkpoint(read_checkpoint(path))
    return _from_pretrained(path, trust_remote_code, revision)


def from_checkpoint(checkpoint: Checkpoint) -> LanguageModel:
    """The network of a checkpoint, with its weights."""
    model = from_hf_config(hf_config_of(checkpoint.backbone), seed=0)
    model.load_state_dict(checkpoint.weights)
    learn_every_token(model.backbone)
    return model


def learn_every_token(backbone: nn.Module) -> None:
    """Let the padding token's embedding get a gradient, which transformers leaves out.

    No padding reaches a packed backbone, and where padding and end of text are one token, as in EuroBERT's tokenizer, the
    end of text has to be learned.
    """
    backbone.get_input_embeddings().padding_idx = None  # pyright: ignore[reportCallIssue]


def hf_config_of(text: str) -> PretrainedConfig:
    """The Hugging Face configuration that was written as JSON."""
    from transformers import AutoConfig

    content: dict[str, Any] = json.loads(text)
    return AutoConfig.for_model(content.pop("model_type"), **content)


def hf_config_at(path: str, revision: str | None = None, trust_remote_code: bool = False) -> tuple[Any, bool]:
    """The Hugging Face configuration of a folder or hub id, and whether it is an export of another family than EuroBERT's.

    Of such an export it is the family's own: here the family's network looks both ways without the code that lies there.

    Raises:
        OSError: there is none.
        ValueError: it is none, of a family that isn't known, or with values that the family can't have.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, PretrainedConfig

    content, _ = PretrainedConfig.get_config_dict(path, revision=revision)
    code = str((content.get("auto_map") or {}).get("AutoConfig"))
    try:
        # Others may name a model type alike.
        if not (str(content.get("model_type")).startswith(BIDIRECTIONAL) and code.endswith(BIDIRECTIONAL_CODE)):
            return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code), False
        not_kept = ("model_type", "auto_map", "architectures", "mask_token_id")
        kept = {name: value for name, value in content.items() if name not in not_kept}
        family = content["model_type"].removeprefix(BIDIRECTIONAL)
        return AutoConfig.for_model(family, **kept), True
    except StrictDataclassError as error:  # no ValueError
        raise ValueError(" ".join(str(error).split())) from None


def _from_pretrained(path: str, trust_remote_code: bool, revision: str | None) -> LanguageModel:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    attention.register()
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    try:
        hf_config, _ = hf_config_at(path, revision, trust_remote_code)
        head_class = AutoModelForMaskedLM if hf_config.model_type == "eurobert" else AutoModelForCausalLM
        loaded: Any = head_class.from_pretrained(
            path,
            config=hf_config,
            attn_implementation=attention.NAME,
            dtype=torch.float32,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(error, KeyError) and error.args == (attention.NAME,):
            first = "its family's attention can't be replaced"
        where = "this folder" if Path(path).is_dir() else "no such checkpoint or folder here, and from the hub"
        raise UserError(f"model {path}: can't be loaded ({where}: {first})") from None
    model, info = loaded
    if info["missing_keys"]:
        raise UserError(
            f"model {path}: its files lack {len(info['missing_keys'])} weights, e.g. {info['missing_keys'][0]}"
        )
    lm_head, backbone, family = model.get_output_embeddings(), model.get_decoder(), hf_config.model_type
    if not isinstance(lm_head, nn.Linear) or lm_head.bias is not None:
        raise UserError(f"model {path}: {family} has no language-model head without bias, which Biphasic needs")
    if not hasattr(backbone, "layers"):
        raise UserError(f"model {path}: {family} is not a decoder of the kind that Biphasic can continue")
    if hf_config.tie_word_embeddings:
        lm_head.weight = backbone.get_input_embeddings().weight
    learn_every_token(backbone)
    problem = packing_problem(backbone, decoder=head_class is AutoModelForCausalLM)
    if problem is not None:
        raise UserError(f"model {path}: {family} can't be trained on packed segments: {problem}")
    return LanguageModel(backbone, lm_head)
