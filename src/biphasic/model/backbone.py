"""Load a network from a checkpoint, a folder or the hub."""

import logging
from typing import Any

import torch
from torch import nn

from biphasic.errors import UserError, first_line
from biphasic.model import attention
from biphasic.model.architecture import rows_problem
from biphasic.model.checkpoint import is_checkpoint, read_weights
from biphasic.model.hf_config import config_content, is_decoder_export, is_papers, load_hf_config, model_folder
from biphasic.model.language_model import LanguageModel, from_hf_config, language_model_of, plain_rope
from biphasic.model.stored_weights import names_problem, quantized_problem
from biphasic.quiet import without_warnings
from biphasic.storage import user_error

_log = logging.getLogger(__name__)


def load_language_model(
    path: str,
    trust_remote_code: bool = False,
    revision: str | None = None,
    rope_theta: float | None = None,
    max_position_embeddings: int | None = None,
    sequence_length: int | None = None,
) -> LanguageModel:
    """Load a backbone with its language-model head, on the CPU in fp32.

    `path` is a Biphasic checkpoint (a file, or the folder of a sharded one), an exported folder, a Hugging Face decoder's
    folder, or a hub id, with a `revision`: branch, tag or commit. `rope_theta` and `max_position_embeddings` replace the
    model's own; `sequence_length` is the number of tokens in the longest row to train on, if it is known. Raises a
    UserError if the model can't be loaded or used, or not with these positions.
    """
    hf_config = load_hf_config(path, revision, trust_remote_code)
    if rope_theta is not None:
        plain_rope(hf_config, path)["rope_theta"] = rope_theta
    own = {"max_position_embeddings": getattr(hf_config, "max_position_embeddings", None)}  # some name it differently
    if sequence_length is not None:
        problem = rows_problem(path, {**hf_config.to_dict(), **own}, sequence_length, max_position_embeddings)
        if problem is not None:
            raise UserError(problem)
    if max_position_embeddings is not None:
        hf_config.max_position_embeddings = max_position_embeddings
    if is_checkpoint(path):
        model = from_hf_config(hf_config, seed=0)
        model.load_state_dict(read_weights(path))
        return model
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    family = hf_config.model_type
    head_class = AutoModelForMaskedLM if family in ("eurobert", "modernbert") else AutoModelForCausalLM
    options = {"attn_implementation": attention.ATTENTION_NAME, "trust_remote_code": trust_remote_code}
    may_lack = ("lm_head.",) if is_papers(config_content(path, revision)) else ()
    model = load_network(head_class, path, hf_config, may_lack=may_lack, exact=True, revision=revision, **options)
    lm_head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if hf_config.tie_word_embeddings and isinstance(lm_head, nn.Linear):
        if torch.equal(lm_head.weight, embedding.weight):
            lm_head.weight = embedding.weight
        else:
            message = "model %s: tie_word_embeddings is true in its config.json, but its files hold another head: used"
            _log.warning(message, path)
            hf_config.tie_word_embeddings = model.config.tie_word_embeddings = False
            model.base_model.config.tie_word_embeddings = False
    language_model = language_model_of(model, f"model {path}", sequence_length)
    if language_model.backbone is not model.base_model:  # checkpoints and exports are of a base model
        raise UserError(f"model {path}: {family} isn't supported: its decoder is a part of its base model")
    return language_model


def load_network(
    auto_class: Any, path: str, config: Any, *, may_lack: tuple[str, ...] = (), exact: bool = False, **options: Any
) -> Any:
    """Load a network and its weights, in fp32, with one of transformers' Auto classes.

    Weights of heads that the class doesn't have are ignored. A warning is logged for other unused weights, and for
    those that the files `may_lack`, by the beginnings of their names, which are drawn from N(0, initializer_range^2).
    Raises a UserError if the network can't be loaded, or its files lack weights (other than a pooler's), have some of other
    shapes, quantized ones that config.json doesn't describe, or with `exact` weights and biases that it doesn't use.
    """
    from safetensors import SafetensorError

    attention.register()
    content = config_content(path, options.get("revision"))
    if is_decoder_export(content):
        options["key_mapping"] = _names_in_family(auto_class, config)
    try:
        with without_warnings():  # of heads that the class does not have
            options = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True, **options}
            network, info = auto_class.from_pretrained(path, config=config, **options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        unknown = isinstance(error, KeyError) and error.args == (attention.ATTENTION_NAME,)
        message = "its family's attention can't be replaced" if unknown else first_line(error)
        raise user_error(f"model {path}: can't be loaded ({message})", error) from None
    # By now a model of the hub is in its cache.
    if (problem := quantized_problem(model_folder(path, options.get("revision")), content)) is not None:
        raise UserError(f"model {path}: can't be loaded ({problem})")
    for name, stored, expected in sorted(info["mismatched_keys"]):
        shapes = f"{name} has shape {list(stored)} in its files, but {list(expected)} by its config.json"
        raise UserError(f"model {path}: can't be loaded ({shapes})")
    generator, missing = torch.Generator().manual_seed(0), list[str]()
    for name in sorted(info["missing_keys"]):
        if name.startswith(may_lack):
            _log.warning("model %s: its files have no %s: new ones are drawn", path, name)
            nn.init.normal_(network.get_parameter(name), std=config.initializer_range, generator=generator)
        elif not name.startswith("pooler."):
            missing.append(name)
    if missing:
        lacking = f"its files lack {len(missing)} weights, e.g. {missing[0]}, that its config.json needs"
        if missing in (["lm_head.weight"], ["decoder.weight"]):
            lacking += ": if it is the embedding, set tie_word_embeddings: true there"
        raise UserError(f"model {path}: {names_problem(info['unexpected_keys']) or lacking}")
    parts = {name for part in (network, network.base_model) for name, _ in part.named_children()} - {"pooler"}
    prefix = f"{network.base_model_prefix}."
    unused = [name for name in info["unexpected_keys"] if name.removeprefix(prefix).split(".")[0] in parts]
    if exact and (trained := [name for name in unused if name.endswith((".weight", ".bias"))]):
        message = f"its files have {len(trained)} weights that its config.json doesn't have, e.g. {min(trained)}"
        raise UserError(f"model {path}: {message}: correct num_hidden_layers, attention_bias or mlp_bias there")
    if unused:
        message = "model %s: %d of its weights are not used by the network in config.json, e.g. %s"
        _log.warning(message, path, len(unused), min(unused))
    return network


def _names_in_family(auto_class: Any, config: Any) -> dict[str, str] | None:
    """Return the family's names of what an export calls `model` and `lm_head`, as patterns; None if they are the same."""
    with torch.device("meta"):
        network = auto_class.from_config(config)
    lm_head = network.get_output_embeddings()
    head = next((name for name, module in network.named_modules() if module is lm_head), "lm_head")
    names = {r"^model\.": f"{network.base_model_prefix}.", r"^lm_head\.": f"{head}."}
    return None if [*names.values()] == ["model.", "lm_head."] else names
