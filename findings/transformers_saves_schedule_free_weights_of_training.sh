#!/usr/bin/env bash
# transformers 5.23.0, schedulefree 1.4.1: Trainer saves the weights of a schedule-free optimizer that are not for use.
#
# Expected: with `optim="schedule_free_adamw"`, Trainer's checkpoints and saved model have the averaged weights, which the optimizer's `eval()` sets and
# which schedulefree says to save, whether Trainer evaluates or not.
# Seen: only an evaluation calls `eval()`. A run without evaluations saves the points at which gradients were taken; the same run with an evaluation
# before each save saves the averaged weights. So does the model that both end with.
#
# Checked on 2026-12-01, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(transformers==5.23.0 accelerate==1.15.0 schedulefree==1.4.1 torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/weights.py" <<'PYTHON'
import tempfile
import warnings

import torch
import transformers
from safetensors.torch import load_file
from transformers import BertConfig, BertForSequenceClassification, PrinterCallback, Trainer, TrainingArguments

warnings.simplefilter("ignore")
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        tokens = torch.randint(5, 40, (8,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.sum() % 2}


def train(folder, evaluations):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    arguments = TrainingArguments(
        folder, max_steps=12, per_device_train_batch_size=8, optim="schedule_free_adamw", learning_rate=0.01,
        lr_scheduler_type="constant", save_strategy="steps", save_steps=6, eval_strategy=evaluations, eval_steps=6, seed=1,
        use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no",
    )
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=Rows(), eval_dataset=Rows())
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model(f"{folder}/final")
    optimizer, weights = trainer.optimizer.optimizer, {}
    for mode in ("train", "eval"):
        getattr(optimizer, mode)()
        weights[mode] = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    return weights, [load_file(f"{folder}/{place}/model.safetensors") for place in ("checkpoint-12", "final")]


def difference(first, second):
    return max(float((first[name] - second[name]).abs().max()) for name in first)


from importlib.metadata import version

print("transformers", transformers.__version__, "schedulefree", version("schedulefree"))
print("expected: the saved weights are the averaged ones, of the optimizer's eval()")
for evaluations in ("no", "steps"):
    with tempfile.TemporaryDirectory() as folder:
        weights, saved = train(folder, evaluations)
        for place, each in zip(("checkpoint-12", "the saved model"), saved):
            averaged, training = difference(each, weights["eval"]), difference(each, weights["train"])
            print(f"eval_strategy={evaluations!r}, {place}: {averaged:.4f} from the averaged weights, {training:.4f} from those of training")
            assert (averaged < 1e-6) == (evaluations == "steps") and (training < 1e-6) == (evaluations == "no")
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/weights.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
