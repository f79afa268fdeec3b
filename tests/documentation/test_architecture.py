"""docs/architecture.md shows the layers that import-linter checks."""

import re
import tomllib

from helpers.tiny import ROOT


def test_the_page_lists_the_layers_of_the_import_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = next(each for each in settings["tool"]["importlinter"]["contracts"] if each["type"] == "layers")
    layers = [set(re.split(" [|:] ", layer)) for layer in contract["layers"] if not layer.startswith("__main__")]
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    shown = re.search(r"```text\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    assert [set(line.split(" | ")) for line in shown[1].splitlines()] == layers
