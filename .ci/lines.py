"""Print the lines of each package of src/biphasic beside its budget in pyproject.toml, and fail above it: `make lint`."""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGETS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["biphasic"]["lines"]
lines: dict[str, int] = {}
for file in (ROOT / "src" / "biphasic").rglob("*.py"):
    parts = file.relative_to(ROOT / "src" / "biphasic").parts
    package = parts[0] if len(parts) > 1 else "top"
    lines[package] = lines.get(package, 0) + len(file.read_text(encoding="utf-8").splitlines())
for package in sorted({*lines, *BUDGETS}):
    print(f"{package:14} {lines.get(package, 0):6,} of {BUDGETS.get(package, 0):6,}")
print(f"{'all':14} {sum(lines.values()):6,} of {sum(BUDGETS.values()):6,}")
above = [package for package, count in sorted(lines.items()) if count > BUDGETS.get(package, 0)]
if above:
    sys.exit(f"more lines than [tool.biphasic.lines] allows: {', '.join(above)}. Remove some, or raise a budget on purpose")
