"""The commands that the documentation prints, as a shell reads them.

Markdown is read by markdown-it. Each page's commands then run in bash, where every program is a function that only records
how it was called: variables, loops, quotes and line continuations are bash's own work. A program that is not known here is
bash's "command not found".

What counts as a command: code blocks (indented, or fenced as `bash` or `sh`), and inline code that begins with a program
and has arguments. A YAML's comments are read as Markdown too.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
OURS = ("composer", "python", "biphasic", "make")
# What the tests can't start, and what it would need. The files that such a command names are still checked.
EXTERNAL = {
    "docker": "a Docker daemon",
    "grep": "another environment",
    "hf": "the hub",
    "kubectl": "a Kubernetes cluster",
    "kubernetes-validate": "a tool outside the locked environment",
    "ls": "the files of a run",
    "mcli": "MosaicML's platform",
    "pip": "another environment",
    "python3": "another environment",
    "ray": "a cluster",
    "sbatch": "Slurm",
    "shellcheck": "a tool outside the locked environment",
    "sky": "a cloud",
    "source": "the installed environment",
    "srun": "Slurm",
    "touch": "another environment",
    "uv": "another environment",
    ".venv/bin/pip": "another environment",
    ".venv/bin/uv": "another environment",
}
_RECORD = r"""record() { printf '%s\0' "${BUCKET-}" "$@" >>"$RECORDS"; printf '\n\0' >>"$RECORDS"; }"""


@dataclass(frozen=True)
class Call:
    """A started program: its words, and the BUCKET of that moment."""

    bucket: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.words)


def pages() -> list[Path]:
    """Every page with commands: Markdown, and YAMLs for their comments."""
    markdown = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    markdown += (ROOT / "recipes").rglob("*.md")
    return sorted(markdown) + sorted([*(ROOT / "yamls").rglob("*.yaml"), *(ROOT / "recipes").rglob("*.yaml")])


def commands(page: Path) -> list[str]:
    """Return the page's shell text in its order: whole blocks, and inline code.

    Raises:
        AssertionError: a fence doesn't name its language.
    """
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".md":
        comments = [line.removeprefix("#") if line.startswith("#") else "" for line in text.split("\n")]
        # In Markdown, an indented block follows a blank line and is indented by at least four spaces.
        text = re.sub(r"(?m)^( ?\S.*)\n(?= {5})", r"\1\n\n", "\n".join(comments))
    found = list[str]()
    for token in MarkdownIt().parse(text):
        assert token.type != "fence" or token.info, f"a fence without a language: `bash` or `text`:\n{token.content}"
        if token.type == "code_block" or (token.type == "fence" and token.info in ("bash", "sh")):
            found.append(token.content)
        for child in token.children or []:
            program, _, arguments = child.content.partition(" ")
            known = program in OURS or program in EXTERNAL or re.fullmatch(r"recipes/\S+\.sh", program)
            if child.type == "code_inline" and known and arguments:
                found.append(child.content)
    return found


def calls(page: Path, folder: Path) -> list[Call]:
    """Run the page's commands without their programs.

    Args:
        page: Markdown or YAML.
        folder: an empty folder, in which bash runs.

    Raises:
        AssertionError: bash can't read a command, or doesn't know its program.
    """
    for script in [*ROOT.glob("recipes/*/*.sh"), ROOT / ".venv/bin/pip", ROOT / ".venv/bin/uv"]:
        stand_in = folder / script.relative_to(ROOT)
        stand_in.parent.mkdir(parents=True, exist_ok=True)
        stand_in.write_text(f'#!/bin/bash\n{_RECORD}\nrecord "$0" "$@"\n')
        stand_in.chmod(0o755)
    functions = "".join(f'{name}() {{ record {name} "$@"; }}\n' for name in (*OURS, *EXTERNAL) if "/" not in name)
    script = "\n".join([f"{_RECORD}\n{functions}PATH=/nowhere\nset -e", *commands(page)])
    records = folder / "records"
    records.touch()
    run = subprocess.run(
        ["/bin/bash", "--noprofile", "--norc", "-c", script],
        cwd=folder, env={"RECORDS": str(records), "LC_ALL": "C.UTF-8"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not run.returncode and not run.stderr, f"{page.name}: bash can't run its commands: {run.stderr}"
    found = [record.split("\0") for record in records.read_text(encoding="utf-8").split("\0\n\0")[:-1]]
    return [Call(bucket, tuple(words)) for bucket, *words in found]
