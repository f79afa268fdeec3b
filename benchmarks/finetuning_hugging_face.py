"""Hugging Face's part of `finetuning.py`: models, tokenizer, collator and Trainer as in run_glue.py."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoTokenizer,
    DataCollatorWithPadding,
    LlamaConfig,
    LlamaModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from finetuning import Shape


class Classifier(nn.Module):
    """An encoder over padded batches, the mean of its hidden states, and a two-layer head."""

    def __init__(self, model: str, folder: Path):
        super().__init__()
        self.bidirectional = model == "llama"
        if self.bidirectional:
            # The export's weights in transformers' Llama, with bidirectional attention.
            config = LlamaConfig(**json.loads((folder / model / "config.json").read_text()), attn_implementation="sdpa")
            self.backbone: Any = LlamaModel(config)
            self.backbone.load_state_dict(load_file(folder / model / "model.safetensors"))
            for layer in self.backbone.layers:
                layer.self_attn.is_causal = False
        else:
            self.backbone = AutoModel.from_pretrained(folder / model)
        width: int = self.backbone.config.hidden_size
        self.dense, self.classifier = nn.Linear(width, width), nn.Linear(width, 2)
        for linear in (self.dense, self.classifier):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Loss and logits."""
        mask = attention_mask
        if self.bidirectional and not bool(attention_mask.all()):
            mask = attention_mask.bool()[:, None, None, :].expand(-1, 1, input_ids.shape[1], -1)
        hidden = self.backbone(input_ids=input_ids, attention_mask=mask).last_hidden_state
        kept = attention_mask[..., None].to(hidden.dtype)
        pooled = (hidden * kept).sum(1) / kept.sum(1)
        logits = self.classifier(F.gelu(self.dense(pooled)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class _Clock(TrainerCallback):
    """Records the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append(time.time())


class _Counting:
    """The collator; counts the real tokens of each batch."""

    def __init__(self, tokenizer: Any):
        self.collate, self.tokens = DataCollatorWithPadding(tokenizer), list[int]()

    def __call__(self, samples: list[dict[str, Any]]) -> Any:
        batch = self.collate(samples)
        self.tokens.append(int(batch["attention_mask"].sum()))
        return batch


def run(folder: Path, model: str, seed: int, way: str) -> dict[str, Any]:
    """Train and score: seconds and tokens of each step after the first, accuracy, last loss."""
    shape = Shape(**json.loads((folder / "shape.json").read_text()))
    tokenizer = AutoTokenizer.from_pretrained(folder / model)

    def read(split: str) -> Dataset:
        columns = pq.read_table(folder / "set" / f"{split}.parquet").to_pydict()
        ids = tokenizer(columns["text"], truncation=True, max_length=shape.longest)
        return Dataset.from_dict({"input_ids": ids["input_ids"], "attention_mask": ids["attention_mask"],
                                  "labels": columns["label"]})  # fmt: skip

    torch.manual_seed(seed)
    clock, collator = _Clock(), _Counting(tokenizer)
    arguments = TrainingArguments(
        output_dir=str(folder / f"trainer-{model}-{way}-{seed}"), use_cpu=True, max_steps=shape.steps, seed=seed,
        per_device_train_batch_size=32, per_device_eval_batch_size=32, learning_rate=1e-3,
        adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-5, weight_decay=0.1, max_grad_norm=1.0,
        lr_scheduler_type="linear", warmup_steps=0.1, save_strategy="no", logging_strategy="no", report_to=[],
        disable_tqdm=True, train_sampling_strategy="group_by_length" if way == "grouped" else "random",
    )  # fmt: skip
    trainer = Trainer(
        model=Classifier(model, folder), args=arguments, train_dataset=read("train"), data_collator=collator,
        callbacks=[clock],
    )  # fmt: skip
    loss = trainer.train().training_loss
    # The loader reads ahead, in the order of the steps.
    tokens = collator.tokens[1 : shape.steps]
    prediction: Any = trainer.predict(read("test"))  # pyright: ignore[reportArgumentType]
    accuracy = float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())
    seconds = [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]
    return {"seconds": seconds, "tokens": tokens, "accuracy": accuracy, "loss": loss}


if __name__ == "__main__":
    folder, model, number, way, out = sys.argv[1:]
    Path(out).write_text(json.dumps(run(Path(folder), model, int(number), way)))
