"""Write exported folders for transformers and sentence-transformers, with at most one file's weights in memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from biphasic.data.tokenizer import Tokenizer
from biphasic.errors import UserError
from biphasic.export.folder import CARD_FILE, EXPORT_FILE
from biphasic.export.formats import Format, Kind, add_older_keys
from biphasic.grouping import groups_up_to
from biphasic.model.checkpoint import read_weights, weight_shapes
from biphasic.model.pooling import SentenceSettings
from biphasic.storage import atomic_path, is_free, user_errors

HEAD_FILE = "head.safetensors"
"""File for a head that the format has no class for."""
SHARD_BYTES = 5_000_000_000
"""Largest size of a weights file, unless a single weight is larger."""
PORTION_BYTES = 256_000_000
"""Bytes that are read and cast at a time, unless a single weight is larger."""

_PLAIN_SETTINGS = ("model_max_length", "model_input_names", "clean_up_tokenization_spaces", "padding_side")
_COMPARED_TEXTS = (
    "The quick Brown fox doesn't jump  over 12,345 DOGS in 2026;\tit's (nearly)\r\n\n    3.14 o'clock, x_1!=0. ",
    "École naïve straße ﬁne İstanbul ΟΔΟΣ e\u0301 \uff46\uff55 \u00a0 «Привет, мир» 你好,世界。東京タワー 안녕 مرحبا 👍🏽",
)


@dataclass(frozen=True)
class Weights:
    """Weights by name, whose shapes are known before they are read."""

    shapes: Mapping[str, Tensor]
    """Tensors with the stored shapes and dtypes, which may be on the meta device."""
    read: Callable[[Sequence[str]], Mapping[str, Tensor]]
    """Returns the named weights, on the CPU."""
    source: str
    """Where the weights come from, for messages."""

    @staticmethod
    def in_memory(weights: Mapping[str, Tensor]) -> Weights:
        """Return `Weights` for tensors in memory."""
        weights = {_exported_name(name): weight.detach() for name, weight in weights.items()}
        return Weights(weights, lambda names: {name: weights[name].cpu() for name in names}, "model")

    @staticmethod
    def from_checkpoint(path: str) -> Weights:
        """Return the weights of a run's checkpoint, a file or a sharded folder; a UserError if it can't be read."""
        shapes = weight_shapes(path)
        stored = {_exported_name(name): name for name in shapes}

        def read(names: Sequence[str]) -> dict[str, Tensor]:
            weights = read_weights(path, [stored[name] for name in names])
            return {name: weights[stored[name]] for name in names}

        return Weights({name: shapes[stored[name]] for name in stored}, read, f"checkpoint {path}")

    def joined(self, stored_names: Callable[[str], list[str]], names: Sequence[str]) -> Weights:
        """Return weights with other `names`, each made of the stored weights that `stored_names` returns, and the rest."""
        sources = {name: stored_names(name) for name in names}
        used = {source for parts in sources.values() for source in parts}
        sources = {name: parts for name, parts in sources.items() if self.shapes.keys() >= set(parts)}
        sources |= {name: [name] for name in self.shapes if name not in used}
        shapes = {name: torch.cat([self.shapes[part].to("meta") for part in parts]) for name, parts in sources.items()}

        def read(names: Sequence[str]) -> dict[str, Tensor]:
            stored = self.read([part for name in names for part in sources[name]])
            return {name: torch.cat([stored[part] for part in sources[name]]) for name in names}

        return Weights(shapes, read, self.source)


def _exported_name(name: str) -> str:
    """Return transformers' name for a weight of `LanguageModel`, whose backbone it calls `model`."""
    return re.sub(r"^backbone\.", "model.", name)


def _unique_weights(network: nn.Module) -> dict[str, Tensor]:
    """Return a network's stored weights by name; a weight with several names under the first."""
    stored = network.state_dict()
    named = [*network.named_parameters(), *network.named_buffers()]
    return {name: weight for name, weight in named if name in stored}


