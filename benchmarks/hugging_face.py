"""The other side of peers.py, finetuning.py and retrieval.py, each in a process of its own.

Models, collators and Trainers are those of run_clm.py, run_mlm.py, run_glue.py and of sentence-transformers.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import retrieval
import torch
import torch.nn.functional as F
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from workload import EOS, MASKING_RATIO, PHASES, SPECIAL, Shape, documents, feed_forward

import finetuning

SETTINGS: dict[str, Any] = {
    "use_cpu": True, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-5, "weight_decay": 0.1, "max_grad_norm": 1.0,
    "save_strategy": "no", "logging_strategy": "no", "report_to": [], "disable_tqdm": True,
}  # fmt: skip
"""Those of Biphasic's trainings."""


class Clock(TrainerCallback):
    """Records the start of the first step and the end of each step."""

    def __init__(self) -> None:
        self.began = 0.0
        self.ends: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = self.began or time.time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append(time.time())

    @property
    def seconds(self) -> list[float]:
        """Of each step after the first."""
        return np.diff(self.ends).tolist()


class Counting:
    """A collator that counts the real tokens of each microbatch. The loader reads ahead, in the order of the steps."""

    def __init__(self, collate: Any):
        self.collate, self.tokens = collate, list[int]()

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = dict(self.collate(samples))
        batch.pop("special_tokens_mask", None)  # the collator for CLM keeps it
        self.tokens.append(int(batch["attention_mask"].sum()))
        return batch


class MaskedLlama(nn.Module):
    """A bidirectional Llama with a head over all positions, as in Hugging Face's ForMaskedLM classes."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        config.is_causal = False  # pyright: ignore[reportAttributeAccessIssue] - transformers reads it when it builds masks
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        nn.init.normal_(self.lm_head.weight, std=config.initializer_range)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Loss (mean over the positions with a label, nats) and logits; all arguments are [batch, length]."""
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        logits = self.lm_head(hidden)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def llama(shape: Shape) -> LlamaConfig:
    """Biphasic's configuration with Hugging Face's sdpa attention."""
    values: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": EOS}
    return LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=feed_forward(shape.width),
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, max_position_embeddings=shape.length,
        rms_norm_eps=1e-5, tie_word_embeddings=False, attn_implementation="sdpa", **values,
    )  # fmt: skip


def samples(way: str, shape: Shape) -> tuple[list[np.ndarray], int]:
    """Token ids of each sample, and the samples in a microbatch with about as many real tokens as Biphasic's.

    `padded`: one document per sample, truncated to the row's length; `packed`: all documents joined and cut.
    """
    texts = documents(shape)
    if way == "packed":
        joined = np.concatenate(texts)
        rows = [joined[start : start + shape.length] for start in range(0, len(joined) - shape.length + 1, shape.length)]
        return rows, shape.microbatch
    truncated = [text[: shape.length] for text in texts]
    mean = sum(map(len, truncated)) / len(truncated)
    return truncated, max(1, round(shape.microbatch * shape.length / mean))


