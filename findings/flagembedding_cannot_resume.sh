#!/usr/bin/env bash
# FlagEmbedding 1.4.2, transformers 5.23.0: a fine-tuning can't be resumed from the checkpoints that it saves.
#
# Expected: `resume_from_checkpoint`, which the error for a used output folder advises, continues the training from a checkpoint.
# Seen: it ends with "'BiEncoderOnlyEmbedderModel' object has no attribute '_keys_to_ignore_on_save'". A checkpoint holds the encoder's weights
# by the encoder's own names, but is loaded into the wrapper around it, whose names begin with "model.": none fits, and reporting that fails
# because the wrapper is no PreTrainedModel. So it is with transformers 4.57.6. What a killed training has saved can be used as a model to start
# from, without the optimizer's state and the position in the data.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(FlagEmbedding==1.4.2 transformers==5.23.0 torch==2.11.0 accelerate==1.15.0 datasets==5.2.0 'setuptools<81' numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/resume.py" <<'PYTHON'
import importlib.metadata as metadata
import json
import logging
import os
import tempfile
import warnings

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
import torch
import transformers
from FlagEmbedding.abc.finetune.embedder import AbsEmbedderDataArguments, AbsEmbedderModelArguments
from FlagEmbedding.abc.finetune.embedder import AbsEmbedderTrainingArguments
from FlagEmbedding.finetune.embedder.encoder_only.base.runner import EncoderOnlyEmbedderRunner
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers

print("FlagEmbedding", metadata.version("FlagEmbedding"), "transformers", transformers.__version__)
print("expected: a training of 8 steps resumes from its checkpoint at step 4")
work = tempfile.mkdtemp()
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + [f"w{i}" for i in range(32)]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
special = dict(pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(f"{work}/encoder")
size = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=32)
transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **size)).save_pretrained(f"{work}/encoder")
with open(f"{work}/pairs.jsonl", "w") as file:
    for i in range(32):
        file.write(json.dumps({"query": f"w{i}", "pos": [f"w{(i + 1) % 32}"], "neg": [f"w{(i + 7) % 32}"]}) + "\n")


def train(resume_from_checkpoint=None):
    EncoderOnlyEmbedderRunner(
        model_args=AbsEmbedderModelArguments(model_name_or_path=f"{work}/encoder"),
        data_args=AbsEmbedderDataArguments(
            train_data=[f"{work}/pairs.jsonl"], train_group_size=2, cache_path=f"{work}/cache", query_max_len=8, passage_max_len=8
        ),
        training_args=AbsEmbedderTrainingArguments(
            output_dir=f"{work}/out", per_device_train_batch_size=4, num_train_epochs=1, save_steps=4, report_to=[],
            disable_tqdm=True, use_cpu=True, resume_from_checkpoint=resume_from_checkpoint,
        ),
    ).run()


train()
checkpoint = f"{work}/out/checkpoint-4"
with safe_open(f"{checkpoint}/model.safetensors", "pt") as stored:
    print("a weight of the checkpoint:", next(name for name in stored.keys() if "word_embeddings" in name))
print("it has the state of the optimizer:", os.path.exists(f"{checkpoint}/optimizer.pt"))
try:
    train(checkpoint)
except AttributeError as error:
    print("seen: AttributeError:", error)
    raise SystemExit(0 if "_keys_to_ignore_on_save" in str(error) else 1)
print("it resumed")
raise SystemExit(1)
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/resume.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
