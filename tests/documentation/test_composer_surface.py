"""What Biphasic takes from Composer is the list in docs/versions.md."""

import ast
import re

from helpers.tiny import ROOT


def imported() -> set[str]:
    """Names that `src/` imports from Composer."""
    nodes = [node for path in (ROOT / "src").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    assert not [name for node in nodes if isinstance(node, ast.Import) for name in node.names if name.name == "composer"]
    modules = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("composer")]
    return {name.name for node in modules for name in node.names}


def test_the_names_are_listed() -> None:
    section = (ROOT / "docs" / "versions.md").read_text().partition("## Leaving Composer")[2]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", " ".join(cells))) == imported()
