"""Train a byte-level BPE tokenizer on the text of a conversion's training split: before the conversion itself.

The text is the source of the job: convert YAML, read as `biphasic convert` reads it. docs/tokenizer.md explains the options.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from biphasic.commands.parser import add_file, positive
from biphasic.errors import UserError

_SIZE = 32_768


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `biphasic tokenizer`."""
    add_file(parser, "job: convert")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder to write; default: the YAML's tokenizer")
    parser.add_argument(
        "--size", type=positive, default=_SIZE, metavar="N", help=f"tokens, special ones included; default: {_SIZE:,}"
    )
    parser.add_argument(
        "--special", action="append", default=[], metavar="ROLE=TOKEN",
        help="the special token of a role (pad, bos, eos, mask, unk, cls, sep), e.g. mask=<mask>; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--add", action="append", default=[], metavar="TOKEN", help="a further token that is never split; repeatable"
    )
    parser.add_argument("--max-text", metavar="SIZE", help="text to read at most, e.g. 1gb: from each file its share")
    parser.add_argument("--force", action="store_true", help="replace an earlier tokenizer")


def run(options: argparse.Namespace) -> int:
    """Train, print what was written, and return the exit status."""
    from biphasic.amounts import format_bytes
    from biphasic.config.convert import ConvertConfig
    from biphasic.config.load import load_job

    config = load_job(ConvertConfig, options.file, options.overrides)
    special_tokens, max_bytes = _special_tokens(options.special), _bytes(options.max_text)
    folder = options.out or _folder(config.tokenizer)
    from biphasic.conversion.train_tokenizer import train_tokenizer

    trained = train_tokenizer(
        config, folder, size=options.size, special_tokens=special_tokens, added_tokens=tuple(options.add),
        max_bytes=max_bytes, force=options.force,
    )  # fmt: skip
    print(f"{folder}: {trained.tokens:,} tokens, trained on {trained.documents:,} documents, "
          f"{format_bytes(trained.text_bytes)} of text")  # fmt: skip
    if trained.tokens < options.size:
        print(f"the text has no more pairs to merge: {trained.tokens:,} tokens instead of {options.size:,}")
    override = [] if str(folder) == config.tokenizer else [f"tokenizer={folder}"]
    print(f"next: {shlex.join(['biphasic', 'convert', options.file, *options.overrides, *override])}")
    return 0


def _folder(tokenizer: str) -> Path:
    from biphasic.storage import is_remote

    folder = Path(tokenizer)
    # A hub id has one slash, as EuroBERT/EuroBERT-210m.
    is_hub_id = len(folder.parts) == 2 and not tokenizer.startswith(".") and not folder.parent.exists()
    if is_remote(tokenizer) or is_hub_id:
        raise UserError(f"tokenizer: {tokenizer} is no folder on this machine: name the folder to write with --out")
    return folder


def _special_tokens(pairs: list[str]) -> dict[str, str]:
    from biphasic.conversion.train_tokenizer import ROLES, SPECIAL_TOKENS

    tokens = dict(SPECIAL_TOKENS)
    for pair in pairs:
        role, equals, token = pair.partition("=")
        if role not in ROLES or not equals or not token:
            raise UserError(f"--special: expected ROLE=TOKEN with a role of {', '.join(ROLES)}; got {pair!r}")
        tokens[role] = token
    return tokens


def _bytes(text: str | None) -> int | None:
    if text is None:
        return None
    from biphasic.config.base import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise UserError(f"--max-text: {error}") from None
