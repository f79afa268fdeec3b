#!/usr/bin/env bash
# transformers 5.23.0, DataCollatorForLanguageModeling(seed=...): with workers of a DataLoader, each epoch has the masks of the first one.
#
# Expected: masks are drawn anew each time a text is seen, and the seed only makes that repeatable. So it is without workers, and with
# persistent workers.
# Seen: with num_workers=1 the masks of the second epoch equal those of the first, because the workers of each epoch begin with the seed again.
# In a fixed order of the data, every text is masked at the same places in all epochs; in a shuffled one, the series of masks repeats.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(transformers==5.23.0 tokenizers==0.23.3 torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/masks.py" <<'PYTHON'
import sys

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

words = {"[PAD]": 0, "[MASK]": 1, "[UNK]": 2, **{f"word{index}": index for index in range(3, 100)}}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]")), pad_token="[PAD]", mask_token="[MASK]"
)
texts = [{"input_ids": list(range(3, 67))} for _ in range(16)]


def masks_of_epochs(workers: int, persistent: bool) -> list[torch.Tensor]:
    collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3, seed=42)
    batches = DataLoader(texts, 4, collate_fn=collate, num_workers=workers, persistent_workers=persistent)
    return [torch.cat([batch["labels"] for batch in batches]) != -100 for _ in range(2)]


if __name__ == "__main__":
    print("transformers", transformers.__version__)
    print("expected: the masks of the second epoch are others, in each row")
    equal = {}
    for workers, persistent in ((0, False), (1, False), (1, True)):
        first, second = masks_of_epochs(workers, persistent)
        equal[workers, persistent] = torch.equal(first, second)
        print(
            f"seen: num_workers={workers}, persistent_workers={persistent}: {int(first.sum())} and {int(second.sum())} of "
            f"{first.numel()} tokens masked, {int((first & second).sum())} of them in both epochs"
        )
    sys.exit(equal != {(0, False): False, (1, False): True, (1, True): False})
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/masks.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
