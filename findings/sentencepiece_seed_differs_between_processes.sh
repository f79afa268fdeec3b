#!/usr/bin/env bash
# sentencepiece 0.2.3: after set_random_generator_seed(1), each process samples other segmentations of the same text.
#
# Expected: the same ones, as with 0.2.1: the seed is there so that training with sampled segmentations (subword regularization) can be
# repeated.
# Seen: with 0.2.3 three processes sample three different series. Within a process the seed does repeat them, so a test that compares two
# series of one process passes. (With 0.2.1 it is the other way round: a seed counts only before the first sample of a thread.)
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
for version in 0.2.1 0.2.3; do
    if command -v uv >/dev/null; then
        uv venv --quiet --python "$(command -v python3)" "$work/$version"
        uv pip install --quiet --python "$work/$version/bin/python" "sentencepiece==$version"
    else
        python3 -m venv "$work/$version"
        "$work/$version/bin/python" -m pip install --quiet --disable-pip-version-check "sentencepiece==$version"
    fi
done
cat >"$work/train.py" <<'PYTHON'
import sentencepiece

words = (("small", "large", "encoder"), ("model", "language", "modelling"), ("paper", "run", "training"))
texts = [f"the {first} {second} of the {third}" for first in words[0] for second in words[1] for third in words[2]] * 5
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(texts), model_prefix="small", vocab_size=30, model_type="unigram", minloglevel=2
)
PYTHON
cat >"$work/sample.py" <<'PYTHON'
import sentencepiece

tokenizer = sentencepiece.SentencePieceProcessor(model_file="small.model")


def lengths() -> list[int]:
    sentencepiece.set_random_generator_seed(1)
    text = "the large language modelling of the training"
    return [len(tokenizer.encode(text, enable_sampling=True, alpha=0.1, nbest_size=-1)) for _ in range(20)]


series = lengths()
print(*series, "and with the same seed once more:", "the same" if lengths() == series else "others")
PYTHON
"$work/0.2.3/bin/python" "$work/train.py" >/dev/null
echo "expected: one series of lengths in tokens for each version, in three processes"
declare -A different
for version in 0.2.1 0.2.3; do
    series=$(for _ in 1 2 3; do "$work/$version/bin/python" "$work/sample.py"; done)
    sed "s/^/seen with $version: /" <<<"$series"
    different[$version]="$(sort -u <<<"$series" | wc -l) series, $(grep -c "the same$" <<<"$series" || true) repeated in their process"
    echo "seen with $version: ${different[$version]}"
done
[ "${different[0.2.1]}" = "1 series, 0 repeated in their process" ] && [ "${different[0.2.3]}" = "3 series, 3 repeated in their process" ]
