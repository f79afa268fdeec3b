#!/usr/bin/env bash
# transformers 5.23.0 and tokenizers saved by transformers 4.57.6: cased text is lowercased, letters become [MASK], without a message.
#
# Expected: AutoTokenizer encodes with the tokenizer.json of a folder, the same ids in versions 4 and 5. Two tokenizers of one's own, trained
# with `tokenizers` and put into the class of their kind, BertTokenizerFast (WordPiece, NFC, which keeps case and accents) and
# XLMRobertaTokenizerFast (Unigram), are saved by version 4, which encodes with them as `tokenizers` does.
# Seen: version 5 doesn't use the normalizer of BertTokenizerFast's tokenizer.json: it lowercases and removes accents, so that words that begin
# with a capital are other tokens or unknown ones. With XLMRobertaTokenizerFast, letters that the tokenizer doesn't know become [MASK],
# whose id is 3, in place of [UNK]. Nothing is logged or raised. A folder whose
# tokenizer_config.json says PreTrainedTokenizerFast gives the same ids in both versions. Version 5 alone does the same: a BertTokenizer
# made with `tokenizer_object` keeps case, and doesn't any more once it is saved and read.
#
# Without torch or weights. Checked on 2026-11-30, Python 3.11, Linux x86-64.
# Exit status: 0 as described here, 1 if transformers behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
install() { # NAME VERSION
    if command -v uv >/dev/null; then
        uv venv --quiet --python "$(command -v python3)" "$work/$1"
        uv pip install --quiet --python "$work/$1/bin/python" "transformers==$2"
    else
        python3 -m venv "$work/$1"
        "$work/$1/bin/python" -m pip install --quiet --disable-pip-version-check "transformers==$2"
    fi
}
install four 4.57.6
install five 5.23.0
export TRANSFORMERS_VERBOSITY=warning HF_HUB_OFFLINE=1

cat >read.py <<'PYTHON'
import sys

import transformers
from tokenizers import Tokenizer
from transformers import AutoTokenizer, BertTokenizer

TEXT = "Zoë and Anna met in Köln"
seen = {}
for name in ("BertTokenizerFast", "XLMRobertaTokenizerFast", "PreTrainedTokenizerFast"):
    auto, own = AutoTokenizer.from_pretrained(name), Tokenizer.from_file(f"{name}/tokenizer.json")
    ids = auto(TEXT, add_special_tokens=False)["input_ids"]
    seen[name] = auto.convert_ids_to_tokens(ids)
    print(f"seen: transformers {transformers.__version__}, {name}: {' '.join(seen[name])}")
    same = ids == own.encode(TEXT, add_special_tokens=False).ids
    if same != (sys.argv[1] == "four" or name == "PreTrainedTokenizerFast"):
        sys.exit(1)
if sys.argv[1] == "five":
    cased, unigram = seen["BertTokenizerFast"], seen["XLMRobertaTokenizerFast"]
    if any(token != token.lower() and token != "[UNK]" for token in cased) or "[MASK]" not in unigram:
        sys.exit(1)
    made = BertTokenizer(tokenizer_object=Tokenizer.from_file("BertTokenizerFast/tokenizer.json"), unk_token="[UNK]")
    made.save_pretrained("again")
    read = AutoTokenizer.from_pretrained("again")
    before, after = (" ".join(each.tokenize(TEXT)) for each in (made, read))
    print(f"seen: version 5's own BertTokenizer of it: {before}; saved and read: {after}")
    sys.exit((before, after) != (TEXT, " ".join(cased)))
PYTHON
"$work/four/bin/python" - 2>saving.log <<'PYTHON'
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import BertTokenizerFast, PreTrainedTokenizerFast, XLMRobertaTokenizerFast

TEXTS = ["Zoë and Anna met in Köln, and in Rome", "Anna and Otto met Zoë in Köln"] * 20
special = ["[PAD]", "[UNK]", "[CLS]", "[MASK]", "[SEP]"]
cased = Tokenizer(models.WordPiece(unk_token="[UNK]"))
cased.normalizer, cased.pre_tokenizer = normalizers.NFC(), pre_tokenizers.Whitespace()
cased.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False))
unigram = Tokenizer(models.Unigram())
unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="[UNK]", show_progress=False)
unigram.train_from_iterator([text.lower() for text in TEXTS], trainer)
named = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
for kind, tokenizer in ((BertTokenizerFast, cased), (XLMRobertaTokenizerFast, unigram), (PreTrainedTokenizerFast, cased)):
    kind(tokenizer_object=tokenizer, **named).save_pretrained(kind.__name__)
PYTHON
echo "expected: the tokens of tokenizer.json in both versions, or a message"
for version in four five; do
    "$work/$version/bin/python" read.py "$version" 2>"$version.log" || {
        status=$?
        tail -n 5 "$version.log" >&2
        exit $status
    }
done
messages=$(grep -v "PyTorch was not found" five.log | grep -ci tokeniz || true)
echo "seen: version 5's messages about tokenizers: $messages"
[ "$messages" = 0 ]
