"""Each mark of docs/comparison.md links to a file at a commit or a release."""

from __future__ import annotations

import re

from helpers.documented_commands import ROOT


def test_each_mark_names_the_file_that_it_was_read_from() -> None:
    text = (ROOT / "docs" / "comparison.md").read_text()
    sources = dict(re.findall(r"^\[([a-z]-[a-z]+)\]: (\S+)$", text, re.MULTILINE))
    rows = [line.strip("|").split("|") for line in text.splitlines() if re.match(r"\| \w", line)]
    marks = [(row[0].strip(), cell.strip()) for row in rows for cell in row[1:]]
    assert len(marks) > 150 and all(len(row) == 7 for row in rows)
    without = [mark for mark in marks if not re.search(r"\]\[[a-z]-[a-z]+\]", mark[1])]
    # Biphasic's own gaps and its date, and what was not read.
    assert without == [
        ("published models trained with it", "**none yet**"),
        ("run on GPUs by its authors", "**no**"),
        ("CI", "not read"),
        ("date of the newest commit seen", "2026-11-22"),
    ]
    for name in {name for _, cell in marks for name in re.findall(r"\]\[([a-z]-[a-z]+)\]", cell)}:
        address = sources[name]
        pinned = re.search(r"/(?:blob|tree|commit)/(?:[0-9a-f]{40}|v\d+\.\d+\.\d+)(?:/|$)", address)
        assert pinned or (ROOT / "docs" / address).exists(), address
    assert set(sources) == set(re.findall(r"\]\[([a-z]-[a-z]+)\]", text))
