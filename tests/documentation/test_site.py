"""The site that `make docs` builds needs no other host, and shows every page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.documented_commands import ROOT

# What a browser loads with a page: not the links that a reader follows.
LOADED = re.compile(r'<(?:script|link|img|iframe|source)\b[^>]*?\s(?:src|href)="([^"]+)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_pages_load_only_files_of_the_site(site: Path) -> None:
    loaded = {page: LOADED.findall(page.read_text()) for page in site.rglob("*.html") if page.name != "404.html"}
    assert any(address.endswith(".png") for address in loaded[site / "results.html"])
    missing = {
        (page.relative_to(site).as_posix(), address)
        for page, addresses in loaded.items()
        for address in addresses
        if not (page.parent / address).is_file()
    }
    assert missing == set()


def test_the_navigation_names_every_page(site: Path) -> None:
    start = (site / "index.html").read_text()
    titles = re.findall(r"^ {6}- ([^:\n]+): [\w/]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert "The study" in titles
    named = {name.strip() for name in re.findall(r'<span class="md-ellipsis">\s*([^<]+?)\s*<', start)}
    assert [title for title in titles if title not in named] == []
