"""A tokenizer as this project needs it: encoding in bulk, the special tokens by role, and proof of which one it is."""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from biphasic.config.errors import UserError
from biphasic.storage import is_remote, short, store

FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
ROLES = ("pad", "bos", "eos", "mask")
ADDED_MASK = "<|mask|>"
"""What a tokenizer without a mask token gets; EuroBERT's name for it."""


@dataclass(frozen=True)
class Tokenizer:
    """A `tokenizers` tokenizer and its special tokens.

    `vocab_size` is the largest id plus one: rows that an embedding needs. `sha256` is of what the tokenizer does: its
    `tokenizer.json` without formatting, padding and truncation, which libraries change when they save a copy.
    `special_ids` are all special tokens, the four roles' among them. `settings` is the content of
    `tokenizer_config.json`.
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

    def require(self, role: str) -> int:
        """The id of the special token for `role` (`bos` or `eos`).

        Raises:
            UserError: this tokenizer has none.
        """
        found = getattr(self, f"{role}_id")
        if found is None:
            message = f"tokenizer {self.source}: has no {role} token, which add_{role}: true needs"
            raise UserError(
                f"{message}; name one as {role}_token in its tokenizer_config.json, or set add_{role}: false"
            )
        return found

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, nothing added. What looks like a special token in a text is encoded as plain text."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_with_offsets(self, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """As `encode`, and the characters that each token stands for: from, and up to."""
        return [(one.ids, one.offsets) for one in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The special tokens that its own settings put before and behind a text, such as BERT's [CLS] and [SEP]."""
        found = self.tokenizer.encode("a", add_special_tokens=True)
        text = [at for at, special in enumerate(found.special_tokens_mask) if not special]
        ids = found.ids
        return (tuple(ids[: text[0]]), tuple(ids[text[-1] + 1 :])) if text else ((), ())

    @property
    def separator_id(self) -> int:
        """What stands between two texts: its separator, or else its end of text."""
        named = self.settings.get("sep_token")
        name = named.get("content") if isinstance(named, dict) else named
        found = None if name is None else self.tokenizer.token_to_id(str(name))
        return found if found is not None else self.pad_id if self.eos_id is None else self.eos_id

    def save(self, folder: Path) -> None:
        """Write a Hugging Face tokenizer folder, which `AutoTokenizer` and `load_tokenizer` read; creates the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(str(folder / "tokenizer.json"))
        ids = {role: getattr(self, f"{role}_id") for role in ROLES}
        names = {f"{role}_token": self.tokenizer.id_to_token(id) for role, id in ids.items() if id is not None}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self.settings, **names}
        for file, content in (("tokenizer_config.json", settings), ("special_tokens_map.json", names)):
            text = json.dumps(content, indent=2, ensure_ascii=False, sort_keys=True)
            (folder / file).write_text(text + "\n", encoding="utf-8")


def load_tokenizer(path: str, revision: str | None = None) -> Tokenizer:
    """Read a tokenizer from a folder, a bucket or the hub.

    A tokenizer without a mask token gets one, `<|mask|>`, after its last id; without a pad token, eos does for it (as in
    EuroBERT's tokenizer: padding is never looked at).

    Args:
        path: a folder or a bucket's prefix with `tokenizer.json` and `tokenizer_config.json`, or a hub id.
        revision: of a hub id.

    Raises:
        UserError: nothing usable is there, or it has neither pad nor eos.
    """
    if Path(path).is_dir():
        return _read(Path(path), path)
    if is_remote(path):
        return _read_remote(path)
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise UserError(f"tokenizer {path}: there is no such folder")
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(path, revision=revision)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"tokenizer {path}: no such folder here, and from the hub: {short(error)}") from None
    with tempfile.TemporaryDirectory() as folder:
        found.save_pretrained(folder)
        return _read(Path(folder), path)


def _read_remote(path: str) -> Tokenizer:
    place = store(path)
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in FILES:
                if place.stat(name) is not None:
                    (Path(folder) / name).write_bytes(place.read(name))
        except OSError as error:
            raise UserError(f"tokenizer {path}: can't be read ({short(error)})") from None
        return _read(Path(folder), path)


def _read(folder: Path, source: str) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(
            f"tokenizer {source}: has no tokenizer.json; save it once with "
            "AutoTokenizer.from_pretrained(…, use_fast=True).save_pretrained(…)"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise UserError(f"tokenizer {source}: tokenizer.json can't be read ({short(error)})") from None
    # Their saved values are for other uses: here every text is encoded whole, and rows are padded after packing.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = _json(folder / "tokenizer_config.json", source)
    named = {**_json(folder / "special_tokens_map.json", source), **settings}
    ids = {role: _id(tokenizer, named.get(f"{role}_token"), role, source) for role in ROLES}
    if ids["pad"] is None and ids["eos"] is None:
        raise UserError(
            f"tokenizer {source}: has neither a pad nor an eos token; name one in its tokenizer_config.json"
        )
    if ids["mask"] is None:
        known = tokenizer.token_to_id(ADDED_MASK)
        tokenizer.add_special_tokens([tokenizers.AddedToken(ADDED_MASK, special=True, normalized=False)])
        ids["mask"] = tokenizer.token_to_id(ADDED_MASK) if known is None else known
    mask, pad = ids["mask"], ids["eos"] if ids["pad"] is None else ids["pad"]
    assert mask is not None
    assert pad is not None
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    sha256 = _sha256(tokenizer)
    tokenizer.encode_special_tokens = True
    return Tokenizer(
        tokenizer=tokenizer,
        source=source,
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        pad_id=pad,
        mask_id=mask,
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        special_ids=tuple(sorted(special | {id for id in (*ids.values(), pad) if id is not None})),
        sha256=sha256,
        settings=settings,
    )


def _id(tokenizer: tokenizers.Tokenizer, token: object, role: str, source: str) -> int | None:
    """The id of a token that a configuration names, as text or as a dictionary with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    if content is None:
        return None
    id = tokenizer.token_to_id(str(content))
    if id is None:
        raise UserError(
            f"tokenizer {source}: names {content!r} as its {role} token, but its vocabulary has no such token"
        )
    return id


def _sha256(tokenizer: tokenizers.Tokenizer) -> str:
    content = json.loads(tokenizer.to_str())
    content.pop("truncation", None)
    content.pop("padding", None)
    content.pop("post_processor", None)  # adds special tokens around texts, which conversion does by itself
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _json(file: Path, source: str) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"tokenizer {source}: {file.name} can't be read ({short(error)})") from None
    return content if isinstance(content, dict) else {}
