#!/usr/bin/env bash
# transformers 5.23.0: whole-word masking masks each text as a whole or not at all, with byte-level BPE or Metaspace.
#
# Expected: `DataCollatorForLanguageModeling(whole_word_mask=True, mlm_probability=0.3)` masks about 30% of the words of each text, all tokens of
# a word or none, as it does with a WordPiece tokenizer (BERT).
# Seen: it begins a word where a token's offset isn't the end of the one before. Byte-level BPE without `trim_offsets=True` in its
# post-processor, and Metaspace, count the space before a word as part of its first token, so that a text has no gap and is one word: of 200
# texts of 25 words, about 140 have no masked token and about 60 have nothing but. The share of all tokens, 30%, looks right. Nothing is raised
# or warned. With `trim_offsets=True` it is as expected.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(transformers==5.23.0 torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/whole_words.py" <<'PYTHON'
import sys

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

TEXT = (
    "the quick brown fox jumps over the lazy dog while seven wizards quietly mix strange purple potions in an old stone "
    "tower near the river"
)
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}


def trained(model, pre_tokenizer, trainer, post_processor=None):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def byte_level(post_processor):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=[*SPECIAL.values()], initial_alphabet=alphabet, show_progress=False)
    return trained(models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=False), trainer, post_processor)


def small(trainer):
    return trainer(vocab_size=60, special_tokens=[*SPECIAL.values()], show_progress=False)


around = [(name, [*SPECIAL.values()].index(name)) for name in ("[CLS]", "[SEP]")]
TOKENIZERS = {
    "WordPiece": trained(models.WordPiece(unk_token="[UNK]"), pre_tokenizers.Whitespace(), small(trainers.WordPieceTrainer)),
    "byte-level BPE, trim_offsets=True": byte_level(processors.ByteLevel(trim_offsets=True)),
    "byte-level BPE, trim_offsets=False": byte_level(processors.ByteLevel(trim_offsets=False)),
    "byte-level BPE with a template": byte_level(processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=around)),
    "Metaspace": trained(models.BPE(unk_token="[UNK]"), pre_tokenizers.Metaspace(), small(trainers.BpeTrainer)),
}
print(f"transformers {transformers.__version__} torch {torch.__version__}")
print("expected: about 30% of the words of each text are masked")
as_described = True
for name, tokenizer in TOKENIZERS.items():
    collate = DataCollatorForLanguageModeling(tokenizer, whole_word_mask=True, mlm_probability=0.3, mask_replace_prob=1.0, random_replace_prob=0.0, seed=1)
    encoded = tokenizer([TEXT] * 200, return_offsets_mapping=True, return_special_tokens_mask=True)
    rows = [{key: encoded[key][row] for key in ("input_ids", "offset_mapping", "special_tokens_mask")} for row in range(200)]
    text = torch.tensor(encoded["special_tokens_mask"][0]) == 0
    masked = (collate(rows)["labels"] != -100)[:, text].float().mean(dim=1)
    nothing, everything = int((masked == 0).sum()), int((masked == 1).sum())
    print(f"seen: {name}: {masked.mean():.2f} of the tokens are masked; in {nothing} of 200 texts none is, in {everything} all are")
    one_word = name in ("byte-level BPE, trim_offsets=False", "byte-level BPE with a template", "Metaspace")
    as_described &= abs(float(masked.mean()) - 0.3) < 0.12 and nothing + everything == (200 if one_word else 0)
sys.exit(not as_described)
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/whole_words.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
