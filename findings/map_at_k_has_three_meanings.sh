#!/usr/bin/env bash
# torchmetrics 1.9.0, sentence-transformers 6.2.0, pytrec-eval-terrier 0.5.11, ranx 0.3.21: MAP@10 of one ranking is 1.0, 0.1 or 0.05.
#
# Expected: a metric of one name has one value. A query has 20 relevant documents, and the first ten results hold one of them, the first.
# Seen: the sum of precisions, here 1, is divided by the relevant documents that exist in pytrec_eval (trec_eval's map_cut, so mteb's
# too) and ranx: 0.05; by at most k of them in sentence-transformers' InformationRetrievalEvaluator: 0.1; and by those found among the
# first k in torchmetrics' RetrievalMAP(top_k=10): 1.0, so that a result further down may lower the value: with a second relevant document
# in place 10 it is 0.6. NDCG@10 of the same ranking is the same in all of them.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(torchmetrics==1.9.0 sentence-transformers==6.2.0 pytrec-eval-terrier==0.5.11 ranx==0.3.21 transformers==5.23.0 torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/map_at_k.py" <<'PYTHON'
import sys
from importlib.metadata import version

import pytrec_eval
import ranx
import torch
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from torchmetrics.retrieval import RetrievalMAP, RetrievalNormalizedDCG

documents = [f"document{place:02}" for place in range(1, 41)]
scores = {document: 40.0 - place for place, document in enumerate(documents)}


def map_and_ndcg(places):
    """MAP@10 and NDCG@10 by each library, with relevant documents at these places, counted from 1."""
    relevant = {documents[place - 1] for place in places}
    judgments = {"query": dict.fromkeys(relevant, 1)}
    trec = pytrec_eval.RelevanceEvaluator(judgments, {"map_cut.10", "ndcg_cut.10"}).evaluate({"query": scores})["query"]
    by_ranx = ranx.evaluate(ranx.Qrels(judgments), ranx.Run({"query": scores}), ["map@10", "ndcg@10"])
    evaluator = InformationRetrievalEvaluator(
        {"query": ""}, dict.fromkeys(documents, ""), {"query": relevant}, map_at_k=[10], ndcg_at_k=[10]
    )
    sentence = evaluator.compute_metrics([[{"corpus_id": name, "score": score} for name, score in scores.items()]])
    tensors = torch.tensor(list(scores.values())), torch.tensor([name in relevant for name in scores])
    index = torch.zeros(40, dtype=torch.long)
    return {
        "pytrec_eval": (trec["map_cut_10"], trec["ndcg_cut_10"]),
        "ranx": (by_ranx["map@10"], by_ranx["ndcg@10"]),
        "sentence-transformers": (sentence["map@k"][10], sentence["ndcg@k"][10]),
        "torchmetrics": tuple(
            metric(top_k=10)(*tensors, indexes=index).item() for metric in (RetrievalMAP, RetrievalNormalizedDCG)
        ),
    }


print(*(f"{name} {version(name)}" for name in ("torchmetrics", "sentence-transformers", "pytrec-eval-terrier", "ranx")))
print("expected: one value of MAP@10 by all, as of NDCG@10")
one, two = map_and_ndcg([1, *range(22, 41)]), map_and_ndcg([1, 10, *range(23, 41)])
for name in one:
    print(
        f"seen: {name}: MAP@10 {one[name][0]:.3f}, and {two[name][0]:.3f} with another relevant document in place 10; "
        f"NDCG@10 {one[name][1]:.4f}, {two[name][1]:.4f}"
    )
sums = {"pytrec_eval": 20, "ranx": 20, "sentence-transformers": 10}
as_described = all(
    abs(one[name][0] - 1 / divisor) < 1e-5 and abs(two[name][0] - 1.2 / divisor) < 1e-5 for name, divisor in sums.items()
)
as_described &= abs(one["torchmetrics"][0] - 1) < 1e-5 and abs(two["torchmetrics"][0] - 0.6) < 1e-5
for each in (one, two):
    ndcg = [values[1] for values in each.values()]
    as_described &= max(ndcg) - min(ndcg) < 1e-5
sys.exit(not as_described)
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/map_at_k.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
