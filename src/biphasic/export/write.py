"""Write exported folders for transformers and sentence-transformers."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from biphasic.data.same_encoding import TELLING_TEXTS
from biphasic.data.tokenizer import Tokenizer
from biphasic.errors import UserError
from biphasic.export.folder import CARD_FILE, EXPORT_FILE
from biphasic.export.formats import Format, Kind, add_older_keys, choose_format
from biphasic.model.language_model import LanguageModel
from biphasic.model.pooling import SentenceSettings
from biphasic.quiet import progress_bars
from biphasic.storage import atomic_path, is_free, user_errors

HEAD_FILE = "head.safetensors"
"""File for a head that the format has no class for."""
SHARD_BYTES = 5_000_000_000
"""Largest size of a weights file, unless a single weight is larger."""

_NO_PAIR = "[this model was trained on one text of both: README.md has it]"
_PLAIN_SETTINGS = ("model_max_length", "model_input_names", "clean_up_tokenization_spaces", "padding_side")


def _fill(network: Any, weights: Mapping[str, Tensor], dtype: torch.dtype, origin: str) -> None:
    """Give a network on the meta device its weights. Raises a UserError if names or shapes differ."""
    kind, expected = type(network).__name__, dict([*network.named_parameters(), *network.named_buffers()])
    expected = {name: weight for name, weight in expected.items() if name in network.state_dict()}
    if missing := sorted(expected.keys() - weights.keys()):
        raise UserError(f"{origin}: lacks {len(missing)} weights that {kind} has, e.g. {missing[0]}")
    if extra := sorted(weights.keys() - network.state_dict().keys()):
        raise UserError(f"{origin}: has {len(extra)} weights that {kind} doesn't have, e.g. {extra[0]}")
    for name, weight in expected.items():
        stored, own = list(weights[name].shape), list(weight.shape)
        if stored != own:
            raise UserError(f"{origin}: {name} has shape {stored}; {kind} expects {own}")
    network.load_state_dict({name: weights[name].to(dtype) for name in expected}, strict=False, assign=True)
    network.tie_weights()


def _network(fmt: Format, kind: Kind, weights: Mapping[str, Tensor], dtype: torch.dtype, origin: str) -> Any:
    with user_errors(f"export: {origin} can't be written as {fmt.config.model_type}", AttributeError), torch.device("meta"):
        network = fmt.classes[kind](fmt.config)
    weights = {re.sub(r"^backbone\.", "model.", name): weight for name, weight in weights.items()}
    _fill(network, fmt.rename(weights), dtype, origin)
    return network


def require_exportable(model: LanguageModel, tokenizer: Tokenizer) -> None:
    """Raise a UserError, before training, if the model can't be exported afterwards. Nothing is written."""
    weights = {name: weight.to("meta") for name, weight in model.state_dict().items()}
    _network(choose_format(model.config, tokenizer), "ForMaskedLM", weights, torch.float32, "model")


def write_folder(
    fmt: Format,
    kind: Kind,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer,
    out: Path,
    card: str,
    settings: SentenceSettings | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    force: bool = False,
    keep_special_tokens: bool = False,
    refuse_pairs: bool = False,
    head: dict[str, Tensor] | None = None,
    source: Mapping[str, Any] | None = None,
    origin: str = "model",
) -> int:
    """Write a network, its tokenizer and its card atomically to a folder, and return the number of parameters.

    `kind` is one of the format's networks, and `weights` has its weights on the CPU, by `LanguageModel`'s names.
    `settings` has the prompts, maximum length (default: the context length) and lowercasing for sentence-transformers.
    `force` replaces an earlier export. With `keep_special_tokens`, the tokenizer adds its special tokens to a text;
    with `refuse_pairs`, a pair of texts is an error in it (`make_pairs_errors`). `head` has the head's weights, which
    are also written to `head.safetensors`. `source` is recorded in `biphasic.json`, as what the weights come from;
    `origin` is their name in messages. Raises a UserError if the weights don't fit the network, `out` exists and can't
    be replaced, or it can't be written.
    """
    require_free(out, force)
    network = _network(fmt, kind, weights, dtype, origin)
    settings = settings or SentenceSettings()
    settings = replace(settings, max_length=settings.max_length or fmt.config.max_position_embeddings)

    # Replaces the original tokenizer's settings, such as its class, added tokens, path and chat template.
    tokenizer_settings = {
        **tokenizer.token_names,
        "model_max_length": settings.max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }

    def fill(folder: Path) -> None:
        with progress_bars(False):
            network.save_pretrained(folder, max_shard_size=SHARD_BYTES)
        add_older_keys(folder)
        for name, text in fmt.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        replace(tokenizer, settings=tokenizer_settings).save(folder)
        if not keep_special_tokens and not fmt.keeps_special_tokens:
            _remove_special_tokens(folder / "tokenizer.json")
        if refuse_pairs:
            make_pairs_errors(folder / "tokenizer.json", tokenizer)
        write_shared_files(folder, fmt.config.hidden_size, settings, card, head, source)

    write_atomically(out, fill)
    return sum(weight.numel() for weight in network.parameters())


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
    texts = [*TELLING_TEXTS, written.decode(list(range(0, size, max(size // 200, 1))))]
    with suppress(Exception):  # a class without its package, or with its own code
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        pair = loaded("a", "b").input_ids == written.encode("a", "b").ids
        if pair and all(loaded(text, verbose=False).input_ids == written.encode(text).ids for text in texts):
            return
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    names = [name for name in settings if name.endswith("_token") and not isinstance(settings[name], bool)]
    plain = {name: settings[name] for name in (*names, *_PLAIN_SETTINGS) if name in settings}
    plain["tokenizer_class"] = "PreTrainedTokenizerFast"
    file.write_text(json.dumps(plain, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")


def make_pairs_errors(file: Path, tokenizer: Tokenizer) -> None:
    """Let tokenizer.json give a pair of texts a token that no embedding has, so that every model refuses it.

    Training read a pair by a template, as one text, whose tokens no template of the tokenizer gives: a space before a word
    is part of its token. Pipelines and sentence-transformers' CrossEncoder would take the pair's, without a message.
    """
    written = replace(tokenizer, tokenizer=tokenizers.Tokenizer.from_file(str(file)))
    written = written.adding_special_tokens(*written.prefix_and_suffix())
    processor = json.loads(written.tokenizer.to_str())["post_processor"]
    refused = {"SpecialToken": {"id": _NO_PAIR, "type_id": 0}}
    processor["pair"] = [processor["pair"][0], refused, *processor["pair"][1:]]
    processor["special_tokens"][_NO_PAIR] = {"id": _NO_PAIR, "ids": [2**31 - 1], "tokens": [_NO_PAIR]}
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**content, "post_processor": processor}, ensure_ascii=False), encoding="utf-8")


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
    sentences |= {"truncate_dim": settings.truncate_dim} if (settings.truncate_dim or width) < width else {}
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
