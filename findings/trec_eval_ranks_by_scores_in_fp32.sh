#!/usr/bin/env bash
# pytrec-eval-terrier 0.5.11, ir-measures 0.4.3, beir 2.2.0: of two scores that fp32 can't tell apart, the lower one may rank first.
#
# Expected: a ranking follows its scores, which are Python's floats: a relevant document with 0.999999998 is above another one with
# 0.999999985 (the probabilities of logits of 20 and 18), and its reciprocal rank is 1.
# Seen: pytrec_eval compares scores as fp32. There both are 1.0, a tie, which the later name wins: the reciprocal rank is 1 or
# 0.5, by how the documents are named, in ir_measures and beir too, which call it. ranx ranks by the scores as given: 1. Logits in place
# of probabilities rank right everywhere.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(pytrec-eval-terrier==0.5.11 ir-measures==0.4.3 beir==2.2.0 ranx==0.3.21 torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/ranks.py" <<'PYTHON'
import math
import sys
from importlib.metadata import version

import ir_measures
import pytrec_eval
import ranx
from beir.retrieval.evaluation import EvaluateRetrieval

NAMES = ("pytrec-eval-terrier", "ir-measures", "beir", "ranx")


def reciprocal_ranks(relevant, scores):
    """The reciprocal rank of the relevant one of the scored documents, by each library."""
    judgments, run = {"query": {relevant: 1}}, {"query": scores}
    trec = pytrec_eval.RelevanceEvaluator(judgments, {"recip_rank"}).evaluate(run)["query"]["recip_rank"]
    measured = ir_measures.calc_aggregate([ir_measures.RR], judgments, run)[ir_measures.RR]
    # beir has no MRR from pytrec_eval: of two documents, precision of the first one.
    first = EvaluateRetrieval.evaluate(judgments, run, [1])[3]["P@1"]
    return trec, measured, (1 + first) / 2, float(ranx.evaluate(ranx.Qrels(judgments), ranx.Run(run), "mrr"))


def sigmoid(logit):
    return 1 / (1 + math.exp(-logit))


print(*(f"{name} {version(name)}" for name in NAMES))
print("expected: the relevant document has the higher score, so its reciprocal rank is 1")
seen = {
    "probabilities, the relevant one is named b": reciprocal_ranks("b", {"a": sigmoid(18), "b": sigmoid(20)}),
    "probabilities, the relevant one is named a": reciprocal_ranks("a", {"a": sigmoid(20), "b": sigmoid(18)}),
    "logits, the relevant one is named a": reciprocal_ranks("a", {"a": 20.0, "b": 18.0}),
}
for case, ranks in seen.items():
    print(f"seen: {case}: " + ", ".join(f"{name} {rank}" for name, rank in zip(NAMES, ranks, strict=True)))
sys.exit(list(seen.values()) != [(1, 1, 1, 1), (0.5, 0.5, 0.5, 1), (1, 1, 1, 1)])
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/ranks.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
