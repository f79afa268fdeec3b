#!/usr/bin/env bash
# PyLate 1.6.0: `rank.rerank` gives a document another score if a longer one is reranked with it.
#
# The documents of a query are padded with zero vectors to the longest, and the padding isn't masked: where all tokens of a document
# have a negative similarity to a query token, the padding's 0 is taken as the maximum. A short document is raised by longer ones beside
# it. Pass documents of one length at a time, or compute the sum of maxima without padding.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(pylate==1.6.0)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/padded_documents.py" <<'PYTHON'
import torch
from pylate import rank

torch.manual_seed(0)


def tokens(count):
    return torch.nn.functional.normalize(torch.randn(count, 64), dim=-1)


query = tokens(8)
documents = {"short": tokens(2), "long": tokens(40), "medium": tokens(20)}


def reranked(names):
    [result] = rank.rerank(
        documents_ids=[names], queries_embeddings=[query], documents_embeddings=[[documents[name] for name in names]]
    )
    return {entry["id"]: entry["score"] for entry in result}


own = {name: (query @ document.T).max(1).values.sum().item() for name, document in documents.items()}
alone, together = reranked(["short"])["short"], reranked(list(documents))["short"]
print(f"sum of the maximal similarities of a document of 2 tokens: {own['short']:.4f}")
print(f"its score when it is reranked alone: {alone:.4f}; beside one of 40 tokens: {together:.4f}")
assert abs(alone - own["short"]) < 1e-5 and together > own["short"] + 0.1
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/padded_documents.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
