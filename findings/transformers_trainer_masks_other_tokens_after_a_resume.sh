#!/usr/bin/env bash
# transformers 5.23.0, Trainer: a masked language model's resumed run masks other tokens than the undisturbed run.
#
# Expected: the same losses, to the last bit: the Trainer saves the states of the random generators with each checkpoint and loads them again,
# and on one CPU, without workers and without dropout, nothing else is random. So it is without masks.
# Seen: all losses after the resume differ. Its first two batches get the masks of the run's first two, because they are made before the
# generators' states are loaded.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(transformers==5.23.0 tokenizers==0.23.3 accelerate==1.15.0 torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/resume.py" <<'PYTHON'
import sys

import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

words = {"[PAD]": 0, "[MASK]": 1, "[UNK]": 2, **{f"word{index}": index for index in range(3, 100)}}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]")), pad_token="[PAD]", mask_token="[MASK]"
)
texts = [{"input_ids": [3 + (7 * text + place * place) % 97 for place in range(32)]} for text in range(64)]
sizes = dict(vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)


masks: list[list[list[bool]]] = []


class Collator(DataCollatorForLanguageModeling):
    """Remembers which tokens of a batch are masked."""

    def __call__(self, *arguments, **options):
        batch = super().__call__(*arguments, **options)
        masks.append((batch["labels"] != -100).tolist())
        return batch


def losses(mlm: bool, checkpoint: str | None = None) -> list[float]:
    masks.clear()
    set_seed(0)
    model = BertForMaskedLM(BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    arguments = TrainingArguments(
        f"out-{mlm}", max_steps=7, save_steps=4, logging_steps=1, per_device_train_batch_size=8, use_cpu=True,
        report_to=[], disable_tqdm=True, dataloader_num_workers=0,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=texts, data_collator=Collator(tokenizer, mlm=mlm, mlm_probability=0.3))
    trainer.train(resume_from_checkpoint=checkpoint)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][4:]


print("transformers", transformers.__version__)
print("expected: equal losses of steps 5 to 7, with and without masks")
equal = {}
for mlm in (False, True):
    undisturbed = losses(mlm)
    assert losses(mlm) == undisturbed, "the undisturbed run can't be repeated"
    first_masks = masks[:2]
    resumed = losses(mlm, f"out-{mlm}/checkpoint-4")
    equal[mlm] = resumed == undisturbed
    print(f"seen, {'masked' if mlm else 'without masks'}: undisturbed {undisturbed}, resumed {resumed}")
is_repeated = masks[:2] == first_masks
print("seen, masked: the first two batches of the resumed run", "have" if is_repeated else "don't have", "the masks of steps 1 and 2")
sys.exit(equal != {False: True, True: False} or not is_repeated)
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/resume.py" 2>"$work/errors" >"$work/printed" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    grep -v "^{" "$work/printed" || true
    exit $status
}
grep -v "^{" "$work/printed"
