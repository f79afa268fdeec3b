"""Train a byte-level BPE tokenizer on the text that a conversion reads."""

import json
import re
import sys
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from biphasic.config.convert import ConvertConfig
from biphasic.conversion.convert import inspect_sources, sample_documents
from biphasic.conversion.reading import Document, read_up_to_damage
from biphasic.conversion.source_files import SourceFile, read_ahead
from biphasic.conversion.sources import FileLayout, draw_validation
from biphasic.data.packing import document_number
from biphasic.errors import UserError
from biphasic.storage import atomic_path, is_free, user_errors

SPECIAL_TOKENS = {"pad": "<|pad|>", "bos": "<|bos|>", "eos": "<|eos|>", "mask": "<|mask|>"}
"""The default special tokens by their role. MLM needs `mask`, conversion `eos` (or `bos`), and batches need `pad`."""
ROLES = (*SPECIAL_TOKENS, "unk", "cls", "sep")
"""The roles that transformers knows."""
BYTES = 256
"""Byte-level BPE begins with one token for each byte, so that no text needs an unknown token."""
_MUCH_MARKED = 0.01
_SAMPLED_CHARACTERS = 2000
"""Number of characters of each sampled document that are looked at."""
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_WORDS_WITH_MARKS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_ENDING}|"
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_ENDING}|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""GPT-4o's pattern of words, which gigatoken knows. In GPT-2's, that of `ByteLevel`, a combining mark ends a word, such as
a vowel in Hindi."""
_WITHOUT_SPACES = re.compile("[\u0e00-\u109f\u1780-\u17ff]")
"""Thai to Burmese, and Khmer: with that pattern a clause is a word, and half of the tokens are parts of characters."""


@dataclass(frozen=True)
class TrainedTokenizer:
    """A tokenizer's number of tokens, and what it was trained on. `marks`: the share of combining marks, from 1% on."""

    tokens: int
    documents: int
    text_bytes: int
    marks: float | None


def train_tokenizer(
    config: ConvertConfig,
    folder: Path,
    *,
    size: int,
    special_tokens: Mapping[str, str] = SPECIAL_TOKENS,
    added_tokens: tuple[str, ...] = (),
    max_bytes: int | None = None,
    force: bool = False,
) -> TrainedTokenizer:
    """Train on the documents that `config` converts into the training split.

    The same text and options give the same files. The special tokens have the first ids, then come `added_tokens`.

    Args:
        config: the conversion, whose source, columns, filters and validation split decide which documents are read.
        folder: local folder to write, in the format of transformers.
        size: number of tokens, including special tokens and the 256 bytes. A small text may give fewer.
        special_tokens: token by role, e.g. `{"mask": "<mask>"}`.
        added_tokens: ordinary tokens that are never split, e.g. for markup.
        max_bytes: maximum bytes of text (UTF-8) to read, of each file in proportion to its size. None reads all.
        force: whether to replace an earlier tokenizer in `folder`.

    Raises:
        UserError: the source can't be read, the size is too small, or the folder exists or can't be written.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = [*special_tokens.values(), *added_tokens]
    if len(set(special)) < len(special):
        raise UserError(f"special tokens: must be distinct; got {', '.join(special)}")
    if size < len(special) + BYTES:
        raise UserError(f"--size: expected at least {len(special) + BYTES} ({BYTES} bytes and {len(special)} special "
                        f"tokens); got {size}")  # fmt: skip
    for token in added_tokens:
        if (decoded := decoders.ByteLevel().decode([token])) != token or not token:
            raise UserError(f"--add: expected a text such as <code>; {token!r} would be decoded to {decoded!r}")
    with user_errors(f"{folder}: can't be written"):
        _require_free(folder, force)
        folder.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder.parent).close()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    layouts = inspect_sources(config)[1]
    if (marks := _share_of_marks(config, layouts)) is not None:
        split = pre_tokenizers.Split(Regex(_WORDS_WITH_MARKS), "isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    files, (end, _) = [layout.file for layout in layouts if layout.fault is None], draw_validation(config, layouts)
    read: Counter[str] = Counter()
    tokenizer.train_from_iterator(_training_text(config, files, end, max_bytes, read), trainer)
    if not read["documents"]:
        longer = f" (the first of each file may be longer than --max-text, {max_bytes:,} bytes)" if max_bytes else ""
        raise UserError(f"source: no document of the training split has text{longer}: a tokenizer can't be trained")
    # The trainer makes all of them special, and the name of a special token in a text is encoded as plain text.
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"] not in added_tokens
    names = {f"{role}_token": token for role, token in special_tokens.items()}
    trained = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)), **names)
    # The library in Rust raises bare Exceptions, as on a full disk.
    with user_errors(f"{folder}: can't be written", Exception), atomic_path(folder) as partial:
        trained.save_pretrained(partial)
    return TrainedTokenizer(tokenizer.get_vocab_size(), read["documents"], read["bytes"], marks)


def _share_of_marks(config: ConvertConfig, layouts: list[FileLayout]) -> float | None:
    """Return the share of combining marks that occur within words, of the characters of a sample; None if there are few."""
    documents = (each for each in sample_documents(config, layouts) if isinstance(each, Document))
    characters = Counter(character for each in documents for character in each.text[:_SAMPLED_CHARACTERS])
    marks = [each for each in characters if unicodedata.category(each)[0] == "M" and not _WITHOUT_SPACES.match(each)]
    share = sum(characters[mark] for mark in marks) / max(characters.total(), 1)
    return share if share >= _MUCH_MARKED else None


def _require_free(folder: Path, force: bool) -> None:
    if is_free(folder):
        return
    if not (folder / "tokenizer.json").is_file():
        raise UserError(f"{folder}: exists and is not a tokenizer folder: choose another folder")
    if not force:
        problem = "already holds a tokenizer, with which data may have been converted"
        raise UserError(f"{folder}: {problem}: add --force to replace it")


def _training_text(
    config: ConvertConfig, files: list[SourceFile], validation_end: int, max_bytes: int | None, read: Counter[str]
) -> Iterator[str]:
    stored, so_far = sum(file.bytes for file in files) or 1, 0
    with tqdm(desc="reading text", unit="B", unit_scale=True) as progress:
        for file in read_ahead(files):
            # The file's share of the limit, plus what earlier files did not use of theirs.
            so_far += file.bytes
            limit = None if max_bytes is None else max_bytes * so_far // stored
            for document in read_up_to_damage(file, config, []):
                if not isinstance(document, Document) or document_number(document.id) < validation_end:
                    continue
                size = len(document.text.encode("utf-8", "surrogatepass"))
                if limit is not None and read["bytes"] + size > limit:
                    break
                read.update(documents=1, bytes=size)
                progress.update(size)
                yield document.text
