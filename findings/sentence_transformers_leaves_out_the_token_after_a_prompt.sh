#!/usr/bin/env bash
# sentence-transformers 6.2.0: without the prompt, pooling leaves out the first word of the text too.
#
# Expected: with `include_prompt=False` and the prompt "query: ", the mean is over the tokens after "query: ".
# Seen: the prompt's length is that of the prompt alone, whose last space is a token of its own in byte-level BPE and with Metaspace; before a text, the
# space belongs to the first word. So the mean begins with the second token: the first word has no part in the embedding. With WordPiece, which
# has no spaces, it is as expected.
#
# Checked on 2026-12-01, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(sentence-transformers==6.2.0 transformers==5.23.0 tokenizers==0.23.3 torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/prompt.py" <<'PYTHON'
import tempfile
import warnings
from importlib.metadata import version

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

warnings.simplefilter("ignore")
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
TEXTS = ["query: the quick brown fox", "passage: rows of tokens", "query: what is a token"] * 50
KINDS = {
    "WordPiece": (models.WordPiece, trainers.WordPieceTrainer, pre_tokenizers.BertPreTokenizer()),
    "byte-level BPE": (models.BPE, trainers.BpeTrainer, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "BPE with Metaspace": (models.BPE, trainers.BpeTrainer, pre_tokenizers.Metaspace()),
}


def make(kind):
    model, trainer, splitter = KINDS[kind]
    tokenizer = Tokenizer(model(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = splitter
    tokenizer.train_from_iterator(TEXTS, trainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


print("sentence-transformers", version("sentence-transformers"))
text = "the quick brown fox"
for kind in KINDS:
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        torch.manual_seed(0)
        tokenizer = make(kind)
        tokenizer.save_pretrained(folder)
        config = BertConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
        BertModel(config).save_pretrained(folder)
        network = Transformer(folder)
        model = SentenceTransformer(modules=[network, Pooling(32, include_prompt=False)], device="cpu", prompts={"query": "query: "})
        embedding = model.encode(text, prompt_name="query", convert_to_tensor=True)
        encoded = tokenizer("query: " + text, return_tensors="pt")
        states = network(dict(encoded))["token_embeddings"][0]
        tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"][0])
        [first] = [at for at in range(len(tokens)) if torch.allclose(states[at:].mean(0), embedding, atol=1e-5)]
        expected = next(at for at, token in enumerate(tokens) if token.endswith("the"))
        print(f"{kind}: {tokens}: expected the mean from {tokens[expected]!r}, seen from {tokens[first]!r}")
        assert first == (expected if kind == "WordPiece" else expected + 1)
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/prompt.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
