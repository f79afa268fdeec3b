#!/usr/bin/env bash
# datasets 5.2.0, ClassLabel: a text that is none of the names becomes the class of that number, if there is one.
#
# Expected: a column of stars as text, cast to ClassLabel(names=["1", "2", "3", "4", "5"]), raises a ValueError at "0", as it does at "6".
# Seen: "0" becomes 0, the class of "1": [0, 0, 4] for "0", "1", "5". Reviews with no star are trained and scored as those with one.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" datasets==5.2.0
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check datasets==5.2.0
fi
cat >"$work/stars.py" <<'PYTHON'
import sys

import datasets
from datasets import ClassLabel, Dataset

stars = ClassLabel(names=["1", "2", "3", "4", "5"])


def cast(*texts: str) -> object:
    try:
        return list(Dataset.from_dict({"stars": list(texts)}).cast_column("stars", stars)["stars"])
    except ValueError as error:
        return f"ValueError: {error}"


seen = {texts: cast(*texts) for texts in (("1", "5"), ("6",), ("0", "1", "5"))}
print("datasets", datasets.__version__)
print("expected: [0, 4] for the names 1 and 5, and a ValueError for 6 and for 0")
for texts, result in seen.items():
    print("seen:", ", ".join(texts), "->", result)
*others, with_zero = seen.values()
sys.exit(others[0] != [0, 4] or "ValueError" not in str(others[1]) or with_zero != [0, 0, 4])
PYTHON
HF_HOME="$work/cache" HF_DATASETS_DISABLE_PROGRESS_BARS=1 "$work/venv/bin/python" "$work/stars.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
