"""Draw docs/architecture.svg: the packages of src/biphasic in layers, with arrows for the imports between them.

python docs/draw_architecture.py

The layers are those of `[tool.importlinter]` in pyproject.toml, which `make lint` enforces. An import that others imply
(a imports b, b imports c, a imports c) has no arrow, and neither have imports of the foundation.
"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams.update({"svg.hashsalt": "biphasic", "svg.fonttype": "none", "font.family": "sans-serif"})
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch  # noqa: E402

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "biphasic"
FOUNDATION = {"config", "storage", "versions", "amounts", "grouping", "quiet", "errors", "workers", "faults"}
"""Imported from everywhere."""


def layers() -> list[list[str]]:
    """The package's layers from top to bottom, as the import rule names them."""
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rule = next(rule for rule in rules if rule["type"] == "layers")
    return [[name.strip() for name in layer.replace(":", "|").split("|")] for layer in rule["layers"]]


def imports() -> set[tuple[str, str]]:
    """List which package or top-level module imports which other one."""
    edges: set[tuple[str, str]] = set()
    for path in PACKAGE.rglob("*.py"):
        source = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        targets = {
            node.module.split(".")[1]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("biphasic.")
        }
        edges.update((source, target) for target in targets - {source})
    return edges


def lines(name: str) -> int:
    """Lines of Python in a package or module."""
    paths = (PACKAGE / name).rglob("*.py") if (PACKAGE / name).is_dir() else [PACKAGE / f"{name}.py"]
    return sum(len(path.read_text().splitlines()) for path in paths)


def reduce(edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Remove every edge that a longer path implies."""
    below: dict[str, set[str]] = {source: {target for start, target in edges if start == source} for source, _ in edges}

    def reachable(name: str) -> set[str]:
        return below.get(name, set()).union(*(reachable(target) for target in below.get(name, set())))

    implied = {(source, far) for source, target in edges for far in reachable(target)}
    return edges - implied


def draw(target: Path) -> None:
    """Write the picture to `target`."""
    rows = layers()
    figure, axes = plt.subplots(figsize=(7, 0.72 * len(rows)))
    centers = {}
    for depth, row in enumerate(rows):
        for place, name in enumerate(row):
            x, y = (place + 0.5) / len(row) * 8, -depth
            centers[name] = (x, y)
            color = "#f3f3f3" if name in FOUNDATION else "#e8eff9"
            box = FancyBboxPatch((x - 0.8, y - 0.24), 1.6, 0.48, "round,pad=0.04", fc=color, ec="#3b5b8c", zorder=2)
            axes.add_patch(box)
            axes.text(x, y + 0.07, name, ha="center", va="center", fontsize=9, zorder=3)
            axes.text(
                x, y - 0.15, f"{lines(name):,} lines", ha="center", va="center", fontsize=6, color="#555", zorder=3
            )
    edges = {edge for edge in imports() if set(edge) <= set(centers) - FOUNDATION}
    for source, imported in sorted(reduce(edges)):
        (x0, y0), (x1, y1) = centers[source], centers[imported]
        bend = 0.25 if x0 == x1 and y0 - y1 > 1 else 0.0
        start, end = ((x0, y0 - 0.28), (x1, y1 + 0.28)) if y0 != y1 else ((x0 - 0.85, y0), (x1 + 0.85, y1))
        arrow = FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=9, connectionstyle=f"arc3,rad={bend}", lw=0.9, color="#3b5b8c"
        )
        axes.add_patch(arrow)
    axes.set(xlim=(0, 8), ylim=(-len(rows) + 0.5, 0.5))
    axes.axis("off")
    figure.savefig(target, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    draw(ROOT / "docs" / "architecture.svg")
