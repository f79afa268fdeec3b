#!/usr/bin/env bash
# tokenizers 0.23.3: training a WordPiece tokenizer on the same text gives another vocabulary each time.
#
# Expected: training has no seed and draws nothing, so the same text gives the same vocabulary, as it does for byte pair encoding (BPE).
# Seen: of ten trainings in one process, most differ in their pieces, not only in ids, also with one thread: so does BPE with a
# `continuing_subword_prefix` or an `end_of_word_suffix`. Equally frequent pairs are merged in the order of ids, which the pieces with
# a prefix or suffix get in the order of a hash map. A vocabulary that is lost can't be made again, and what it encoded can't be
# read. (huggingface/tokenizers issue 1794.)
#
# Checked on 2026-11-29, Python 3.12, Linux x86-64.
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
cat >"$work/train.py" <<'PYTHON'
import sys

import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

TEXT = " ".join(first + vowel + last for first in "bdfgklm" for vowel in "aeiou" for last in "nprst")
SETTINGS = {"vocab_size": 60, "show_progress": False}


def pieces(model, trainer):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([TEXT], trainer)
    return frozenset(tokenizer.get_vocab())


def bpe(**settings):
    return len({pieces(models.BPE(), trainers.BpeTrainer(**SETTINGS, **settings)) for _ in range(10)})


word_piece = {pieces(models.WordPiece(), trainers.WordPieceTrainer(**SETTINGS)) for _ in range(10)}
plain, prefix, suffix = bpe(), bpe(continuing_subword_prefix="##"), bpe(end_of_word_suffix="</w>")
print("tokenizers", tokenizers.__version__)
print("expected: 1 vocabulary from ten trainings on the same text")
print(f"seen: WordPiece {len(word_piece)}, BPE {plain}, BPE with a prefix {prefix}, BPE with a suffix {suffix}")
sys.exit(not (plain == 1 and len(word_piece) > 1 and prefix > 1 and suffix > 1))
PYTHON
RAYON_NUM_THREADS=1 "$work/venv/bin/python" "$work/train.py"
