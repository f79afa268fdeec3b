#!/usr/bin/env bash
# mteb 2.26.24: a clustering or multi-label score depends on what the task object has evaluated before.
#
# Expected: a task with a fixed seed gives the same model the same score again, as classification and regression tasks do.
# Seen: clustering and multi-label classification draw their samples from one random generator of the task object, whose state carries over to the
# next evaluation. The same model, evaluated twice with one object (no results are cached), has two scores; of two models compared with one list of
# tasks, the second one is measured on other samples; and a test split has another score if the validation split is evaluated before it.
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
import random
import tempfile
import warnings
from importlib.metadata import version

import mteb
import torch
from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTaskClassification, AbsTaskClustering, AbsTaskMultilabelClassification
from mteb.abstasks.task_metadata import TaskMetadata
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast

warnings.simplefilter("ignore")
WORDS = [f"w{number}" for number in range(200)]


def model(folder):
    torch.manual_seed(0)
    config = BertConfig(vocab_size=205, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    BertModel(config).save_pretrained(folder)
    with open(f"{folder}/vocabulary.txt", "w") as file:
        file.write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizerFast(f"{folder}/vocabulary.txt").save_pretrained(folder)
    return SentenceTransformer(modules=[Transformer(folder), Pooling(32)], device="cpu")


def texts(seed, count):
    """Texts of three classes, whose words overlap."""
    generator = random.Random(seed)
    labels = [generator.randrange(3) for _ in range(count)]
    return [" ".join(generator.choices(WORDS[label * 30 : label * 30 + 90], k=6)) for label in labels], labels


def make(base, kind, main_score, columns, *splits):
    class Task(base):
        metadata = TaskMetadata(
            name=f"Own{kind}", description="Texts of three classes.", dataset={"path": "own/texts", "revision": "1"}, type=kind,
            category="t2c", modalities=["text"], eval_splits=[*splits], eval_langs=["eng-Latn"], main_score=main_score,
            reference=None, date=None, domains=None, task_subtypes=None, license=None, annotations_creators=None, dialect=None,
            sample_creation=None, bibtex_citation=None,
        )

        def load_data(self, **_):
            sizes = {"train": 300, "validation": 400, "test": 400}
            rows = {name: columns(*texts(seed, size)) for seed, (name, size) in enumerate(sizes.items())}
            self.dataset = DatasetDict({name: Dataset.from_dict(split) for name, split in rows.items()})
            self.data_loaded = True

    return Task()


TASKS = {
    "classification": (AbsTaskClassification, "Classification", "accuracy", lambda text, label: {"text": text, "label": label}),
    "clustering": (AbsTaskClustering, "Clustering", "v_measure", lambda text, label: {"sentences": text, "labels": label}),
    "multi-label": (
        AbsTaskMultilabelClassification, "MultilabelClassification", "accuracy",
        lambda text, label: {"text": text, "label": [sorted({each, (each + len(words)) % 3}) for each, words in zip(label, text)]},
    ),
}
print("mteb", version("mteb"))
with tempfile.TemporaryDirectory() as folder:
    encoder = model(folder)

    def score(task):
        result = mteb.evaluate(encoder, task, cache=None, show_progress_bar=False).task_results[0]
        return round(float(result.scores["test"][0]["main_score"]), 4)

    for name, kind in TASKS.items():
        once = make(*kind, "test")
        first, again = score(once), score(once)
        fresh, behind = score(make(*kind, "test")), score(make(*kind, "validation", "test"))
        print(f"{name}: expected {first} each time; again {again}, a new object {fresh}, behind the validation split {behind}")
        assert fresh == first
        assert (again == first) == (behind == first) == (name == "classification")
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/scores.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
