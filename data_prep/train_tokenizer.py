"""Train a byte-level BPE tokenizer on the text of a conversion's training split: before the conversion itself.

python data_prep/train_tokenizer.py FILE.yaml [--words 8192]

Byte-level, so that no text needs an unknown token. The text is the source of the `job: convert` YAML, and the result is
written to the folder that the YAML names as its tokenizer.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from biphasic.config.convert import ConvertConfig, FilesSource
from biphasic.config.load import load
from biphasic.errors import ConfigError, UserError

WORDS = 8192
SPECIAL = {"pad": "<|pad|>", "bos": "<|bos|>", "eos": "<|eos|>", "mask": "<|mask|>"}


def train_tokenizer(config: ConvertConfig, words: int = WORDS) -> Path:
    """Train on the documents that `config` converts into the training split, and save to `config.tokenizer`.

    Args:
        config: a conversion from files.
        words: size of the vocabulary, the four special tokens and the 256 bytes included.

    Returns:
        The Hugging Face tokenizer folder.

    Raises:
        UserError: the source can't be read.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if not isinstance(config.source, FilesSource):
        raise UserError("source: a tokenizer is trained on files; expected kind: files")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=words,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(_training_texts(config, config.source), trainer)
    folder = Path(config.tokenizer)
    partial = folder.with_name(f"{folder.name}.partial")
    names = {f"{role}_token": token for role, token in SPECIAL.items()}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


def _training_texts(config: ConvertConfig, source: FilesSource) -> Iterator[str]:
    """The texts of the training split."""
    from tqdm import tqdm

    from biphasic.conversion.packing import document_number, in_validation
    from biphasic.conversion.reading import Document, ReadOptions, read_documents
    from biphasic.conversion.sources import find_files

    options = ReadOptions.from_config(config)
    entries = chain.from_iterable(read_documents(file, options) for file in find_files(source))
    for document in tqdm(entries, desc="tokenizer's text", unit="doc"):
        if not isinstance(document, Document):
            continue
        if not in_validation(document_number(document.id), config.validation_fraction):
            yield document.text


def main(arguments: list[str] | None = None) -> int:
    """Train, and print the tokenizer's folder."""
    parser = argparse.ArgumentParser(description="Train a byte-level BPE tokenizer on a conversion's training text.")
    parser.add_argument("config", type=Path, help="a job: convert YAML")
    parser.add_argument("--words", type=int, default=WORDS, help="size of the vocabulary")
    options = parser.parse_args(arguments)
    try:
        config = load(options.config)
        if not isinstance(config, ConvertConfig):
            raise UserError(f"{options.config}: expected job: convert")
        folder = train_tokenizer(config, options.words)
    except (ConfigError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{folder}: {options.words:,} words")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