def train(phase: str, way: str, folder: Path, shape: Shape) -> dict[str, Any]:
    """Train one phase from initial weights: the fields of `workload.Run`, except `started`; one mean loss of all steps."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    rows, size = samples(way, shape)
    # Columns as run_clm.py and run_mlm.py have them.
    columns = {
        "input_ids": [row.tolist() for row in rows],
        "attention_mask": [[1] * len(row) for row in rows],
        "special_tokens_mask": [(row < len(SPECIAL)).astype(int).tolist() for row in rows],
    }
    torch.manual_seed(shape.seed)
    masks: dict[str, Any] = {"mlm": False}
    if phase == "mlm":  # always the mask token, as in Biphasic
        masks = {"mlm_probability": MASKING_RATIO, "mask_replace_prob": 1.0, "random_replace_prob": 0.0}
    clock, accumulated = Clock(), shape.rows // shape.microbatch
    collator = Counting(DataCollatorForLanguageModeling(tokenizer, **masks))
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=shape.steps, per_device_train_batch_size=size,
        gradient_accumulation_steps=accumulated, optim="adamw_torch", learning_rate=5e-4,
        lr_scheduler_type="constant_with_warmup", warmup_steps=2, seed=shape.seed, remove_unused_columns=False, **SETTINGS,
    )  # fmt: skip
    trainer = Trainer(
        model=LlamaForCausalLM(llama(shape)) if phase == "clm" else MaskedLlama(llama(shape)),
        args=arguments,
        train_dataset=Dataset.from_dict(columns),
        data_collator=collator,
        callbacks=[clock],
    )
    mean = trainer.train().training_loss
    tokens = [
        sum(collator.tokens[first : first + accumulated]) for first in range(0, shape.steps * accumulated, accumulated)
    ]
    return {"began": clock.began, "ends": clock.ends, "tokens": tokens, "losses": [mean]}


def pretrain(folder: Path, way: str) -> dict[str, Any]:
    """Train both phases: the fields of `workload.Run` except `started`."""
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
    return both


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


def classify(folder: Path, model: str, seed: int, way: str) -> dict[str, Any]:
    """Train and score: seconds and tokens of each step after the first, accuracy, last loss."""
    shape = finetuning.Shape(**json.loads((folder / "shape.json").read_text()))
    tokenizer = AutoTokenizer.from_pretrained(folder / model)

    def read(split: str) -> Dataset:
        columns = pq.read_table(folder / "set" / f"{split}.parquet").to_pydict()
        ids = tokenizer(columns["text"], truncation=True, max_length=shape.longest)
        return Dataset.from_dict({"input_ids": ids["input_ids"], "attention_mask": ids["attention_mask"],
                                  "labels": columns["label"]})  # fmt: skip

    torch.manual_seed(seed)
    clock, collator = Clock(), Counting(DataCollatorWithPadding(tokenizer))
    arguments = TrainingArguments(
        output_dir=str(folder / f"trainer-{model}-{way}-{seed}"), max_steps=shape.steps, seed=seed,
        per_device_train_batch_size=32, per_device_eval_batch_size=32, learning_rate=1e-3, lr_scheduler_type="linear",
        warmup_steps=0.1, train_sampling_strategy="group_by_length" if way == "grouped" else "random", **SETTINGS,
    )  # fmt: skip
    trainer = Trainer(
        model=Classifier(model, folder), args=arguments, train_dataset=read("train"), data_collator=collator,
        callbacks=[clock],
    )  # fmt: skip
    loss = trainer.train().training_loss
    tokens = collator.tokens[1 : shape.steps]
    prediction: Any = trainer.predict(read("test"))  # pyright: ignore[reportArgumentType]
    accuracy = float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())
    return {"seconds": clock.seconds, "tokens": tokens, "accuracy": accuracy, "loss": loss}


def ndcg(model: Any, folder: Path) -> float:
    from biphasic.evaluation.search import rank_documents, retrieval_scores

    queries, corpus, qrels = (pq.read_table(folder / f"{name}.parquet").to_pydict() for name in
                              ("queries", "corpus", "qrels/test"))  # fmt: skip
    vectors = [model.encode(table["text"], convert_to_tensor=True).float() for table in (queries, corpus)]
    ranking = rank_documents(queries["_id"], vectors[0], corpus["_id"], vectors[1])
    judged = {query: {document: 1} for query, document in zip(qrels["query-id"], qrels["corpus-id"], strict=True)}
    return retrieval_scores(ranking, judged)["ndcg_at_10"]


def retrieve(folder: Path, seed: int) -> dict[str, Any]:
    """Train and score with sentence-transformers: seconds of each step after the first, NDCG@10, last loss."""
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )

    shape = retrieval.Shape(**json.loads((folder / "shape.json").read_text()))
    model = SentenceTransformer(str(folder / "llama"), device="cpu")
    model.max_seq_length = shape.longest
    columns = pq.read_table(folder / "pairs" / "train.parquet").to_pydict()
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder / f"sentence-transformers-{seed}"), max_steps=shape.steps, seed=seed,
        per_device_train_batch_size=shape.batch, learning_rate=1e-3, lr_scheduler_type="linear",
        warmup_steps=0.1, **SETTINGS,
    )  # fmt: skip
    clock = Clock()
    # With mini_batch_num_tokens, for models that avoid padding, its steps take 1.9 times as long here.
    loss = losses.CachedMultipleNegativesRankingLoss(model, scale=20.0, mini_batch_size=shape.texts)
    dataset = Dataset.from_dict({name: columns[name] for name in ("query", "positive")})
    torch.manual_seed(seed)
    trainer = SentenceTransformerTrainer(model, arguments, dataset, loss=loss, callbacks=[clock])
    last = trainer.train().training_loss
    return {"seconds": clock.seconds, "ndcg": ndcg(model, folder / "pairs"), "loss": last}


def main(part: str, folder: str, *rest: str) -> None:
    *options, out = rest
    if part == "pretrain":
        results = pretrain(Path(folder), options[0])
    elif part == "classify":
        results = classify(Path(folder), options[0], int(options[1]), options[2])
    else:
        results = retrieve(Path(folder), int(options[0]))
    Path(out).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
