#!/usr/bin/env bash
# transformers 5.23.0: a Trainer that groups texts by length resumes in another order from the second epoch on.
#
# With `train_sampling_strategy="group_by_length"` a run that is saved in its second or third epoch and resumed draws that epoch's groups
# anew, and then skips as many batches as were trained: some rows are trained twice in the epoch, and others never. Two undisturbed runs
# are equal, and so is a run that is resumed in its first epoch. With the default, random order, every resume is equal.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(transformers==5.23.0 torch==2.11.0 accelerate==1.15.0 numpy==2.1.3)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/grouped_resume.py" <<'PYTHON'
import contextlib
import io
import logging
import shutil

import torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

logging.disable(logging.WARNING)
ROWS, EPOCH = 45, 12  # batches of 4 rows


def text(number):
    ids = torch.full((3 + 7 * number % 16,), 5)
    ids[0] = 10 + number  # the row's number
    return {"input_ids": ids}


def collate(rows):
    texts = [row["input_ids"] for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


class Recording(Trainer):
    def training_step(self, model, inputs, *arguments):
        trained.append(sorted((inputs["input_ids"][:, 0] - 10).tolist()))
        return super().training_step(model, inputs, *arguments)


def train(strategy, resume=None):
    trained.clear()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    arguments = TrainingArguments(
        output_dir="run", per_device_train_batch_size=4, num_train_epochs=3, save_steps=5, report_to=[], use_cpu=True, seed=7,
        disable_tqdm=True, train_sampling_strategy=strategy,
    )
    model = BertForMaskedLM(BertConfig(vocab_size=10 + ROWS, max_position_embeddings=32, **sizes))
    trainer = Recording(model=model, args=arguments, train_dataset=[text(number) for number in range(ROWS)], data_collator=collate)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train(resume_from_checkpoint=resume)
    return list(trained)


trained = []
for strategy in ("random", "group_by_length"):
    shutil.rmtree("run", ignore_errors=True)
    undisturbed = train(strategy)
    assert undisturbed == train(strategy)
    for batch in (5, 20, 30):
        after = train(strategy, f"run/checkpoint-{batch}")
        whole = undisturbed[:batch] + after
        begin = batch // EPOCH * EPOCH
        counts = [sum(number in rows for rows in whole[begin : begin + EPOCH]) for number in range(ROWS)]
        print(f"{strategy}, resumed at batch {batch} of 36: equal {whole == undisturbed}; in its epoch {counts.count(2)} of "
              f"{ROWS} rows are trained twice, {counts.count(0)} never")
        assert (whole == undisturbed) == (strategy == "random" or batch < EPOCH)
        assert (counts.count(0) > 0) == (whole != undisturbed)
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/grouped_resume.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
