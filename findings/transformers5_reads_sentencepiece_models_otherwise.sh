#!/usr/bin/env bash
# transformers 5.23.0 splits text otherwise than the SentencePiece model that it reads.
#
# A SentencePiece model file says itself whether it is BPE or Unigram, which token is the unknown one, and that a space goes before
# the text. Version 4.57.6 follows the file. Version 5.23.0 follows the tokenizer's class, without a message:
# - a BPE model is read as Unigram by T5Tokenizer, XLMRobertaTokenizer and DebertaV2Tokenizer, so that words are split into
#   other pieces;
# - a Unigram model is read as BPE by LlamaTokenizer, so that each letter is a token;
# - with PreTrainedTokenizerFast no space goes before the first word, which becomes other
#   tokens;
# - T5Tokenizer's unknown token is the one with id 2, as in T5: with SentencePiece's own default ids that is the end of the text.
# Save such a tokenizer once with version 4 (save_pretrained writes tokenizer.json), and compare its tokens with SentencePiece's.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
for version in 4.57.6 5.23.0; do
    packages=("transformers==$version" sentencepiece==0.2.3 protobuf==7.36.2)
    if command -v uv >/dev/null; then
        uv venv --quiet --python "$(command -v python3)" "$work/$version"
        uv pip install --quiet --python "$work/$version/bin/python" "${packages[@]}"
    else
        python3 -m venv "$work/$version"
        "$work/$version/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
    fi
done
cat >"$work/sentencepiece_models.py" <<'PYTHON'
import json
import logging
import random
from pathlib import Path

import sentencepiece
import transformers
from transformers import AutoTokenizer

logging.disable(logging.WARNING)
words = "the quick brown fox jumps over lazy dogs while trainers train encoders on training text of their own".split()
random.seed(0)
Path("text.txt").write_text("\n".join(" ".join(random.choices(words, k=8)) for _ in range(2000)))
for kind in ("bpe", "unigram"):
    sentencepiece.SentencePieceTrainer.train(
        input="text.txt", model_prefix=kind, model_type=kind, vocab_size=150, hard_vocab_limit=False, minloglevel=2
    )
VERSION = transformers.__version__
IS_4 = VERSION.startswith("4.")
CLASSES = ["T5Tokenizer", "XLMRobertaTokenizer", "DebertaV2Tokenizer", "LlamaTokenizer"]
CLASSES += [] if IS_4 else ["PreTrainedTokenizerFast"]  # version 4 refuses it
TEXT, UNKNOWN = "training encoders of their own", "fox \u20ac"
FILES = {"T5Tokenizer": "spiece.model", "XLMRobertaTokenizer": "sentencepiece.bpe.model", "DebertaV2Tokenizer": "spm.model"}


def read(kind: str, name: str):
    folder = Path(f"{VERSION}-{kind}-{name}")
    folder.mkdir()
    (folder / FILES.get(name, "tokenizer.model")).write_bytes(Path(f"{kind}.model").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    return AutoTokenizer.from_pretrained(folder)


differ = []
for kind in ("bpe", "unigram"):
    own = sentencepiece.SentencePieceProcessor(model_file=f"{kind}.model")
    print(f"transformers {VERSION}, {kind}: SentencePiece: {own.encode(TEXT, out_type=str)}")
    for name in CLASSES:
        tokenizer = read(kind, name)
        tokens = tokenizer.convert_ids_to_tokens(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
        if tokens == own.encode(TEXT, out_type=str):
            print(f"  {name}: the same")
        else:
            differ.append((kind, name))
            print(f"  {name}: {tokens}")
        if name == "T5Tokenizer":
            unknown = tokenizer(UNKNOWN, add_special_tokens=False)["input_ids"][-1]
            print(f"  {name}: of an unknown character id {unknown}, {tokenizer.convert_ids_to_tokens(unknown)!r}; "
                  f"SentencePiece: {own.encode(UNKNOWN)[-1]}, {own.id_to_piece(own.unk_id())!r}")
            assert own.encode(UNKNOWN)[-1] == own.unk_id() == 0 and unknown == (0 if IS_4 else 2)
            assert own.id_to_piece(2) == "</s>"
assert differ == [] if IS_4 else differ == [
    ("bpe", "T5Tokenizer"), ("bpe", "XLMRobertaTokenizer"), ("bpe", "DebertaV2Tokenizer"), ("bpe", "PreTrainedTokenizerFast"),
    ("unigram", "LlamaTokenizer"), ("unigram", "PreTrainedTokenizerFast"),
], differ
PYTHON
for version in 4.57.6 5.23.0; do
    HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 "$work/$version/bin/python" "$work/sentencepiece_models.py" 2>"$work/errors" || {
        status=$?
        tail -n 5 "$work/errors" >&2
        exit $status
    }
done
