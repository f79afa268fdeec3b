#!/usr/bin/env bash
# tokenizers 0.23.3, BPE without an unknown token: a character that is not in the vocabulary is left out, and the offsets of the
# tokens after it in the same word point to the wrong characters.
#
# Expected: each token's offsets are the range of characters of the input that it stands for, as they are where an unknown token
# takes the place of the character. In "axbc", "x" is not in the vocabulary, so "a" is [0, 1) and "bc" is [2, 4).
# Seen: the model's offsets count only the characters that it keeps, so "bc" is reported as [1, 3), which is "xb", and the next
# word's are right again. Labels of words and answers' positions that are computed from such offsets are silently wrong.
#
# Checked on 2026-11-28, Python 3.12, Linux x86-64.
# Exit status: 0 as described here, 1 if tokenizers behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" tokenizers==0.23.3
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check tokenizers==0.23.3
fi
cat >"$work/offsets.py" <<'PYTHON'
import sys

import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers

TEXT = "axbc bc"
VOCABULARY, MERGES = {"a": 0, "b": 1, "c": 2, "bc": 3}, [("b", "c")]


def spans(model):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    encoding = tokenizer.encode(TEXT)
    return [(token, span, TEXT[slice(*span)]) for token, span in zip(encoding.tokens, encoding.offsets)]


print("tokenizers", tokenizers.__version__, "text", repr(TEXT))
with_unknown = spans(models.BPE({**VOCABULARY, "?": 4}, MERGES, unk_token="?"))
without = spans(models.BPE(VOCABULARY, MERGES))
print("with an unknown token:   ", with_unknown)
print("without an unknown token:", without)
right = [("a", (0, 1), "a"), ("bc", (2, 4), "bc"), ("bc", (5, 7), "bc")]
print("expected:                ", right)
assert [each for each in with_unknown if each[0] != "?"] == right
sys.exit(without != [right[0], ("bc", (1, 3), "xb"), right[2]])
PYTHON
"$work/venv/bin/python" "$work/offsets.py"