def write_weights(weights: Weights, network: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """Write a network's weights as transformers does: `model.safetensors`, or above `SHARD_BYTES` shards and their index.

    The network determines the expected names and shapes. A weight with several names is written once.

    Raises:
        UserError: weights are missing, unexpected or have another shape. Nothing is written then.
        OSError: the folder can't be written.
    """
    expected = _unique_weights(network)
    _require_fit(weights, expected, network)
    names = sorted(expected, key=_order_of_names)
    stored = {name: torch.empty(expected[name].shape, dtype=dtype, device="meta") for name in names}
    split = split_torch_state_dict_into_shards(stored, max_shard_size=SHARD_BYTES)
    for file, names in split.filename_to_tensors.items():
        save_file(_cast(weights, names, dtype), folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        metadata = {"total_parameters": sum(weight.numel() for weight in stored.values()), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _order_of_names(name: str) -> list[tuple[int, int, str]]:
    """Return the key by which transformers sorts weights: layer 2 before layer 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def _require_fit(weights: Weights, expected: Mapping[str, Tensor], network: nn.Module) -> None:
    shapes, kind = weights.shapes, type(network).__name__
    if missing := sorted(expected.keys() - shapes.keys()):
        raise UserError(f"{weights.source}: lacks {len(missing)} weights that {kind} has, e.g. {missing[0]}")
    if extra := sorted(shapes.keys() - network.state_dict().keys()):
        raise UserError(f"{weights.source}: has {len(extra)} weights that {kind} doesn't have, e.g. {extra[0]}")
    for name, weight in expected.items():
        stored, own = list(shapes[name].shape), list(weight.shape)
        if stored != own:
            raise UserError(f"{weights.source}: {name} has shape {stored}; {kind} expects {own}")


def _cast(weights: Weights, names: Sequence[str], dtype: torch.dtype) -> dict[str, Tensor]:
    cast = {}
    for portion in groups_up_to(PORTION_BYTES, names, lambda name: weights.shapes[name].nbytes):
        for name, weight in weights.read(portion).items():
            cast[name] = weight.to(dtype).contiguous()
    return cast


def write_folder(
    fmt: Format,
    kind: Kind,
    weights: Weights,
    tokenizer: Tokenizer,
    out: Path,
    card: str,
    settings: SentenceSettings | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    force: bool = False,
    keep_special_tokens: bool = False,
    head: dict[str, Tensor] | None = None,
    source: Mapping[str, Any] | None = None,
) -> int:
    """Write a network, its tokenizer and its card atomically to a folder, and return the number of parameters.

    `kind` is one of the format's networks, and `weights` has that network's names. `settings` has the prompts, maximum
    length (default: the context length) and lowercasing for sentence-transformers. `force` replaces an earlier export.
    With `keep_special_tokens`, the tokenizer adds its special tokens to a text. `head` has the head's weights, which
    are also written to `head.safetensors`. `source` is recorded in `biphasic.json`, as what the weights come from.

    Raises:
        UserError: the weights don't fit the network, `out` exists and can't be replaced, or it can't be written.
    """
    require_free(out, force)
    network = fmt.network(kind)
    if fmt.stored_names is not None:
        weights = weights.joined(fmt.stored_names, list(network.state_dict()))
    config, settings = fmt.config, settings or SentenceSettings()
    settings = replace(settings, max_length=settings.max_length or config.max_position_embeddings)
    config.architectures, config.dtype = [type(network).__name__], str(dtype).removeprefix("torch.")

    # Replaces the original tokenizer's settings, such as its class, added tokens, path and chat template.
    tokenizer_settings = {
        **tokenizer.token_names,
        "model_max_length": settings.max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }

    def fill(folder: Path) -> None:
        config.save_pretrained(folder)
        add_older_keys(folder)
        for name, text in fmt.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        write_weights(weights, network, folder, dtype)
        replace(tokenizer, settings=tokenizer_settings).save(folder)
        if not keep_special_tokens and not fmt.keeps_special_tokens:
            _remove_special_tokens(folder / "tokenizer.json")
        write_shared_files(folder, config.hidden_size, settings, card, head, source)

    write_atomically(out, fill)
    return sum(weight.numel() for weight in _unique_weights(network).values())


def require_free(out: Path, force: bool) -> None:
    """Raise a UserError if `out` exists, unless it is an empty folder, or an earlier export and `force` is set.

    Also if it is a mount point.
    """
    if is_free(out):
        return
    if not (out / EXPORT_FILE).is_file():
        raise UserError(f"{out} exists and is not an export: choose another folder")
    if not force:
        raise UserError(f"{out} holds an earlier export: add --force to replace it, or choose another folder")


def write_atomically(out: Path, fill: Callable[[Path], None]) -> None:
    """Replace `out` by a folder that `fill` writes beside it under a temporary name; a UserError if that fails."""
    out = out.resolve()
    with user_errors(f"{out} can't be written", SafetensorError), atomic_path(out) as partial:
        partial.mkdir()
        fill(partial)


def _keep_encoding(folder: Path) -> None:
    """Replace the tokenizer's class by the general one if AutoTokenizer doesn't encode with it as tokenizer.json says."""
    from transformers import AutoTokenizer

    written = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    size = written.get_vocab_size()
    texts = [*_COMPARED_TEXTS, written.decode(list(range(0, size, max(size // 200, 1))))]
    with suppress(Exception):  # a class without its package, or with its own code
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if all(loaded(text).input_ids == written.encode(text).ids for text in texts):
            return
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    names = [name for name in settings if name.endswith("_token") and not isinstance(settings[name], bool)]
    plain = {name: settings[name] for name in (*names, *_PLAIN_SETTINGS) if name in settings}
    plain["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(plain, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def _remove_special_tokens(file: Path) -> None:
    """Stop the tokenizer from adding special tokens, because training had none (Llama 3's adds one)."""
    content = json.loads(file.read_text(encoding="utf-8"))
    processor = content.get("post_processor") or {}
    parts = processor.get("processors", [processor])
    content["post_processor"] = next((part for part in parts if part.get("type") == "ByteLevel"), None)
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def write_shared_files(
    folder: Path,
    width: int,
    settings: SentenceSettings,
    card: str,
    head: dict[str, Tensor] | None,
    source: Mapping[str, Any] | None = None,
) -> None:
    """Write the files of every export: sentence-transformers' modules (mean pooling), a head if given, the card."""
    # A flag for each mode: the format of sentence-transformers before version 6 and of text-embeddings-inference.
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    sentences = {"prompts": settings.prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    files = {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        ],
        "1_Pooling/config.json": {**pooling, "include_prompt": True},
        "sentence_bert_config.json": {"max_seq_length": settings.max_length, "do_lower_case": settings.lowercase},
        "config_sentence_transformers.json": sentences,
        EXPORT_FILE: {"format": 1, **({"source": source} if source else {})},
    }
    _keep_encoding(folder)
    (folder / "1_Pooling").mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / CARD_FILE).write_text(card, encoding="utf-8")
    if head:
        save_file(head, folder / HEAD_FILE)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors makes files readable only for the owner
