#!/usr/bin/env bash
# beir 2.2.0: a perfect ranking scores 0 if queries and documents are numbered alike.
#
# Expected: NDCG@1 of 1.0, since each query's relevant document is ranked first; ids of queries and ids of documents have nothing to do with
# each other, and many sets number both from 1. pytrec-eval-terrier 0.5.11, which beir calls, gives 1.0.
# Seen: EvaluateRetrieval.evaluate removes each document whose id equals its query's, because a few sets of duplicate questions rank the query
# itself. If question 7 is answered by passage 7, the answer is what goes. The dictionary that was passed lacks it afterwards, so
# that a second evaluation with ignore_identical_ids=False scores 0 too. A line of the level INFO says that identical ids are ignored.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(beir==2.2.0 pytrec-eval-terrier==0.5.11 sentence-transformers==6.2.0 transformers==5.23.0 torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/ranking.py" <<'PYTHON'
import sys
from copy import deepcopy
from importlib.metadata import version

import pytrec_eval
from beir.retrieval.evaluation import EvaluateRetrieval

ids = [str(number) for number in range(1, 11)]
judgments = {number: {number: 1} for number in ids}
ranking = {query: {document: 1 / (1 + abs(int(query) - int(document))) for document in ids} for query in ids}

print("beir", version("beir"))
print("expected: NDCG@1 of 1.0 each time")
by_query = pytrec_eval.RelevanceEvaluator(judgments, {"ndcg_cut_1"}).evaluate(ranking).values()
direct = sum(scores["ndcg_cut_1"] for scores in by_query) / len(ids)


def ndcg(ranking, **options):
    return EvaluateRetrieval.evaluate(judgments, ranking, [1], **options)[0]["NDCG@1"]


kept = ndcg(deepcopy(ranking), ignore_identical_ids=False)
passed = deepcopy(ranking)
default, again = ndcg(passed), ndcg(passed, ignore_identical_ids=False)
print(f"seen: pytrec_eval: {direct:.1f}")
print(f"seen: beir, ignore_identical_ids=False: {kept:.1f}")
print(f"seen: beir: {default:.1f}; with the same dictionary again, ignore_identical_ids=False: {again:.1f}")
sys.exit(not (direct == kept == 1.0 and default == again == 0.0))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/ranking.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
