#!/usr/bin/env bash
# sentence-transformers 6.2.0: with batch_sampler="no_duplicates", an epoch leaves out pairs of queries that have many passages.
#
# Expected: the sampler moves pairs that clash to later batches, so that each pair is trained once in an epoch.
# Seen: pairs that clash end in batches of their own, smaller ones, and there are more batches than the sampler's length says. Trainer stops at
# that length: of 300 pairs, 200 of which are 20 queries with ten passages each, it trains 200 in an epoch, and 275 in three. Those that
# are left out are pairs of the queries with many passages, every time. Nothing warns, and the epoch counts as complete.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(sentence-transformers==6.2.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0 torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/pairs.py" <<'PYTHON'
import sys
import tempfile

import sentence_transformers
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, PrinterCallback

many = [(f"q{query}", f"p{10 * query + passage}") for query in range(20) for passage in range(10)]
pairs = [*many, *((f"q{query}", f"p{180 + query}") for query in range(20, 120))]
words = ["[PAD]", "[UNK]", *dict.fromkeys(word for pair in pairs for word in pair)]
tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
queries, passages = zip(*pairs)
data = Dataset.from_dict({"query": queries, "passage": passages})


class Recorded(MultipleNegativesRankingLoss):
    """Notes the passages of each batch."""

    batches = []

    def forward(self, features, labels):
        self.batches.append(list(features)[1]["input_ids"][:, 0].tolist())
        return super().forward(features, labels)


def train(folder, sampler, epochs):
    """The sizes of batches, and how many pairs are trained."""
    torch.manual_seed(0)
    model = SentenceTransformer(f"{folder}/model", device="cpu")
    Recorded.batches.clear()
    arguments = SentenceTransformerTrainingArguments(
        f"{folder}/out", num_train_epochs=epochs, per_device_train_batch_size=64, batch_sampler=sampler,
        report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
    )
    trainer = SentenceTransformerTrainer(model, arguments, data, loss=Recorded(model))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return list(map(len, Recorded.batches)), len({passage for batch in Recorded.batches for passage in batch})


with tempfile.TemporaryDirectory() as folder:
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(f"{folder}/model")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    wrapped.save_pretrained(f"{folder}/model")
    print("sentence-transformers", sentence_transformers.__version__)
    print(f"expected: all {len(pairs)} pairs in each epoch")
    seen = [train(folder, *how) for how in (("batch_sampler", 1), ("no_duplicates", 1), ("no_duplicates", 3))]
for how, (batches, trained) in zip(("batch_sampler", "no_duplicates", "no_duplicates, three epochs"), seen):
    print(f"seen: {how}: {trained} of {len(pairs)} pairs, in batches of {', '.join(map(str, batches))}")
(_, plain), (_, once), (_, thrice) = seen
sys.exit(not (plain == len(pairs) and once < 0.75 * len(pairs) and thrice < len(pairs)))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/pairs.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
