"""Benchmark results as files: JSON for programs, Markdown for people, both with the machine they were measured on."""

from __future__ import annotations

import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Processor, cores that may be used, memory, and the versions that matter."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    packages = ("torch", "transformers", "tokenizers", "mosaicml", "mosaicml-streaming", "pyarrow", "ray")
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def save(
    name: str,
    title: str,
    command: str,
    header: list[str],
    rows: list[list[str]],
    numbers: dict[str, Any],
    note: str | None = None,
) -> str:
    """Write `results/NAME.json` and `results/NAME.md`; returns the Markdown.

    Args:
        name: of the files.
        title: the page's.
        command: that was run.
        header: the table's first line.
        rows: the table's others.
        numbers: everything measured, for the JSON.
        note: what was measured, a paragraph above the table.
    """
    about, date = machine(), datetime.now(UTC).date().isoformat()
    table = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    lines = [
        f"# {title}",
        "",
        f"`{command}`, {date}: " + ", ".join(f"{key} {value}" for key, value in about.items()),
        "",
    ]
    if note is not None:
        lines += [note, ""]
    text = "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in table)]) + "\n"
    RESULTS.mkdir(exist_ok=True)
    content = {"title": title, "command": command, "date": date, "machine": about, **numbers}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    return text
