"""Load a network from a checkpoint, a folder or the hub."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from biphasic.errors import UserError, first_line
from biphasic.model import attention
from biphasic.model.architecture import rows_problem
from biphasic.model.checkpoint import is_checkpoint, read_record, read_weights, require_no_checkpoints
from biphasic.model.language_model import LanguageModel, from_hf_config, language_model_of, plain_rope
from biphasic.quiet import without_warnings
from biphasic.storage import cached_file_hash, user_error
from biphasic.storage.hub import require_model

_log = logging.getLogger(__name__)
BIDIRECTIONAL = "bidirectional_"
"""Prefix that exports of decoder families add to the family's model type."""
BIDIRECTIONAL_CODE = "bidirectional.BidirectionalConfig"
"""Configuration class in the config.json of an export of a decoder family."""
_EUROBERT_CODE = "configuration_eurobert.EuroBertConfig"
"""Configuration class in the config.json of EuroBERT's checkpoints on the hub. transformers 5 has these networks."""
_FINGERPRINTED = ("*.safetensors", "*.bin", "*.pt", "config.json", "*.distcp", ".metadata", "*.py")


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
    return language_model_of(model, f"model {path}", sequence_length)


def hf_config_from_json(text: str) -> Any:
    """Build a Hugging Face configuration from its JSON."""
    from transformers import AutoConfig

    content: dict[str, Any] = json.loads(text)
    return AutoConfig.for_model(content.pop("model_type"), **content)


def load_hf_config(path: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load the Hugging Face configuration of a model; for the export of a decoder, in the decoder's class.

    Arguments are as in `load_language_model`. Raises a UserError if it is missing, of an unknown family, or has values that
    are invalid for the family.
    """
    if is_checkpoint(path):
        return hf_config_from_json(read_record(path)["backbone"])
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    require_model(path, revision)
    require_no_checkpoints(path)
    try:
        content = config_content(path, revision)
        if is_papers(content):
            # The default base is their configuration class's; those that we know of name 10,000.
            content = {"rope_theta": 250_000.0, **content, "model_type": "llama"}
            # transformers chooses the attention by `is_causal`; here the job does.
            content.pop("is_causal", None)
        elif not is_decoder_export(content):
            own: dict[str, str] = content.get("auto_map") or {}
            if str(own.get("AutoConfig")).endswith(_EUROBERT_CODE):
                config: Any = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
                del config.auto_map
                return config
            if trust_remote_code and own:
                _log_own_code(path, ", ".join(sorted(map(str, own.values()))))
            return AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
        not_kept = ("model_type", "auto_map", "architectures", "mask_token_id")
        kept = {name: value for name, value in content.items() if name not in not_kept}
        return AutoConfig.for_model(content["model_type"].removeprefix(BIDIRECTIONAL), **kept)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        source = "this folder" if Path(path).is_dir() else "no such checkpoint or folder here, and from the hub"
        message = " ".join(str(error).split()) if isinstance(error, StrictDataclassError) else first_line(error)
        raise user_error(f"model {path}: can't be loaded ({source}: {message})", error) from None


@functools.cache
def _log_own_code(path: str, classes: str) -> None:
    _log.warning("model %s: runs its own Python code (%s), since trust_remote_code is true", path, classes)


def config_content(path: str, revision: str | None = None) -> dict[str, Any]:
    """Return the content of a folder's or hub id's config.json."""
    from transformers import PretrainedConfig

    return PretrainedConfig.get_config_dict(path, revision=revision)[0]


def is_decoder_export(content: dict[str, Any]) -> bool:
    """Return whether a config.json belongs to an export of a decoder family. Its code in the folder isn't needed."""
    # Both are checked, because other models may have a model type with this prefix.
    code = str((content.get("auto_map") or {}).get("AutoConfig"))
    return str(content.get("model_type")).startswith(BIDIRECTIONAL) and code.endswith(BIDIRECTIONAL_CODE)


def is_papers(content: dict[str, Any]) -> bool:
    """Return whether a config.json belongs to a checkpoint of the paper's authors (`MLMvsCLM/…` on the hub).

    Names and shapes of its weights are Llama's, so its code isn't needed.
    """
    return content.get("model_type") == "sl_model"


def load_network(
    auto_class: Any, path: str, config: Any, *, may_lack: tuple[str, ...] = (), exact: bool = False, **options: Any
) -> Any:
    """Load a network and its weights, in fp32, with one of transformers' Auto classes.

    Weights of heads that the class doesn't have are ignored. A warning is logged for other unused weights, and for
    those that the files `may_lack`, by the beginnings of their names, which are drawn from N(0, initializer_range^2).
    Raises a UserError if the network can't be loaded, or its files lack weights (other than a pooler's), have some of other
    shapes, or with `exact` weights and biases that the network in config.json doesn't use.
    """
    from safetensors import SafetensorError

    attention.register()
    try:
        with without_warnings():  # of heads that the class does not have
            options = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True, **options}
            network, info = auto_class.from_pretrained(path, config=config, **options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        unknown = isinstance(error, KeyError) and error.args == (attention.ATTENTION_NAME,)
        message = "its family's attention can't be replaced" if unknown else first_line(error)
        raise user_error(f"model {path}: can't be loaded ({message})", error) from None
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
        if missing[0] in ("lm_head.weight", "decoder.weight"):
            lacking += ": if it is the embedding, set tie_word_embeddings: true there"
        raise UserError(f"model {path}: {lacking}")
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


def model_fingerprint(path: str, revision: str | None, trust_remote_code: bool = False) -> str:
    """Return the hashes of a local model's files, or a hub model's commit. Raise a UserError if there is no model."""
    local = Path(path)
    if local.is_file():
        return cached_file_hash(local)
    if not local.is_dir():
        from huggingface_hub import hf_hub_download

        load_hf_config(path, revision, trust_remote_code)
        # In the hub's cache, a commit's files are in a folder with the commit's name.
        return Path(hf_hub_download(path, "config.json", revision=revision)).parent.name
    files = sorted({file for pattern in _FINGERPRINTED for file in local.glob(pattern) if file.is_file()})
    return "-".join(cached_file_hash(file) for file in files)


def file_stamps(path: str) -> tuple[Any, ...]:
    """Return name, size and modification time of a file or of a folder's entries, as a cache key for their content."""
    local = Path(path)
    files = sorted(local.iterdir()) if local.is_dir() else [local] if local.is_file() else []
    return tuple((file.name, status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()])
