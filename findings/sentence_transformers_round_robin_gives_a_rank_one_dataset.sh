#!/usr/bin/env bash
# sentence-transformers 6.2.0, accelerate 1.15.0: with two datasets in turn and two processes, each process trains one of the datasets.
#
# Expected: multi_dataset_batch_sampler="round_robin" takes a batch of one dataset, then of the other, in each process.
# Seen: the sampler's order is a, b, a, b, and accelerate gives process 0 the first of each two batches and process 1 the second: process 0 trains
# a alone, process 1 b alone, for all of the run. With four processes it's the same; with three, each sees both. Every update has both
# datasets, but losses that gather across processes compare questions of one dataset with passages of the other, and the losses that process 0
# logs are of one dataset. Nothing warns.
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
cat >"$work/processes.py" <<'PYTHON'
import os
import socket
import sys
import tempfile

import accelerate
import sentence_transformers
import torch
import torch.multiprocessing as multiprocessing
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, PrinterCallback

words = ["[PAD]", "[UNK]", *(f"{kind}{number}" for kind in ("a", "b", "p") for number in range(64))]


class Recorded(MultipleNegativesRankingLoss):
    """Notes the dataset of each batch."""

    letters = []

    def forward(self, features, labels):
        features = list(features)
        self.letters.append(words[features[0]["input_ids"][0, 0]][0])
        return super().forward(features, labels)


def train(rank, folder, port, ranks, seen):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ["WORLD_SIZE"] = str(ranks)
    passages = [f"p{number}" for number in range(64)]
    datasets = {
        kind: Dataset.from_dict({"query": [f"{kind}{number}" for number in range(64)], "passage": passages})
        for kind in "ab"
    }
    model = SentenceTransformer(f"{folder}/model", device="cpu")
    arguments = SentenceTransformerTrainingArguments(
        f"{folder}/out{rank}", num_train_epochs=1, per_device_train_batch_size=8,
        multi_dataset_batch_sampler="round_robin",
        report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
    )
    trainer = SentenceTransformerTrainer(model, arguments, datasets, loss=Recorded(model))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    seen[ranks, rank] = "".join(Recorded.letters)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    print("sentence-transformers", sentence_transformers.__version__, "accelerate", accelerate.__version__)
    print("expected: batches of a and b in turn in each process")
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with tempfile.TemporaryDirectory() as folder, multiprocessing.Manager() as manager:
        sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
        BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(f"{folder}/model")
        wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
        wrapped.save_pretrained(f"{folder}/model")
        seen = manager.dict()
        for ranks in (2, 3):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            multiprocessing.spawn(train, (folder, port, ranks, seen), nprocs=ranks)
        seen = dict(seen)
    for (ranks, rank), letters in sorted(seen.items()):
        print(f"seen: process {rank} of {ranks}: {' '.join(letters)}")
    one_each = set(seen[2, 0]) == {"a"} and set(seen[2, 1]) == {"b"}
    sys.exit(not (one_each and all(set(seen[3, rank]) == {"a", "b"} for rank in range(3))))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/processes.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
