"""Pool hidden states to text embeddings, and read a model's sentence-transformers settings."""

import functools
import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from biphasic.errors import UserError
from biphasic.model.architecture import PoolingMode
from biphasic.model.segments import Segments
from biphasic.storage import user_errors
from biphasic.storage.files import UnreachableError
from biphasic.storage.hub import hub_errors

_log = logging.getLogger(__name__)
_FAMILIES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
"""Families in the names that sentence-transformers has had for the encoder's settings."""
_ARGUMENTS = ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs")
_HARMLESS_ARGUMENTS = ("trust_remote_code", "add_pooling_layer", "dtype", "torch_dtype", "attn_implementation")
"""Arguments of transformers that don't change an embedding except by its precision, which Biphasic sets itself."""
_SUPPORTED_SETTINGS = {
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    "modality_config": {"method": "forward", "method_output_name": "last_hidden_state"},
    **dict.fromkeys(("processing_kwargs", "query_length", "document_length", "query_expansion", *_ARGUMENTS)),
}
"""Settings of the encoder that change embeddings, with the only supported value besides null."""


def mean_pool(hidden: Tensor, segments: Segments) -> Tensor:
    """Average each segment's hidden states in fp32, from [tokens, width] to [segments, width]."""
    counts = segments.cu_seqlens.diff()
    index = torch.repeat_interleave(counts.long(), output_size=hidden.shape[0])
    sums = hidden.new_zeros((len(segments.lengths), hidden.shape[1]), dtype=torch.float32)
    return sums.index_add(0, index, hidden.float()) / counts[:, None]


@dataclass(frozen=True)
class Pooling:
    """Pools a text's hidden states to an embedding."""

    mode: PoolingMode = "mean"
    """`mean`, `cls` (first hidden state), `lasttoken`, or `max` (maximum of each dimension)."""
    normalize: bool = False
    """Whether embeddings are scaled to L2 norm 1."""

    def __call__(self, hidden: Tensor, segments: Segments) -> Tensor:
        """Pool hidden states [tokens, width] to embeddings, fp32 [segments, width]."""
        if self.mode == "mean":
            pooled = mean_pool(hidden, segments)
        elif self.mode == "cls":
            pooled = hidden[segments.cu_seqlens[:-1]].float()
        elif self.mode == "lasttoken":
            pooled = hidden[segments.cu_seqlens[1:] - 1].float()
        else:
            lowest = hidden.new_full((len(segments.lengths), hidden.shape[1]), -torch.inf, dtype=torch.float32)
            index = segments.segment_index.long()[:, None].expand_as(hidden)
            pooled = lowest.scatter_reduce(0, index, hidden.float(), "amax")
        return F.normalize(pooled, dim=1) if self.normalize else pooled


@dataclass(frozen=True)
class SentenceSettings:
    """The sentence-transformers settings in a model's files. None means that the files don't specify a setting."""

    prompts: dict[str, str] = field(default_factory=dict)
    """Prompts to put before texts, by role or task."""
    default_prompt: str | None = None
    """Name of the prompt for texts that have no other prompt."""
    max_length: int | None = None
    """Maximum number of tokens of a text, including special tokens."""
    lowercase: bool = False
    pooling: Pooling | None = None
    similarity: Literal["cosine", "dot"] = "cosine"
    truncate_dim: int | None = None
    """Number of first values of an embedding that are used."""


def read_sentence_settings(path: str, revision: str | None = None) -> SentenceSettings:
    """Read the sentence-transformers settings of a folder or hub id. Raises a UserError if one is wrong or unsupported."""
    read = functools.partial(_json, path, revision)
    content, modules = read("config_sentence_transformers.json") or {}, read("modules.json")
    files = [f"sentence_{family}_config.json" for family in (_FAMILIES if modules is not None else _FAMILIES[:1])]
    transformer: dict[str, Any] = next(filter(None, map(read, files)), {})
    _require_supported(path, transformer)
    prompts = {name: text for name, text in (content.get("prompts") or {}).items() if text is not None}
    similarity = content.get("similarity_fn_name") or "cosine"
    if similarity not in ("cosine", "dot"):
        raise UserError(f"model {path}: compares embeddings by {similarity}; only cosine and dot are supported")
    default = content.get("default_prompt_name")
    # sentence-transformers gives every model prompts for queries and documents, empty by default.
    if default not in (None, "query", "document", *prompts):
        raise UserError(f"model {path}: names {default!r} as its default prompt, but has none of that name")
    truncate_dim = content.get("truncate_dim")
    if truncate_dim is not None and (type(truncate_dim) is not int or truncate_dim < 1):
        about = "config_sentence_transformers.json has truncate_dim"
        raise UserError(f"model {path}: {about} {json.dumps(truncate_dim)}; expected a number from 1, or null")
    max_length, lowercase = transformer.get("max_seq_length"), bool(transformer.get("do_lower_case"))
    pooling = None if modules is None else _pooling(path, read, modules, prompts)
    return SentenceSettings(prompts, default, max_length, lowercase, pooling, similarity, truncate_dim)


