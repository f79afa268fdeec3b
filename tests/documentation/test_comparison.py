"""Each source of docs/comparison.md is a file at a commit or a release, or a page beside it, and is used."""

import re

from helpers.documented_commands import ROOT


def test_sources_are_pinned_and_used() -> None:
    text = (ROOT / "docs" / "comparison.md").read_text()
    sources = dict(re.findall(r"^\[([a-z]-[a-z]+)\]: (\S+)$", text, re.MULTILINE))
    assert sources.keys() == set(re.findall(r"\]\[([a-z]-[a-z]+)\]", text))
    pinned = re.compile(r"/(?:blob|tree|commit)/(?:[0-9a-f]{40}|v\d+\.\d+\.\d+)(?:/|$)")
    assert [url for url in sources.values() if not pinned.search(url) and not (ROOT / "docs" / url).exists()] == []
