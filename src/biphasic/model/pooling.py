"""From a text's hidden states to its embedding, and what a model's files say of it (sentence-transformers' format)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from biphasic.config.errors import UserError
from biphasic.config.evaluate import PoolingMode
from biphasic.model.packed import mean_pool
from biphasic.model.segments import Segments

_ROLES = ("query", "document")
"""sentence-transformers gives every model a prompt for these, empty where none is said."""
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""How sentence-transformers wrote the mode before version 6."""


@dataclass(frozen=True)
class Pooling:
    """How a text's hidden states become its embedding: their mean, the first, the last, or the largest of each dimension;
    and whether that is brought to length 1."""

    mode: PoolingMode = "mean"
    normalize: bool = False

    def __call__(self, hidden: Tensor, segments: Segments) -> Tensor:
        """Hidden states [tokens, width] to embeddings fp32 [segments, width]."""
        if self.mode == "mean":
            found = mean_pool(hidden, segments)
        elif self.mode == "cls":
            found = hidden[segments.cu_seqlens[:-1]].float()
        elif self.mode == "lasttoken":
            found = hidden[segments.cu_seqlens[1:] - 1].float()
        else:
            lowest = hidden.new_full((len(segments.lengths), hidden.shape[1]), -torch.inf, dtype=torch.float32)
            owner = segments.owner.long()[:, None].expand_as(hidden)
            found = lowest.scatter_reduce(0, owner, hidden.float(), "amax")
        return F.normalize(found, dim=1) if self.normalize else found


@dataclass(frozen=True)
class Sentences:
    """What a model's files say of texts.

    `prompts` go before texts, by role or task; `default_prompt` is the name of the one that goes before all others.
    `longest` (tokens) is where they are cut; `similarity` is how embeddings are compared. None: the files don't say.
    """

    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    longest: int | None = None
    lowercase: bool = False
    pooling: Pooling | None = None
    similarity: Literal["cosine", "dot"] = "cosine"


def read_sentences(path: str, revision: str | None = None) -> Sentences:
    """What the files of a folder or hub id say.

    Raises:
        UserError: they contradict themselves, lack one that they name, or want what isn't done here.
    """

    def read(name: str) -> Any:
        return _json(path, name, revision)

    about, transformer = read("config_sentence_transformers.json") or {}, read("sentence_bert_config.json") or {}
    prompts = {name: text for name, text in (about.get("prompts") or {}).items() if text is not None}
    pooling = _pooling(path, read, prompts)
    similarity = about.get("similarity_fn_name") or "cosine"
    if similarity not in ("cosine", "dot"):
        raise UserError(f"model {path}: compares embeddings by {similarity}; here they are by cosine or dot")
    default = about.get("default_prompt_name")
    if default not in (None, *_ROLES, *prompts):
        raise UserError(f"model {path}: names {default!r} as its default prompt, but has none of that name")
    return Sentences(
        prompts=prompts,
        default_prompt=default,
        longest=transformer.get("max_seq_length"),
        lowercase=bool(transformer.get("do_lower_case")),
        pooling=pooling,
        similarity=similarity,
    )


def _pooling(path: str, read: Callable[[str], Any], prompts: dict[str, str]) -> Pooling | None:
    modules = read("modules.json")
    if modules is None:
        return None
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    rest = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if rest or kinds[:2] != ["Transformer", "Pooling"] or modules[0].get("path"):
        raise UserError(
            f"model {path}: its modules.json has {', '.join(kinds)}; here a model is a Transformer in the folder itself, "
            "then Pooling, then at most Normalize"
        )
    name = f"{modules[1].get('path') or ''}/config.json".lstrip("/")
    found = read(name)
    if found is None:
        raise UserError(
            f"model {path}: its modules.json names {name}, which is missing: without it nobody knows how the model pools; "
            "bring the whole folder"
        )
    said = found.get("pooling_mode") or [mode for key, mode in _MODES.items() if found.get(key)]
    modes = [said] if isinstance(said, str) else list(said)
    known: dict[str, PoolingMode] = {mode: mode for mode in get_args(PoolingMode)}
    if len(modes) != 1 or modes[0] not in known:
        raise UserError(
            f"model {path}: {name} pools by {' and '.join(modes) or 'nothing'}; expected one of {', '.join(known)}"
        )
    if found.get("include_prompt") is False and any(prompts.values()):
        raise UserError(f"model {path}: {name} leaves prompts out of the pooling, which isn't done here")
    return Pooling(known[modes[0]], "Normalize" in kinds)


def _json(path: str, name: str, revision: str | None) -> Any:
    """A file's content; None when there is none."""
    file = Path(path) / name
    if not Path(path).is_dir():
        from huggingface_hub import constants
        from transformers.utils.hub import cached_file

        try:
            found = cached_file(
                path,
                name,
                revision=revision,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=not constants.HF_HUB_OFFLINE,
            )
        except (OSError, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            raise UserError(f"model {path}: {name} can't be read from the hub ({first})") from None
        if found is None:
            return None
        file = Path(found)
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"model {path}: {name} can't be read ({error})") from None
    listed = name == "modules.json"
    rows = content if listed else [content]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(
            f"model {path}: {name} can't be read (expected {'a list of objects' if listed else 'an object'})"
        )
    return content
