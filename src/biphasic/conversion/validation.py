"""Decide which documents of a text are for validation, before the conversion."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from biphasic.config.convert import ConvertConfig
from biphasic.conversion.reading import Document, Skipped, read_documents
from biphasic.conversion.source_files import TEXT_KINDS, DamagedFileError, kind_of
from biphasic.conversion.sources import FileLayout
from biphasic.data.packing import document_number, validation_end
from biphasic.errors import UserError

_COUNTED_ENTRIES, _COUNTED_BYTES = 10_000, 1 << 24
"""A text of at most this many entries and bytes is read to its end, to count its documents."""


class ValidationDraw(NamedTuple):
    """Documents whose `document_number` is below `end` are for validation. `description` says how many they are."""

    end: int
    description: str


def draw_validation(config: ConvertConfig, layouts: list[FileLayout]) -> ValidationDraw:
    """Choose the validation documents of a text so that each split has a document.

    They are those whose number (a hash of the id) is below `validation_fraction` of all 64-bit numbers. If none is, the
    document with the smallest number is for validation; if all are, the one with the largest number is for training.
    The text is read until each split has a document: about 1 / `validation_fraction` documents. With `max_tokens`, documents
    count while their bytes, of which a token has at least one, are fewer. The result depends only on the configuration
    and the text. Raises a UserError if there is no document, only one, or all have the same id.
    """
    share, end = config.validation_fraction, validation_end(config.validation_fraction)
    if not share:
        return ValidationDraw(end, "no documents")
    numbers, chosen, size, limited = list[int](), 0, 0, ""
    first_skipped: Skipped | None = None
    for read, entry in enumerate(_entries(config, layouts)):
        if 0 < chosen < len(numbers) and (read >= _COUNTED_ENTRIES or size >= _COUNTED_BYTES):
            rows = sum(sum(layout.rows) for layout in layouts)
            is_counted = not config.filters and all(layout.rows or layout.fault for layout in layouts)
            count = f"{share * rows:,.0f} of {rows:,}" if is_counted else f"{100 * share:g}% of the"
            return ValidationDraw(end, f"about {count} documents")
        if config.max_tokens is not None and size >= config.max_tokens and len(numbers) > 1 and not chosen:
            limited = " up to max_tokens"
            break
        if isinstance(entry, Document):
            numbers.append(document_number(entry.id))
            chosen, size = chosen + (numbers[-1] < end), size + len(entry.text.encode())
        else:
            first_skipped = first_skipped or entry
    if first_skipped and not numbers:
        reason = f"{first_skipped.where} {first_skipped.reason or 'is left out by filters'}"
        raise UserError(f"source: nothing in it is a document: {reason}, and so on; set text_column or filters")
    if not numbers:  # all files are damaged, which the conversion reports
        return ValidationDraw(end, "no documents")
    if min(numbers) == max(numbers):
        problem, advice = f"all {len(numbers):,} documents have the same id or text", "add documents"
        if len(numbers) == 1:
            problem = "the text is one document"
            if any(kind_of(layout.file.path) in TEXT_KINDS for layout in layouts):
                advice = "set source.text_files=paragraph (or line) to make each a document"
        raise UserError(
            f"source: {problem}, which can't be in train/ and validation/: {advice}, or set validation_fraction=0"
        )
    end = min(max(end, min(numbers) + 1), max(numbers))
    return ValidationDraw(end, f"{sum(number < end for number in numbers):,} of {len(numbers):,} documents{limited}")


def _entries(config: ConvertConfig, layouts: list[FileLayout]) -> Iterator[Document | Skipped]:
    for layout in layouts:
        # The conversion reports damaged files.
        with suppress(DamagedFileError):
            yield from read_documents(layout.file, config) if layout.fault is None else ()
