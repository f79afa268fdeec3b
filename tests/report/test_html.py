"""`report.html`: one file with the text, the tables and the pictures of a sweep's or a study's report."""

import re
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path

import pytest

from biphasic.commands import main
from biphasic.report.formatting import html_page
from biphasic.storage import open_store
from biphasic.sweep.records import write_grid, write_record
from helpers.studies import write_study
from helpers.sweeps import grid_of, records_of

NAME = "a<i>&b"
"""A name that would be markup if it were not escaped."""
EMPTY_TAGS = ("meta", "img")


class Page(HTMLParser):
    """An HTML page's tags and text. Fails if a tag is not closed."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in EMPTY_TAGS:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def write_sweep_report(folder: Path) -> None:
    grid = grid_of(models=("a", NAME))
    store = open_store(str(folder))
    write_grid(store, grid)
    for record in records_of(grid, lambda cell, _: (cell.lr, 0.5 + 0.01 * cell.seed)).values():
        write_record(store, record)


def write_study_report(folder: Path) -> None:
    write_study(folder)
    (folder / NAME).mkdir()
    (folder / NAME / "config.yaml").write_text("a: [")  # the report names the file among those it doesn't use


@pytest.mark.parametrize(("write", "pictures"), [(write_sweep_report, 1), (write_study_report, 7)])
def test_a_report_is_one_file(write, pictures: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    # Of several folders, none is left out in silence.
    assert main(["report", str(tmp_path), str(tmp_path / "absent")]) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'absent'}: is not a folder here\n"
    assert main(["report", str(tmp_path)]) == 0
    assert f"{tmp_path}/report/report.html" in capsys.readouterr().out.splitlines()
    folder = tmp_path / "report"
    content = (folder / "report.html").read_text(encoding="utf-8")
    page = Page(content)

    names = re.findall(r"!\[.*\]\((.*)\)", (folder / "report.md").read_text(encoding="utf-8"))
    sources = [attributes["src"] or "" for tag, attributes in page.tags if tag == "img"]
    assert len(names) == len(sources) == pictures
    for name, source in zip(names, sources, strict=True):
        assert b64decode(source.removeprefix("data:image/png;base64,")) == (folder / name).read_bytes()
    assert "http" not in content and "url(" not in content and not {"script", "link"} & {tag for tag, _ in page.tags}

    assert NAME in page.text and "i" not in {tag for tag, _ in page.tags}
    for text in ("Points (100 times the score)", "95% interval"):
        assert text.lower() in page.text.lower()
    tables = sum(len(re.findall(r"^\| - ", file.read_text(), re.MULTILINE)) for file in folder.glob("*.md"))
    assert [tag for tag, _ in page.tags].count("table") == tables


def test_the_title_is_the_first_heading() -> None:
    page = html_page("# Sweep of <x> & y\n\n<script>alert(1)</script>\n", {}).decode()
    assert "<title>Sweep of &lt;x&gt; &amp; y</title>" in page and "<script" not in page
