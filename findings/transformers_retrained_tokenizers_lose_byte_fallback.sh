#!/usr/bin/env bash
# transformers 5.23.0, tokenizers 0.23.3: a tokenizer with byte fallback that is trained anew has no bytes to fall back on.
#
# Expected: `train_new_from_iterator` gives a tokenizer with the same pipeline, so one like Llama's 2, which writes unknown characters as bytes, still does,
# and decodes any text to itself; a byte-level tokenizer keeps its 256 bytes.
# Seen: the new model has `byte_fallback` set, but its vocabulary has none of the 256 byte tokens, although there is room for them. Each character that the
# training text lacked is the unknown token, and is lost when decoded.
#
# Checked on 2026-12-01, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(transformers==5.23.0 tokenizers==0.23.3 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/bytes.py" <<'PYTHON'
from importlib.metadata import version

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

print("transformers", version("transformers"), "tokenizers", version("tokenizers"))
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TEXTS = ["the cat sat on the mat"] * 50


def with_fallback():
    pieces = [*SPECIAL, *BYTES, "\u2581", *"abcdefghijklmnopqrstuvwxyz", "\u2581t", "\u2581th", "\u2581the"]
    merges = [("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e")]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


text = "the caf\u00e9"
print("expected: each tokenizer decodes the text to itself")
for make in (byte_level, with_fallback):
    old = make()
    new = old.train_new_from_iterator(TEXTS, vocab_size=400)
    results = {}
    for name, tokenizer in (("old", old), ("new", new)):
        ids = tokenizer(text)["input_ids"]
        results[name] = tokenizer.decode(ids)
        print(f"{make.__name__}, {name}: {len(tokenizer)} tokens; {tokenizer.convert_ids_to_tokens(ids)} decodes to {results[name]!r}")
    assert results["old"] == text
    if make is byte_level:
        assert results["new"] == text
    else:
        assert new.backend_tokenizer.model.byte_fallback and not {*BYTES} & {*new.get_vocab()}
        assert len(new) < 144 and "\u00e9" not in results["new"] and "<unk>" in results["new"]
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/bytes.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