def _require_supported(path: str, transformer: dict[str, Any]) -> None:
    values = {**transformer, "modality_config": (transformer.get("modality_config") or {}).get("text")}
    for key in _ARGUMENTS:
        arguments = transformer.get(key) or {}
        values[key] = {name: value for name, value in arguments.items() if name not in _HARMLESS_ARGUMENTS}
    for key, supported in _SUPPORTED_SETTINGS.items():
        if (value := values.get(key) or None) not in (None, supported):
            problem = f"sets {key} to {json.dumps(value)}, which isn't supported"
            raise UserError(f"model {path}: sentence_bert_config.json {problem}; expected {json.dumps(supported)}")


def _pooling(path: str, read: Callable[[str], Any], modules: list[dict[str, Any]], prompts: dict[str, str]) -> Pooling:
    types = [str(module.get("type")) for module in modules]
    kinds = [name.rpartition(".")[2] if name.startswith("sentence_transformers.") else name for name in types]
    if kinds[:2] != ["Transformer", "Pooling"] or set(kinds[2:]) - {"Normalize", "Dropout"} or modules[0].get("path"):
        supported = "a Transformer in the folder itself, then Pooling, then at most Normalize"
        advice = f"supported are {supported} (of a Router, give the folder of one route's Transformer)"
        raise UserError(f"model {path}: its modules.json has {', '.join(kinds)}; {advice}")
    for module in modules[2:]:
        name = f"{module.get('path')}/config.json"
        inputs = read(name) or {}
        if {inputs.get("module_input_name"), inputs.get("module_output_name")} - {None, "sentence_embedding"}:
            raise UserError(f"model {path}: {name} isn't supported; expected sentence_embedding as input and output")
    name = f"{modules[1].get('path') or ''}/config.json".lstrip("/")
    if (content := read(name)) is None:
        raise UserError(f"model {path}: its modules.json names {name}, which is missing: copy the complete folder")
    # Before sentence-transformers 6, each mode had a flag, such as pooling_mode_cls_token and pooling_mode_mean_tokens.
    flags = [re.fullmatch(r"pooling_mode_(\w+?)(_tokens?)?", key) for key, on in content.items() if on]
    named = content.get("pooling_mode") or [flag[1] for flag in flags if flag]
    modes: list[Any] = [named] if isinstance(named, str) else list(named)
    known = get_args(PoolingMode)
    if len(modes) != 1 or modes[0] not in known:
        named = " and ".join(modes) or "nothing"
        raise UserError(f"model {path}: {name} pools by {named}; expected one of {', '.join(known)}")
    if content.get("include_prompt") is False and any(prompts.values()):
        raise UserError(f"model {path}: {name} leaves prompts out of the pooling, which isn't supported")
    return Pooling(modes[0], "Normalize" in kinds)


def _json(path: str, revision: str | None, name: str) -> Any:
    """Read a JSON file of a folder or hub id; None if there is no such file."""
    file = Path(path, name) if Path(path).is_dir() else _hub_file(path, revision, name)
    with user_errors(f"model {path}: {name} can't be read", ValueError):
        content = json.loads(file.read_text(encoding="utf-8")) if file is not None and file.is_file() else None
    if content is None:
        return None
    is_list = name == "modules.json"
    items = content if is_list else [content]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        expected = "a list of objects" if is_list else "an object"
        raise UserError(f"model {path}: {name} can't be read (expected {expected})")
    return content


def _hub_file(path: str, revision: str | None, name: str) -> Path | None:
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    with user_errors(f"model {path}: {name} can't be read from the hub", ValueError):
        cached = try_to_load_from_cache(path, name, revision=revision)
        # Without a network the hub's library would try for half a minute.
        if cached is not None and not isinstance(cached, str):
            return None  # the cache records that the newest commit that it knows has no such file
        try:
            with hub_errors():
                return Path(hf_hub_download(path, name, revision=revision))
        except UnreachableError:
            if cached is None:
                raise
            return Path(cached)
        except LocalEntryNotFoundError:
            if not constants.HF_HUB_OFFLINE:
                raise
            _log.warning("model %s: the hub is offline, and its cache has no %s: it is taken for missing", path, name)
        except EntryNotFoundError:
            pass
    return None
