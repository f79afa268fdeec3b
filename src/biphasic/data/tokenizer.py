"""Load and save tokenizers, with bulk encoding, special tokens by role, and a hash that identifies the tokenizer."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from biphasic.errors import UserError, first_line
from biphasic.storage import is_folder, is_remote, open_store, user_error, user_errors
from biphasic.storage.hub import hub_errors, why_missing

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_ROLES = ("pad", "bos", "eos", "mask")
_SUBSTITUTES = {"bos": "cls_token", "eos": "sep_token"}
"""Special tokens that take a role in tokenizers of the BERT family, which name no token for it."""
ADDED_MASK = "<|mask|>"
"""The mask token added to a tokenizer that has none; EuroBERT uses the same name."""
_ADVICE = (
    "make one with AutoTokenizer.from_pretrained(…).save_pretrained(FOLDER), and name that folder; of a SentencePiece model "
    "(….model) with transformers 4 and sentencepiece, because transformers 5 may encode with other tokens than the model"
)
# A byte-level token has a character for each byte: the byte's own if that is printable, else one above 255.
_ALPHABET = sorted(ByteLevel.alphabet())
_PRINTABLE = [ord(character) for character in _ALPHABET if ord(character) < 256]
_BYTES = dict(zip(_ALPHABET, [*_PRINTABLE, *sorted({*range(256)} - {*_PRINTABLE})], strict=True))
_CHARACTERS = {byte: character for character, byte in _BYTES.items()}


@dataclass(frozen=True)
class Tokenizer:
    """A `tokenizers` tokenizer and its special tokens.

    `vocab_size` is the largest id plus one, the number of rows of an embedding. `sha256` is a hash of `tokenizer.json`
    without the post-processor and without formatting, padding and truncation, which libraries change when they save a
    copy. `special_ids` includes special tokens without a role. `settings` is the content of `tokenizer_config.json`.
    `dropout` is the probability of BPE dropout in `tokenizer.json`, which is turned off here; None without. Text that is
    not in the vocabulary gets `unknown_id`; where that is None, it is left out if `drops_unknown`, else there is none.
    """

    tokenizer: tokenizers.Tokenizer
    source: str
    vocab_size: int
    pad_id: int
    mask_id: int
    bos_id: int | None
    eos_id: int | None
    special_ids: tuple[int, ...]
    sha256: str
    settings: dict[str, Any]
    dropout: float | None = None
    unknown_id: int | None = None
    drops_unknown: bool = False

    @property
    def puts_bos(self) -> bool:
        """Whether the tokenizer itself puts BOS before each text: by its post-processor, or by `add_bos_token`."""
        is_added = self.bos_id in self.prefix_and_suffix()[0] or self.settings.get("add_bos_token") is True
        return self.bos_id is not None and is_added

    @property
    def role_ids(self) -> dict[str, int | None]:
        """Return the ids of the special tokens `pad`, `bos`, `eos` and `mask`."""
        return {"pad": self.pad_id, "bos": self.bos_id, "eos": self.eos_id, "mask": self.mask_id}

    def require(self, role: str) -> int:
        """Return the id of the special token for `role`, `bos` or `eos`. Raises a UserError if there is none."""
        token_id = self.role_ids[role]
        if token_id is None:
            message = f"tokenizer {self.source}: has no {role} token, which add_{role}: true needs"
            advice = f"name one as {role}_token in its tokenizer_config.json, or set add_{role}: false"
            raise UserError(f"{message}; {advice}")
        return token_id

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text, without special tokens. Their names in a text are encoded as plain text."""
        with user_errors(f"tokenizer {self.source}: can't encode a text", Exception):  # a bare one
            return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_with_offsets(self, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return the token ids of each text as `encode` does, and each token's character range (end excluded).

        Raises a UserError with `drops_unknown`: the library's ranges don't count the characters that are left out.
        """
        if self.drops_unknown:
            problem = "leaves out text that is not in its vocabulary, so that its tokens can't be found in a text"
            raise UserError(f"tokenizer {self.source}: {problem}: expected a BPE model with an unk_token, or of bytes")
        with user_errors(f"tokenizer {self.source}: can't encode a text", Exception):
            encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def prefix_and_suffix(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ids of the special tokens that the tokenizer adds around a text, such as BERT's [CLS] and [SEP]."""
        # Of characters that the vocabulary lacks, some tokenizers make nothing, and others an error.
        for text in itertools.chain("a", (self.tokenizer.decode([token]) for token in range(self.vocab_size))):
            with suppress(Exception):  # a bare one
                encoding = self.tokenizer.encode(text, add_special_tokens=True)
                if own := [position for position, special in enumerate(encoding.special_tokens_mask) if not special]:
                    return tuple(encoding.ids[: own[0]]), tuple(encoding.ids[own[-1] + 1 :])
        return (), ()

    def adding_special_tokens(self, prefix: Sequence[int], suffix: Sequence[int]) -> Tokenizer:
        """Return a copy that adds these tokens around a text if it is asked for special tokens."""
        copy = tokenizers.Tokenizer.from_str(self.tokenizer.to_str())
        copy.encode_special_tokens = True
        parts = [[(str(copy.id_to_token(token)), token) for token in part] for part in (prefix, suffix)]
        before, after = ([name for name, _ in part] for part in parts)
        single, pair = [*before, "$A", *after], [*before, "$A", "$B", *after]
        template: Any = TemplateProcessing(single, pair, [*parts[0], *parts[1]])
        copy.post_processor = template
        return replace(self, tokenizer=copy)

    def lowercasing(self) -> Tokenizer:
        """Return a copy that lowercases texts first, as sentence-transformers' `do_lower_case` does."""
        copy = tokenizers.Tokenizer.from_str(self.tokenizer.to_str())
        copy.encode_special_tokens = True
        steps: Any = [normalizers.Lowercase(), *filter(None, [copy.normalizer])]
        copy.normalizer = normalizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
        return replace(self, tokenizer=copy, sha256=_content_hash(json.loads(copy.to_str())))

    @property
    def separator_id(self) -> int:
        """Return the id of the token between two texts: the separator, else EOS, else padding."""
        name = _token_name(self.settings.get("sep_token"))
        separator = None if name is None else self.tokenizer.token_to_id(name)
        return next(token_id for token_id in (separator, self.eos_id, self.pad_id) if token_id is not None)

    @property
    def token_names(self) -> dict[str, str]:
        """Return the special tokens that the settings or a role name and the vocabulary has, by setting: `unk_token`, …"""
        own = {f"{role}_token": self.tokenizer.id_to_token(id) for role, id in self.role_ids.items() if id is not None}
        names = {key: _token_name(value) for key, value in {**self.settings, **own}.items() if key.endswith("_token")}
        return {key: name for key, name in names.items() if name and self.tokenizer.token_to_id(name) is not None}

    def save(self, folder: Path) -> None:
        """Write a Hugging Face tokenizer folder for `AutoTokenizer` and `load_tokenizer`. Creates the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(str(folder / "tokenizer.json"))
        names = self.token_names
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self.settings, **names}
        for file, content in (("tokenizer_config.json", settings), ("special_tokens_map.json", names)):
            text = json.dumps(content, indent=2, ensure_ascii=False, sort_keys=True)
            (folder / file).write_text(text + "\n", encoding="utf-8")


class TokenTexts:
    """The bytes of text that each token stands for, in UTF-8, to compare tokens of different kinds of tokenizers.

    Byte-level tokens are sequences of bytes, which may be parts of characters. Of other tokens, `▁` is a space, `<0x0A>` a
    byte, and a WordPiece or word has a space before it unless it continues one (`##ing`).

    Attributes:
        texts: the bytes of each id; empty for special tokens, the unknown token, and ids without a token.
        ids: the id of each text; the highest, since single bytes (`<0x41>`) come before the characters that texts use.
        roles: the ids of `Tokenizer.role_ids`, and of the unknown token as `unk`.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, content = tokenizer.tokenizer, json.loads(tokenizer.tokenizer.to_str())
        self._model, rules = content["model"], json.dumps([content["pre_tokenizer"], content["decoder"]])
        self._is_byte_level, self._has_metaspace = '"ByteLevel"' in rules, r"\u2581" in rules
        self._is_words = self._model["type"] in ("WordPiece", "WordLevel")
        self.roles = {**tokenizer.role_ids, "unk": tokenizer.unknown_id}
        empty, added = {*tokenizer.special_ids, self.roles["unk"]}, {token["id"] for token in content["added_tokens"]}
        self.texts = [b""] * tokenizer.vocab_size
        for token, token_id in self._tokenizer.get_vocab().items():
            if token_id not in empty:
                # Gemma adds tokens such as `▁▁` that its model has too: they stand for spaces.
                is_model = self._has_metaspace and self._tokenizer.model.token_to_id(token) is not None
                self.texts[token_id] = self._text(token) if is_model or token_id not in added else token.encode()
        self.ids = {text: token_id for token_id, text in enumerate(self.texts) if text}

    def _text(self, token: str) -> bytes:
        if self._is_byte_level:
            return b"".join(bytes([_BYTES[char]]) if char in _BYTES else char.encode() for char in token)
        if self._model.get("byte_fallback") and (byte := re.fullmatch("<0x([0-9A-F]{2})>", token)):
            return bytes.fromhex(byte[1])
        if self._is_words:
            prefix = self._model.get("continuing_subword_prefix")
            token = token.removeprefix(prefix) if prefix and token.startswith(prefix) else f" {token}"
        return token.replace("▁", " " if self._has_metaspace else "▁").encode()

    def split(self, text: bytes) -> list[int]:
        """Return the ids of the pieces into which the tokenizer splits the text of a token, without unknown ones."""
        if self._is_words:
            ids = self._tokenizer.encode(text.decode(errors="ignore"), add_special_tokens=False).ids
        else:  # by the model alone, since normalizers and pre-tokenizers may add a space
            spaced = text.decode(errors="ignore").replace(" ", "▁" if self._has_metaspace else " ")
            characters = "".join(_CHARACTERS[byte] for byte in text) if self._is_byte_level else spaced
            ids = [piece.id for piece in self._tokenizer.model.tokenize(characters)]
        return [token_id for token_id in ids if self.texts[token_id]]


def load_tokenizer(path: str, revision: str | None = None) -> Tokenizer:
    """Load a tokenizer from the hub, a folder or a bucket prefix: its `tokenizer.json` as it is, and the tokens' names in
    `tokenizer_config.json`. On the hub, AutoTokenizer makes a tokenizer.json where there is none.

    A tokenizer without a mask token gets one, `<|mask|>`, after its last id. Without a pad token, EOS is the padding,
    as in EuroBERT's tokenizer, because nothing attends to padding. Raises a UserError if there is no usable tokenizer,
    or it has neither a pad nor an EOS token.
    """
    if is_folder(path):
        return _read(Path(path), path)
    with tempfile.TemporaryDirectory() as folder:
        if not is_remote(path):
            _load_from_hub(path, revision, Path(folder))
            return _read(Path(folder), path)
        with user_errors(f"tokenizer {path}: can't be read"):
            store = open_store(path)
            for name in filter(store.stat, _FILES):
                store.download(name, Path(folder, name))
        return _read(Path(folder), path)


def _load_from_hub(path: str, revision: str | None, folder: Path) -> None:
    if (reason := why_missing(path, revision)) is not None:
        raise UserError(f"tokenizer {path}: {reason}")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        for name in _FILES:
            with suppress(EntryNotFoundError), hub_errors():
                shutil.copyfile(hf_hub_download(path, name, revision=revision), folder / name)
        if not (folder / _FILES[0]).is_file():
            from transformers import AutoTokenizer

            try:
                # Without the argument, transformers asks on a terminal whether to run the repository's code.
                made = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
            except (ValueError, KeyError, ImportError) as error:
                raise ValueError(f"no tokenizer.json, and none can be made ({first_line(error)}); {_ADVICE}") from None
            model_file = str(getattr(made, "vocab_file", ""))
            if model_file.endswith(".model") and not _encodes_as_sentencepiece(made, model_file):
                raise ValueError(f"no tokenizer.json, only a SentencePiece model; {_ADVICE}")
            made.save_pretrained(folder)
    except (OSError, ValueError) as error:
        message = f"tokenizer {path}: no such folder here, and from the hub: {first_line(error)}"
        raise user_error(message, error) from None


def _encodes_as_sentencepiece(made: Any, model_file: str) -> bool:
    """Return whether a tokenizer that transformers made of a SentencePiece model splits the vocabulary's pieces alike."""
    from sentencepiece import SentencePieceProcessor  # pyright: ignore[reportMissingImports] - transformers needed it

    model = SentencePieceProcessor(model_file=model_file)
    size = model.get_piece_size()
    for piece in range(0, size, max(size // 2000, 1)):
        text = model.id_to_piece(piece).replace("▁", " ").strip()
        is_text = not (model.is_control(piece) or model.is_unknown(piece) or model.is_byte(piece))
        if is_text and made.tokenize(text) != model.encode(text, out_type=str):
            return False
    character = "\U0010fffd"  # in no text
    is_known = model.encode(character)[-1] != model.unk_id()
    return is_known or made.encode(character, add_special_tokens=False)[-1:] == [made.unk_token_id]


def _read(folder: Path, source: str) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not os.path.isfile(file):
        raise UserError(f"tokenizer {source}: has no tokenizer.json; {_ADVICE}")
    # tokenizers raises bare Exceptions
    with user_errors(f"tokenizer {source}: tokenizer.json can't be read", Exception):
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    side = (tokenizer.truncation or {}).get("direction")
    # Texts are encoded completely, and rows are padded after packing, whatever the saved settings say.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # With dropout, the same text has other tokens each time.
    dropout: float | None = getattr(tokenizer.model, "dropout", None) or None
    if dropout is not None:
        dropout = round(dropout, 6)  # the library keeps it in fp32
        tokenizer.model.dropout = None  # pyright: ignore[reportAttributeAccessIssue]
    named = _json(folder / "special_tokens_map.json", source).items()
    settings = {"truncation_side": side} if side == "left" else {}  # as AutoTokenizer takes it
    settings |= {key: value for key, value in named if key.endswith("_token")}
    settings |= _json(folder / "tokenizer_config.json", source)
    ids: dict[str, int | None] = {}
    for role in _ROLES:
        name = _token_name(settings.get(f"{role}_token") or settings.get(_SUBSTITUTES.get(role, "")))
        ids[role] = None if name is None else tokenizer.token_to_id(name)
        if name is not None and ids[role] is None:
            problem = f"names {name!r} as its {role} token, but its vocabulary has no such token"
            raise UserError(f"tokenizer {source}: {problem}")
    pad, mask = ids["eos"] if ids["pad"] is None else ids["pad"], ids["mask"]
    if pad is None:
        advice = "name one in its tokenizer_config.json"
        raise UserError(f"tokenizer {source}: has neither a pad nor an eos token; {advice}")
    if mask is None:
        tokenizer.add_special_tokens([tokenizers.AddedToken(ADDED_MASK, special=True, normalized=False)])
        mask = tokenizer.token_to_id(ADDED_MASK)
        assert mask is not None
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    content = json.loads(tokenizer.to_str())
    model, rules = content["model"], json.dumps([content["normalizer"], content["pre_tokenizer"]])
    unknown_id = tokenizer.token_to_id(model.get("unk_token") or "")
    unknown_id = model.get("unk_id") if unknown_id is None else unknown_id
    # Of the models without an unknown token, only BPE of characters leaves out text that it doesn't know.
    is_complete = model["type"] != "BPE" or model.get("byte_fallback") or "ByteLevel" in rules
    tokenizer.encode_special_tokens = True
    return Tokenizer(
        tokenizer=tokenizer,
        source=source,
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        pad_id=pad,
        mask_id=mask,
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        special_ids=tuple(sorted(special | {id for id in (*ids.values(), pad, mask) if id is not None})),
        sha256=_content_hash(content),
        settings=settings,
        dropout=dropout,
        unknown_id=unknown_id,
        drops_unknown=unknown_id is None and not is_complete,
    )


def _content_hash(content: dict[str, Any]) -> str:
    """Return the hash of a tokenizer.json; without the post-processor, since conversions add special tokens themselves."""
    hashed = {key: part for key, part in content.items() if key not in ("truncation", "padding", "post_processor")}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()


def _token_name(token: object) -> str | None:
    """Return the text of a token that a configuration gives as text or as a dictionary with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return None if content is None or isinstance(content, bool) else str(content)  # `add_bos_token` names none


def _json(file: Path, source: str) -> dict[str, Any]:
    if not file.is_file():
        return {}
    with user_errors(f"tokenizer {source}: {file.name} can't be read", ValueError):
        content = json.loads(file.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
