"""Decide which documents of a text are for validation, before the conversion."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from biphasic.config.convert import ConvertConfig
from biphasic.conversion.packing import document_number, validation_end
from biphasic.conversion.reading import TEXT_KINDS, DamagedFileError, Document, Skipped, kind_of, read_documents
from biphasic.conversion.sources import FileLayout
from biphasic.conversion.worker import boundary_tokens, encode_texts
from biphasic.data.tokenizer import Tokenizer
from biphasic.errors import UserError

_COUNTED_ENTRIES, _COUNTED_CHARACTERS = 10_000, 1 << 24
"""A text of at most this many entries and characters is read to its end, to count its documents."""


class ValidationDraw(NamedTuple):
    """Documents whose `document_number` is below `end` are for validation. `description` says how many they are."""

    end: int
    description: str


def draw_validation(
    config: ConvertConfig, layouts: list[FileLayout], tokenizer: Tokenizer | None = None
) -> ValidationDraw:
    """Choose the validation documents of a text so that each split has a document.

    They are those whose number (a hash of the id) is below `validation_fraction` of all 64-bit numbers. If none is, the
    document with the smallest number is for validation; if all are, the one with the largest number is for training.
    The text is read until each split has a document: about 1 / `validation_fraction` documents. With `max_tokens` and a
    tokenizer, it is read as far as the limit. The result depends only on the configuration and the text.

    Raises a UserError if there is no document, only one, or all have the same id.
    """
    share, end = config.validation_fraction, validation_end(config.validation_fraction)
    documents = chosen = copies = characters = tokens = 0
    smallest, largest, limited = 1 << 64, -1, False
    first_skipped: Skipped | None = None
    for read, entry in enumerate(_entries(config, layouts) if share else ()):
        divided = 0 < chosen < documents
        if divided and (config.max_tokens or read >= _COUNTED_ENTRIES or characters >= _COUNTED_CHARACTERS):
            rows = sum(sum(layout.rows) for layout in layouts)
            counted = all(layout.rows or layout.fault for layout in layouts)
            counted = counted and not (config.filters or config.max_tokens)
            number = f"{share * rows:,.0f} of {rows:,}" if counted else f"{100 * share:g}% of the"
            return ValidationDraw(end, f"about {number} documents")
        if not isinstance(entry, Document):
            first_skipped = first_skipped or entry
            continue
        number = document_number(entry.id)
        documents, chosen, characters = documents + 1, chosen + (number < end), characters + len(entry.text)
        copies = copies + (number == smallest) if number >= smallest else 1
        smallest, largest = min(smallest, number), max(largest, number)
        if config.max_tokens and tokenizer and number >= end:
            tokens += sum(map(len, [*boundary_tokens(config, tokenizer), *encode_texts(tokenizer, [entry.text])]))
            if limited := tokens >= config.max_tokens and not chosen:
                break
    if not documents and first_skipped:
        reason = first_skipped.reason or "is left out by filters"
        raise UserError(f"source: nothing in it is a document: {first_skipped.where} {reason}, and so on; "
                        "set text_column or filters")  # fmt: skip
    if documents and smallest == largest:
        raise UserError(_undivided(config, layouts, documents, limited))
    text = f"{documents:,} documents" + " up to max_tokens" * limited
    if documents and not chosen:
        reason = f"by the smallest hash of the id, since validation_fraction {share:g} draws none"
        return ValidationDraw(smallest + 1, f"{copies:,} of {text}, {reason}")
    if documents and chosen == documents:
        reason = f"but the one with the largest hash of the id, since validation_fraction {share:g} draws all"
        return ValidationDraw(largest, f"all of {text} {reason}")
    return ValidationDraw(end, f"{chosen:,} of {text}")


def _entries(config: ConvertConfig, layouts: list[FileLayout]) -> Iterator[Document | Skipped]:
    for layout in layouts:
        # The conversion reports damaged files.
        with suppress(DamagedFileError):
            yield from read_documents(layout.file, config) if layout.fault is None else ()


def _undivided(config: ConvertConfig, layouts: list[FileLayout], documents: int, limited: bool) -> str:
    if limited:
        problem, advice = "max_tokens is reached in the first document", "raise max_tokens"
    elif documents > 1:
        problem, advice = f"all {documents:,} documents have the same id or text", "add documents"
    else:
        is_text = any(kind_of(layout.file.path) in TEXT_KINDS for layout in layouts)
        advice = "set source.text_files=paragraph (or line) to make each a document" if is_text else "add documents"
        problem = "the text is one document"
    return f"source: {problem}, which can't be in train/ and validation/: {advice}, or set validation_fraction=0"
