"""Hugging Face's part of `peers.py`: models and Trainer as in run_clm.py and run_mlm.py."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from workload import EOS, MASKING_RATIO, PHASES, SPECIAL, Shape, documents, feed_forward


class MaskedLlama(nn.Module):
    """A bidirectional Llama with a head over all positions, as in Hugging Face's ForMaskedLM classes."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        config.is_causal = False  # pyright: ignore[reportAttributeAccessIssue] - transformers reads it when it builds masks
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        nn.init.normal_(self.lm_head.weight, std=config.initializer_range)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Loss (mean over the positions with a label, nats) and logits.

        Args:
            input_ids: int64 [batch, length].
            attention_mask: [batch, length], 0 at padding.
            labels: int64 [batch, length], -100 where nothing is predicted.
        """
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        logits = self.lm_head(hidden)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def llama(shape: Shape) -> LlamaConfig:
    """Biphasic's configuration with Hugging Face's sdpa attention."""
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=feed_forward(shape.width),
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=shape.length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,  # pyright: ignore[reportArgumentType]
        eos_token_id=EOS,
        attn_implementation="sdpa",
    )


def samples(way: str, shape: Shape) -> tuple[list[np.ndarray], int]:
    """Token ids of each sample, and the samples in a microbatch with about as many real tokens as Biphasic's.

    Args:
        way: `padded`: one document per sample, truncated to the row's length; `packed`: all documents joined and cut.
        shape: of the documents and rows.
    """
    texts = documents(shape)
    if way == "packed":
        joined = np.concatenate(texts)
        rows = [
            joined[start : start + shape.length] for start in range(0, len(joined) - shape.length + 1, shape.length)
        ]
        return rows, shape.microbatch
    truncated = [text[: shape.length] for text in texts]
    mean = sum(map(len, truncated)) / len(truncated)
    return truncated, max(1, round(shape.microbatch * shape.length / mean))


class _Clock(TrainerCallback):
    """Records the start of the first step and the end of each step."""

    def __init__(self) -> None:
        self.began = 0.0
        self.ends: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = self.began or time.time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append(time.time())


class _Collator:
    """Hugging Face's collator; counts the real tokens of each microbatch."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, phase: str):
        masks: dict[str, Any] = {"mlm": False}
        if phase == "mlm":
            # Always the mask token, as in Biphasic.
            masks = {"mlm_probability": MASKING_RATIO, "mask_replace_prob": 1.0, "random_replace_prob": 0.0}
        self.collate = DataCollatorForLanguageModeling(tokenizer, **masks)
        self.tokens: list[int] = []

    def __call__(self, chosen: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = dict(self.collate(chosen))
        # The collator for CLM keeps it.
        batch.pop("special_tokens_mask", None)
        self.tokens.append(int(batch["attention_mask"].sum()))
        return batch


def train(phase: str, way: str, folder: Path, shape: Shape) -> dict[str, Any]:
    """Train one phase from initial weights.

    Args:
        phase: `clm` or `mlm`.
        way: `padded` or `packed`.
        folder: with the tokenizer; the Trainer's own folder is made in it.
        shape: what is trained.

    Returns:
        `began` (the first step) and `ends` (of each), seconds since the epoch; the real `tokens` of each step;
        `losses`, the one mean over all steps that the Trainer reports.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    rows, size = samples(way, shape)
    # Columns as run_clm.py and run_mlm.py have them.
    columns = {
        "input_ids": [row.tolist() for row in rows],
        "attention_mask": [[1] * len(row) for row in rows],
        "special_tokens_mask": [(row < len(SPECIAL)).astype(int).tolist() for row in rows],
    }
    torch.manual_seed(shape.seed)
    clock, collator, accumulated = _Clock(), _Collator(tokenizer, phase), shape.rows // shape.microbatch
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        use_cpu=True,
        max_steps=shape.steps,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulated,
        optim="adamw_torch",
        learning_rate=5e-4,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-5,
        weight_decay=0.1,
        max_grad_norm=1.0,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        seed=shape.seed,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(llama(shape)) if phase == "clm" else MaskedLlama(llama(shape)),
        args=arguments,
        train_dataset=Dataset.from_dict(columns),
        data_collator=collator,
        callbacks=[clock],
    )
    mean = trainer.train().training_loss
    # The loader reads a microbatch ahead, in the order of the steps.
    tokens = [
        sum(collator.tokens[first : first + accumulated]) for first in range(0, shape.steps * accumulated, accumulated)
    ]
    return {"began": clock.began, "ends": clock.ends, "tokens": tokens, "losses": [mean]}


def run(way: str, folder: Path, out: Path) -> None:
    """Train both phases in this process; writes the fields of `workload.Run` except `started` to `out`.

    Args:
        way: `padded` or `packed`.
        folder: what `workload.prepare` wrote.
        out: the JSON file.
    """
    # One process, even when a launcher's variables are set.
    os.environ.pop("WORLD_SIZE", None)
    shape = Shape(**json.loads((folder / "shape.json").read_text(encoding="utf-8")))
    both: dict[str, Any] = {}
    for phase in PHASES:
        of_phase = train(phase, way, folder, shape)
        if not both:
            both = of_phase
            continue
        # The time between the phases (another model, another Trainer) belongs to no step.
        gap = of_phase["began"] - both["ends"][-1]
        both["ends"] += [end - gap for end in of_phase["ends"]]
        both["tokens"] += of_phase["tokens"]
        both["losses"] += of_phase["losses"]
    out.write_text(json.dumps(both), encoding="utf-8")
