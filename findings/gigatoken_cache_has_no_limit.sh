#!/usr/bin/env bash
# gigatoken 0.10.0: a tokenizer keeps every word that it has encoded, without a limit, as long as it lives.
#
# Expected: memory that stays level once a cache of words is full, as that of tokenizers does, so that a process can encode a
# corpus of any size.
# Seen: encoding texts whose results are thrown away adds about 10 bytes for each byte of words that were not seen before (36 MB of
# them: more than 250 MB), and no option sets a limit. Only deleting the tokenizer gives the memory back. Words that come again
# cost nothing, so that short trials on the same text don't show it.
#
# Checked on 2026-11-28, Python 3.12, Linux x86-64.
# Exit status: 0 as described here, 1 if gigatoken behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(gigatoken==0.10.0 tokenizers==0.23.3 numpy==2.4.0)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/cache.py" <<'PYTHON'
import gc
import json
import sys
from importlib.metadata import version
from pathlib import Path

import gigatoken
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

BATCHES, LETTERS = 9, 4_000_000
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
PLAIN = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
PLAIN.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)


def megabytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 // 1_000_000


def texts(seed):
    """Words of nine random letters, 400 in a text."""
    drawn = np.random.default_rng(seed).integers(97, 123, LETTERS).astype(np.uint8).tobytes().decode()
    words = [drawn[start : start + 9] for start in range(0, LETTERS, 9)]
    return [" ".join(words[start : start + 400]) for start in range(0, len(words), 400)]


def growth(encode, seeds):
    """Megabytes after each batch of texts, less those before the first."""
    start, used = megabytes(), []
    for seed in seeds:
        for text in texts(seed):
            encode(text)
        used.append(megabytes() - start)
    return used


growth(PLAIN.encode, [0])  # what Python and the libraries need once
tokenizer = gigatoken.Tokenizer.from_json(json.dumps(json.loads(PLAIN.to_str())))
assert tokenizer.encode("some words").tolist() == PLAIN.encode("some words").ids
print("gigatoken", version("gigatoken"), "tokenizers", version("tokenizers"))
before = megabytes()
new = growth(tokenizer.encode, range(1, 1 + BATCHES))
again = growth(tokenizer.encode, [BATCHES] * 3)
del tokenizer
gc.collect()
left = megabytes() - before
plain = growth(PLAIN.encode, range(1, 1 + BATCHES))
print("gigatoken, new words in each batch (MB):", new)
print("gigatoken, the last batch again:        ", again)
print("after the tokenizer was deleted:        ", left)
print("tokenizers, new words in each batch:    ", plain)
as_described = new[-1] > 250 and new[-1] > 1.3 * new[len(new) // 2] and max(again) < 30 and left < 60 and max(plain) < 60
sys.exit(not as_described)
PYTHON
"$work/venv/bin/python" "$work/cache.py"
