"""Write the reference of all keys as the pages of docs/reference."""

from __future__ import annotations

from biphasic.config.jobs import JOBS
from biphasic.config.reference import KeySection, description_of_job, sections_of


def page(job: str) -> str:
    """Return a job's reference page as Markdown."""
    top, *inner = sections_of(job)
    lines = [f"# Keys of `job: {job}`", "", description_of_job(top.description), "", *_table(top)]
    for section in inner:
        lines += ["", f"## {section.title}", "", section.description, "", *_table(section)]
    lines += ["", "Written by `biphasic keys --write docs/reference` from the classes in `src/biphasic/config/`."]
    return "\n".join(lines) + "\n"


def _table(section: KeySection) -> list[str]:
    rows = [
        f"| `{key.name}` | {_cell(key.type)} | {_cell(key.default)} | {_cell(key.description)} |"
        for key in section.keys
    ]
    return ["| key | type | default | what it is |", "|-|-|-|-|", *rows]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def index_page() -> str:
    """Return the start page of the reference as Markdown."""
    rows = [f"| [`{job}`]({job}.md) | {description_of_job(sections_of(job)[0].description)} |" for job in JOBS]
    intro = [
        "# Reference: every key of every job",
        "",
        "How YAMLs are read, merged and overridden: [configuration](../configuration.md). In the terminal:",
        "`biphasic keys optimizer`, or `python src/main.py --keys optimizer`.",
        "",
        "| `job:` | |",
        "|-|-|",
    ]
    return "\n".join([*intro, *rows]) + "\n"


def pages() -> dict[str, str]:
    """Return the reference's pages by file name."""
    return {"README.md": index_page(), **{f"{job}.md": page(job) for job in JOBS}}
