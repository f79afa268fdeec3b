"""The commands that the documentation prints, as a shell reads them.

Each page's commands run in bash, where every program is a function that only writes down how it was called: variables,
loops, quotes and line continuations are bash's own work. A program that is not known here is bash's "command not found".

What counts as a command:
- in Markdown: blocks that are indented by four spaces or fenced as `bash` or `sh`, and code within a line that begins
  with a program and has arguments. Every other fence names another language (`text` for layouts and output).
- in a YAML's comments: lines indented by five or more spaces after the `#`, and code between backticks.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
OURS = ("composer", "python", "biphasic", "make")
# What the tests can't start, and what it would need. The files that such a command names are still checked.
EXTERNAL = {
    "docker": "a Docker daemon",
    "grep": "another environment",
    "hf": "the hub",
    "kubectl": "a Kubernetes cluster",
    "kubernetes-validate": "a tool that is no dependency",
    "ls": "the files of a run",
    "mcli": "MosaicML's platform",
    "pip": "another environment",
    "ray": "a cluster",
    "sbatch": "Slurm",
    "shellcheck": "a tool that is no dependency",
    "sky": "a cloud",
    "source": "the installed environment",
    "srun": "Slurm",
    "uv": "another environment",
    ".venv/bin/uv": "another environment",
}
_FENCE = re.compile(r"^ *(`{3,})(\S*)[^`]*$")
_INLINE = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")


@dataclass(frozen=True)
class Call:
    """A started program: the page's line, the words, and the BUCKET of that moment."""

    line: int
    bucket: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"line {self.line}: {' '.join(self.words)}"


def pages() -> list[Path]:
    """Every page with commands: Markdown, and YAMLs for their comments."""
    markdown = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    markdown += (ROOT / "recipes").rglob("*.md")
    return sorted(markdown) + sorted([*(ROOT / "yamls").rglob("*.yaml"), *(ROOT / "recipes").rglob("*.yaml")])


def calls(page: Path, folder: Path) -> list[Call]:
    """Run the page's commands without their programs.

    Args:
        page: Markdown or YAML.
        folder: an empty folder, in which bash runs.

    Raises:
        AssertionError: bash can't read a command, or doesn't know its program.
    """
    text = page.read_text(encoding="utf-8")
    commands = markdown_commands(text) if page.suffix == ".md" else comment_commands(text)
    for script in [*ROOT.glob("recipes/*/*.sh"), ROOT / ".venv/bin/uv"]:
        stand_in = folder / script.relative_to(ROOT)
        stand_in.parent.mkdir(parents=True, exist_ok=True)
        stand_in.write_text(f'#!/bin/bash\n{_RECORD}\nrecord "$0" "$@"\n')
        stand_in.chmod(0o755)
    functions = "".join(f'{name}() {{ record {name} "$@"; }}\n' for name in (*OURS, *EXTERNAL) if "/" not in name)
    script = f"{_RECORD}\n{functions}PATH=/nowhere\nset -e\n"
    script += "".join(f"export LINE={line}\n{expand(command)}\n" for line, command in commands)
    run = subprocess.run(
        ["/bin/bash", "--noprofile", "--norc", "-c", script],
        cwd=folder, env={"RECORDS": str(folder / "records"), "LC_ALL": "C.UTF-8"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    name = page.relative_to(ROOT)
    assert not run.returncode and not run.stderr, f"{name}: bash can't run its commands: {run.stderr}"
    records = folder / "records"
    if not records.exists():
        return []
    found = []
    for record in records.read_text(encoding="utf-8").split("\0\n\0")[:-1]:
        line, bucket, *words = record.split("\0")
        found.append(Call(int(line), bucket, tuple(words)))
    return found


_RECORD = """record() { printf '%s\\0' "$LINE" "${BUCKET-}" "$@" >>"$RECORDS"; printf '\\n\\0' >>"$RECORDS"; }"""


def markdown_commands(text: str) -> list[tuple[int, str]]:
    """The page's shell text, with line numbers, in the page's order: whole blocks, and code within lines."""
    lines, commands, at = text.split("\n"), list[tuple[int, str]](), 0
    prose = list(lines)
    while at < len(lines):
        end = at + 1
        if fence := _FENCE.match(lines[at]):
            while not lines[end].strip().startswith(fence[1]):
                end += 1
            assert fence[2], f"line {at + 1}: a fence without a language: `bash` for commands, `text` for other text"
            if fence[2] in ("bash", "sh"):
                commands.append((at + 2, "\n".join(lines[at + 1 : end])))
            end += 1
        elif lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            block = "\n".join(line.strip() if line.strip() == "END" else line for line in lines[at:end])
            commands.append((at + 1, block))
        else:
            at = end
            continue
        prose[at:end] = [""] * (end - at)
        at = end
    commands += inline_commands("\n".join(prose))
    return sorted(commands)


def comment_commands(text: str) -> list[tuple[int, str]]:
    """The commands in the comments of a YAML, with line numbers."""
    comments = [line if line.startswith("#") else "" for line in text.split("\n")]
    commands, at = list[tuple[int, str]](), 0
    while at < len(comments):
        end = at
        while end < len(comments) and re.match(r"# {5,}\S", comments[end]):
            end += 1
        if end > at:
            commands.append((at + 1, "\n".join(line[1:] for line in comments[at:end])))
        at = max(end, at + 1)
    return sorted(commands + inline_commands("\n".join(line.removeprefix("#") for line in comments)))


def inline_commands(prose: str) -> list[tuple[int, str]]:
    """Code between backticks that begins with a program and has arguments."""
    found = []
    for match in _INLINE.finditer(prose):
        command = " ".join(match[1].split())
        program, _, arguments = command.partition(" ")
        known = program in OURS or program in EXTERNAL or re.fullmatch(r"recipes/\S+\.sh", program)
        if known and arguments:
            found.append((prose.count("\n", 0, match.start()) + 1, command))
    return found


def expand(command: str) -> str:
    """Write out the notation of usage lines: `[--option]`, `[key=value ...]`, `one|another`, `N`, `<words>` and `…`."""
    command = command.replace("[key=value ...]", "")
    command = re.sub(r"(?<!: )\[(-[^][,]*)\]", r"\1", command)  # not YAML's `key: [-…]`
    command = re.sub(r"(?<= )N\b", "1", command)
    command = re.sub(r"<[a-z][^<>\n]*>", "VALUE", command)
    command = re.sub(r"(?<= )… ", "", command)
    if alternatives := re.search(r"(?<= )[a-z]+(?:\|[a-z]+)+", command):
        begin, end = alternatives.span()
        return "\n".join(expand(command[:begin] + word + command[end:]) for word in alternatives[0].split("|"))
    return command
