#!/usr/bin/env bash
# datasets 5.2.0, pyarrow 26.0.1: a dataset made from rows has the columns of its first row; those of other rows are left out.
#
# Expected: all columns that occur in a row, with nulls where a row has none, as pandas makes them; or an error.
# Seen: Dataset.from_list and pyarrow's Table.from_pylist take the keys of the first row. Here the second and third of three training pairs
# have a hard negative, and the third a score: neither column exists, and a loss that uses negatives where there are some trains
# without any. Nothing warns. With the rows in reverse order all columns exist.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(datasets==5.2.0 pyarrow==26.0.1 pandas==2.3.3 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/rows.py" <<'PYTHON'
import sys

import datasets
import pandas
import pyarrow

rows = [
    {"query": "a", "passage": "b"},
    {"query": "c", "passage": "d", "negative": "e"},
    {"query": "f", "passage": "g", "negative": "h", "score": 0.5},
]


def columns_of(rows):
    return {
        "Dataset.from_list": datasets.Dataset.from_list(rows).column_names,
        "Table.from_pylist": pyarrow.Table.from_pylist(rows).column_names,
    }


print("datasets", datasets.__version__, "pyarrow", pyarrow.__version__)
print("expected:", ", ".join(expected := list(pandas.DataFrame(rows).columns)))
seen, reverse = columns_of(rows), columns_of(rows[::-1])
for name, columns in seen.items():
    print(f"seen: {name}: {', '.join(columns)}; from the rows in reverse order: {', '.join(reverse[name])}")
first = all(columns == ["query", "passage"] for columns in seen.values())
sys.exit(not (first and all(sorted(columns) == sorted(expected) for columns in reverse.values())))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/rows.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
