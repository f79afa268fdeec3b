"""Read the Hugging Face configuration of a model, and identify its files. No network is built."""

import functools
import json
import logging
from pathlib import Path
from typing import Any

from biphasic.errors import UserError, first_line
from biphasic.model.checkpoint import is_checkpoint, read_record, require_no_checkpoints
from biphasic.model.stored_weights import weights_problem
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


def hf_config_from_json(text: str) -> Any:
    """Build a Hugging Face configuration from its JSON."""
    from transformers import AutoConfig

    content: dict[str, Any] = json.loads(text)
    return AutoConfig.for_model(content.pop("model_type"), **content)


def load_hf_config(path: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load the Hugging Face configuration of a model; for the export of a decoder, in the decoder's class.

    Arguments are as in `load_language_model`. Raises a UserError if it is missing, of an unknown family, or has values that
    are invalid for the family, or if the folder shows that its weights can't be loaded.
    """
    if is_checkpoint(path):
        return hf_config_from_json(read_record(path)["backbone"])
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    require_model(path, revision)
    require_no_checkpoints(path)
    if (problem := weights_problem(path)) is not None:
        raise UserError(problem)
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


def model_folder(path: str, revision: str | None) -> Path:
    """Return a local folder, or that of a hub model in the hub's cache."""
    from huggingface_hub import hf_hub_download

    return Path(path) if Path(path).is_dir() else Path(hf_hub_download(path, "config.json", revision=revision)).parent


def model_fingerprint(path: str, revision: str | None, trust_remote_code: bool = False) -> str:
    """Return the hashes of a local model's files, or a hub model's commit. Raise a UserError if there is no model."""
    local = Path(path)
    if local.is_file():
        return cached_file_hash(local)
    if not local.is_dir():
        load_hf_config(path, revision, trust_remote_code)
        # In the hub's cache, a commit's files are in a folder with the commit's name.
        return model_folder(path, revision).name
    files = sorted({file for pattern in _FINGERPRINTED for file in local.glob(pattern) if file.is_file()})
    return "-".join(cached_file_hash(file) for file in files)


def file_stamps(path: str) -> tuple[Any, ...]:
    """Return name, size and modification time of a file or of a folder's entries, as a cache key for their content."""
    local = Path(path)
    files = sorted(local.iterdir()) if local.is_dir() else [local] if local.is_file() else []
    return tuple((file.name, status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()])
