"""Small texts, and tokenizers for them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VERSE = "the a model token learns reads rows of text with two phases and masks some causal left right attention"
SPECIAL = {"pad": "<|pad|>", "bos": "<|bos|>", "eos": "<|eos|>", "mask": "<|mask|>"}
Records = list[dict[str, Any]]


def sentences(count: int, seed: int = 0, longest: int = 60) -> Records:
    """`count` records with an id and a text of up to `longest` words."""
    generator = np.random.default_rng(seed)
    texts = [" ".join(generator.choice(VERSE.split(), generator.integers(1, longest))) for _ in range(count)]
    return [{"id": f"doc-{seed}-{number}", "text": text} for number, text in enumerate(texts)]


def write_parquet(path: Path, records: Records, row_group_size: int = 100) -> Path:
    pq.write_table(pa.Table.from_pylist(records), path, row_group_size=row_group_size)
    return path


def write_tokenizer(folder: Path, special: dict[str, str] = SPECIAL, words: int = 300) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=words,
        special_tokens=list(special.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([record["text"] for record in sentences(50)], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{role}_token": text for role, text in special.items()},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


KINDS = ("byte-level", "metaspace", "wordpiece")


def write_kind(folder: Path, kind: str, words: str = VERSE, names: str = "[{}]") -> Path:
    """Train a tokenizer of a kind on a text; its special tokens, `names` of their roles, have the first ids."""
    roles = ["unk", "pad", "eos", "mask"]
    special: list[Any] = [names.format(role) for role in roles]
    keys: dict[str, Any] = {"vocab_size": 500, "special_tokens": special, "show_progress": False}
    tokenizer, trainer = Tokenizer(models.BPE(unk_token=special[0])), trainers.BpeTrainer(**keys)
    if kind == "byte-level":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(**keys, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    elif kind == "metaspace":  # as Llama 2's
        tokenizer = Tokenizer(models.BPE(unk_token=special[0], byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Sequence([decoders.Metaspace(prepend_scheme="first"), decoders.ByteFallback()])
        keys["special_tokens"] = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(**keys)
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token=special[0]))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(**keys)
    tokenizer.train_from_iterator([f"{words} naïve é"] * 2, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][: len(special)]  # bytes are tokens of the model
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {f"{role}_token": token for role, token in zip(roles, special, strict=True)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_wide_tokenizer(folder: Path, words: int) -> Path:
    """A tokenizer of whole words with ids up to `words`; EOS has the largest."""
    special = [SPECIAL[role] for role in ("pad", "bos", "mask")]
    known = [*special, *dict.fromkeys(VERSE.split())]
    fillers = [f"w{number}" for number in range(len(known), words - 1)]
    vocabulary = {word: number for number, word in enumerate([*known, *fillers, SPECIAL["eos"]])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=fillers[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL.values()))
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({f"{role}_token": text for role, text in SPECIAL.items()}))
    return folder
