#!/usr/bin/env bash
# peft 0.21.2, transformers 5.23.0: a LoRA adapter of EuroBertForSequenceClassification is saved without one of its new layers.
#
# Expected: with task_type SEQ_CLS the layers that transformers adds to an encoder as a classifier are trained and saved with the adapter,
# so that the loaded adapter predicts what the trained model predicted. So it is with token classification.
# Seen: peft recognizes such layers by the names "classifier" and "score". EuroBERT's classifier has another layer before these, "dense",
# which has random weights in each process that loads the encoder: it is neither trained nor saved, and after loading another one is used.
# Here all training texts are right before saving and a third after loading, which is chance. ModernBERT's "head" is lost likewise if the folder
# holds the encoder alone; folders of its masked language model have it. modules_to_save=["dense", "classifier"] gives equal predictions.
# Transformers warns of new weights as for each classifier; nothing else does.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(peft==0.21.2 transformers==5.23.0 torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/adapter.py" <<'PYTHON'
import sys
import tempfile

import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import EuroBertConfig, ModernBertConfig

sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
special_tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
eurobert = EuroBertConfig(num_key_value_heads=4, **sizes, **special_tokens)
modernbert = ModernBertConfig(cls_token_id=1, sep_token_id=2, **sizes, **special_tokens)
torch.manual_seed(0)
input_ids = torch.randint(3, 64, (48, 12))
labels = input_ids[:, 0] % 3


def accuracies(pretrained, classifier_class, targets, modules_to_save=None):
    """The share of right labels after training, and after the adapter is loaded by what could be another process."""
    with tempfile.TemporaryDirectory() as encoder, tempfile.TemporaryDirectory() as adapter:
        pretrained.save_pretrained(encoder)
        torch.manual_seed(1)
        lora = LoraConfig(task_type="SEQ_CLS", target_modules=targets, r=4, modules_to_save=modules_to_save)
        model = get_peft_model(classifier_class.from_pretrained(encoder, num_labels=3), lora)
        optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
        for _ in range(150):
            model(input_ids=input_ids, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(adapter)
        torch.manual_seed(2)
        loaded = PeftModel.from_pretrained(classifier_class.from_pretrained(encoder, num_labels=3), adapter)
        return [
            (each.eval()(input_ids=input_ids).logits.argmax(-1) == labels).float().mean().item() for each in (model, loaded)
        ]


print("peft", peft.__version__, "transformers", transformers.__version__, "torch", torch.__version__)
print("expected: the loaded adapter is right as often as the trained model")
base, classifier = transformers.EuroBertModel(eurobert), transformers.EuroBertForSequenceClassification
loses = {}
for name, arguments in {
    "EuroBERT": (base, classifier, ["q_proj", "v_proj"]),
    "EuroBERT, modules_to_save": (base, classifier, ["q_proj", "v_proj"], ["dense", "classifier"]),
    "ModernBERT, encoder": (
        transformers.ModernBertModel(modernbert), transformers.ModernBertForSequenceClassification, ["Wqkv"]
    ),
    "ModernBERT, masked language model": (
        transformers.ModernBertForMaskedLM(modernbert), transformers.ModernBertForSequenceClassification, ["Wqkv"]
    ),
}.items():
    trained, loaded = accuracies(*arguments)
    print(f"seen: {name}: {trained:.2f} trained, {loaded:.2f} loaded")
    loses[name] = trained - loaded > 0.2
sys.exit(list(loses.values()) != [True, False, True, False])
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/adapter.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
