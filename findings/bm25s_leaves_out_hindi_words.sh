#!/usr/bin/env bash
# bm25s 0.3.16: its own tokenizer cuts the words of Hindi, Bengali, Tamil and Thai at vowel signs, and leaves most of the text out.
#
# Expected: the words of "हिन्दी में खोज" (search in Hindi) are the three that its spaces divide, and a query of a word finds the document
# that has it.
# Seen: the default `token_pattern`, `\b\w\w+\b`, is read by Python's `re`, whose `\w` matches no combining marks, as vowel signs are.
# They end words, and pieces of one letter are dropped: of this text nothing is left, so all documents score 0. The words of a
# longer text are fragments that unrelated words share. The library's function for any text warns of nothing; mteb 2.26.24
# takes this tokenizer for Hindi and Tamil in its baseline (`mteb/baseline-bm25s`).
#
# Checked on 2026-11-29, Python 3.12, Linux x86-64.
# Exit status: 0 as described here, 1 if bm25s behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" bm25s==0.3.16
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check bm25s==0.3.16
fi
cat >"$work/words.py" <<'PYTHON'
import importlib.metadata
import sys

import bm25s


def words(text):
    [found] = bm25s.tokenize([text], stopwords=None, return_ids=False, show_progress=False)
    return list(found)


def scores(documents, query):
    index = bm25s.BM25()
    index.index(bm25s.tokenize(documents, stopwords=None, show_progress=False), show_progress=False)
    return index.get_scores(words(query)).tolist() if words(query) else [0.0] * len(documents)


print("bm25s", importlib.metadata.version("bm25s"))
texts = {"English": "search in Hindi", "Hindi": "हिन्दी में खोज", "Bengali": "বাংলা ভাষা", "Tamil": "தமிழ் மொழி", "Thai": "น้ำ"}
found = {name: words(text) for name, text in texts.items()}
for name, text in texts.items():
    print(f"{name:8} expected {text.split()}, seen {found[name]}")
hindi = ["खोज मानव अधिकार", "किताब मानव अधिकार"]
english = ["search human rights", "book human rights"]
print("scores of the documents for `book`:", scores(english, "book"), "for किताब:", scores(hindi, "किताब"))
assert found["English"] == ["search", "in", "hindi"] and scores(english, "book")[1] > 0
seen = {"Hindi": [], "Bengali": [], "Tamil": ["தம"], "Thai": []}
sys.exit({name: found[name] for name in seen} != seen or scores(hindi, "किताब") != [0.0, 0.0])
PYTHON
"$work/venv/bin/python" "$work/words.py"
