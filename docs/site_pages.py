"""Add to the site what its pages link to elsewhere in the repository; used by mkdocs.yml.

The pages of docs/ link to `../src/…`, `../recipes/…` and the like, so that the links work on GitHub. MkDocs knows docs/
alone, so each linked file becomes a page below `files/`: Markdown as it is, other text in a code block, a folder as a list.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
IMAGES = {".png", ".svg", ".jpg"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".sbatch": "bash", ".toml": "toml", ".json": "json"}
# The target of [text](target) and of a definition, `[name]: target`.
LINK = re.compile(r"(?P<before>\]\(|^\[[^\]\n]+\]: +)(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?", re.MULTILINE)
CODE = re.compile(r"^(?P<fence> *(?:```+|~~~+)).*?^(?P=fence)|(?<!`)`[^`\n]+`", re.MULTILINE | re.DOTALL)
LIST_IN_PARAGRAPH = re.compile(r"<p>(?:(?!</p>).)*?\n((?:- |\d+\. )[^\n]*)", re.DOTALL)
# The file of the repository that each page shows, by the page's name on the site.
_sources: dict[str, Path] = {}
_log = logging.getLogger("mkdocs.hooks.site_pages")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace `reference/` in the navigation with the pages of that folder, or remove the entry if there are none."""
    pages = sorted(f"reference/{path.name}" for path in Path(config.docs_dir, "reference").glob("*.md"))
    config.nav = [
        {"Reference": pages} if item == {"Reference": "reference/"} else item
        for item in config.nav or []
        if pages or item != {"Reference": "reference/"}
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that pages link to, and those that these link to."""
    waiting = [ROOT / "README.md", *(ROOT / "docs" / file.src_uri for file in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        uri = site_uri(path)
        _sources[uri] = path
        if files.get_file_from_path(uri) is None:
            files.append(as_file(path, uri, config))
        if path.suffix == ".md":
            linked = linked_files(path)
            waiting += linked - seen
            seen |= linked
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Point links to the repository's files at their pages."""
    path = _sources.get(page.file.src_uri)
    if path is None or path.suffix != ".md":
        return markdown
    folder = posixpath.dirname(page.file.src_uri)
    code = [match.span() for match in CODE.finditer(markdown)]

    def rewritten(match: re.Match[str]) -> str:
        target = resolved(path, match["target"])
        if target is None or any(begin <= match.start() < end for begin, end in code):
            return match[0]
        return f"{match['before']}{posixpath.relpath(site_uri(target), folder or '.')}{match['anchor'] or ''}"

    return LINK.sub(rewritten, markdown)


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Warn of a list right after a line of text: GitHub begins a list there, and Python-Markdown does not."""
    for list_item in LIST_IN_PARAGRAPH.finditer(html):
        _log.warning("%s: a list needs an empty line before it: %r", page.file.src_uri, list_item[1])
    return html


def linked_files(path: Path) -> set[Path]:
    """The files and folders of the repository that a Markdown file links to."""
    targets = [match["target"] for match in LINK.finditer(CODE.sub("", path.read_text()))]
    return {linked for target in targets if (linked := resolved(path, target)) is not None}


def resolved(path: Path, target: str) -> Path | None:
    """What a link in the file `path` points to, or None if it is an address, or is missing (MkDocs reports that)."""
    if ":" in target or target.startswith("/"):
        return None
    linked = Path(os.path.normpath(path.parent / target))
    if not linked.is_relative_to(ROOT) or not linked.exists():
        return None
    readme = linked / "README.md"
    return readme if readme.exists() else linked


def site_uri(path: Path) -> str:
    """The site's name of a file of the repository; README is the first page."""
    if path == ROOT / "README.md":
        return "index.md"
    if path.is_relative_to(ROOT / "docs") and path.suffix in IMAGES | {".md"}:
        return path.relative_to(ROOT / "docs").as_posix()
    # MkDocs leaves out names that begin with a dot.
    uri = f"files/{path.relative_to(ROOT).as_posix()}".replace("/.", "/")
    return uri if path.suffix in IMAGES | {".md"} else f"{uri}.md"


def as_file(path: Path, uri: str, config: MkDocsConfig) -> File:
    """A file of the repository as a file of the site."""
    if path.suffix in IMAGES:
        return File.generated(config, uri, abs_src_path=str(path))
    if path.suffix == ".md":
        return File.generated(config, uri, content=path.read_text())
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        entries = sorted(entry for entry in path.iterdir() if entry.name[0] not in "._")
        body = "\n".join(f"- `{entry.name}{'/' if entry.is_dir() else ''}`" for entry in entries)
    else:
        # Five backticks: the file may contain a fence of its own.
        body = f"`````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n`````"
    # Sources stay out of the search: the pages explain them.
    head = f"---\ntitle: {name}\nsearch: {{exclude: true}}\n---\n"
    return File.generated(config, uri, content=f"{head}# {name}\n\n{body}\n")
