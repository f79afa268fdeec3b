#!/usr/bin/env bash
# mteb 2.26.24: a local model gets the scores of the local model that was evaluated before it.
#
# Expected: two SentenceTransformers from two folders, with other weights, have scores of their own.
# Seen: `mteb.evaluate` keeps results by the name and revision of a model's card. Models that were composed from their modules and saved to
# folders have neither: all of them are "no_model_name/available", so the second model isn't run, and the first one's scores are returned,
# without a warning. So are those of a folder whose model was trained further. With `cache=None` or `overwrite_strategy="always"` each is run.
#
# Checked on 2026-12-01, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(mteb==2.26.24 sentence-transformers==6.2.0 transformers==5.23.0 torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/scores.py" <<'PYTHON'
import os
import random
import tempfile
import warnings

import mteb
import torch
from datasets import Dataset, DatasetDict
from mteb import ResultCache
from mteb.abstasks import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast

warnings.simplefilter("ignore")
WORDS = [f"w{number}" for number in range(200)]


class Pairs(AbsTaskSTS):
    min_score, max_score = 0, 1
    metadata = TaskMetadata(
        name="Pairs", description="Pairs of texts.", dataset={"path": "own/pairs", "revision": "1"}, type="STS", category="t2t",
        modalities=["text"], eval_splits=["test"], eval_langs=["eng-Latn"], main_score="cosine_spearman", reference=None, date=None,
        domains=None, task_subtypes=None, license=None, annotations_creators=None, dialect=None, sample_creation=None, bibtex_citation=None,
    )

    def load_data(self, **_):
        generator = random.Random(0)
        def texts():
            return [" ".join(generator.choices(WORDS, k=6)) for _ in range(50)]
        columns = {"sentence1": texts(), "sentence2": texts(), "score": [generator.random() for _ in range(50)]}
        self.dataset = DatasetDict({"test": Dataset.from_dict(columns)})
        self.data_loaded = True


def save(folder, seed):
    torch.manual_seed(seed)
    config = BertConfig(vocab_size=205, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    BertModel(config).save_pretrained(f"{folder}/network")
    with open(f"{folder}/vocabulary.txt", "w") as file:
        file.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizerFast(f"{folder}/vocabulary.txt").save_pretrained(f"{folder}/network")
    SentenceTransformer(modules=[Transformer(f"{folder}/network"), Pooling(32)], device="cpu").save(f"{folder}/model")


def score(folder, **options):
    result = mteb.evaluate(SentenceTransformer(f"{folder}/model", device="cpu"), Pairs(), show_progress_bar=False, **options)
    return result.model_name, round(result.task_results[0].scores["test"][0]["main_score"], 4)


from importlib.metadata import version

print("mteb", version("mteb"), "sentence-transformers", version("sentence-transformers"))
with tempfile.TemporaryDirectory() as work:
    own, seen = {}, {}
    for seed, name in enumerate(("first", "second")):
        os.mkdir(f"{work}/{name}")
        save(f"{work}/{name}", seed)
        own[name] = score(f"{work}/{name}", cache=None)
        seen[name] = score(f"{work}/{name}", cache=ResultCache(cache_path=f"{work}/cache"))
    print("expected, each model run:", own)
    print("seen, with a cache of results:", seen)
    assert own["first"][1] != own["second"][1]
    assert seen["first"] == seen["second"] == own["first"]
    again = score(f"{work}/second", cache=ResultCache(cache_path=f"{work}/cache"), overwrite_strategy="always")
    assert again == own["second"]
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/scores.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
