"""Checkpoints in the form that runs write, of untrained networks."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import yaml
from transformers import LlamaConfig

from biphasic.checkpointing.manifest import Manifest
from biphasic.checkpointing.save import ShardWriter
from biphasic.model.language_model import LanguageModel, from_hf_config
from biphasic.storage import file_hash
from helpers.backbones import SMALL
from helpers.tiny import LENGTH, WORDS


def network(**changes: object) -> LanguageModel:
    """A network with grouped-query attention, and weights large enough to make errors visible."""
    values = {
        **SMALL,
        "vocab_size": WORDS,
        "max_position_embeddings": LENGTH,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.2,
    }
    return from_hf_config(LlamaConfig(**{**values, **changes}), seed=1)  # pyright: ignore[reportArgumentType]


def record_of(model: LanguageModel, tokenizer: Path, batch: int, data: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `RunRecord`."""
    config = {
        "run_name": "stored",
        "tokenizer": str(tokenizer),
        "max_duration": f"{batch}ba",
        "global_batch_size": 8,
        "precision": "fp32",
        "model": {},
        "data": {"sequence_length": LENGTH},
        "objective": {"phases": [{"name": "mlm", "masking_ratio": 0.4}]},
        "optimizer": {"name": "adamw", "lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        "schedule": {"warmup": "1ba", "decay": "1ba", "decay_shape": "linear", "final_lr": 0.0},
    }
    objective = {"name": "mlm", "words": "masked language modeling", "causal": False}
    return {
        "config": yaml.safe_dump(config),
        "backbone": json.dumps({**model.config.to_diff_dict(), "model_type": model.config.model_type}),
        "command": "main.py run.yaml",
        "versions": {},
        "hardware": "none",
        "phases": [{**objective, "batches": batch, "tokens": batch * 256}],
        "losses": {},
        "data": dict(data),
        **{"ranks": 1, "batches": batch, "rows": 8 * batch, "tokens": 256 * batch, "epochs": 0, "seconds": 1.0},
    }


def checkpoint_of(
    model: LanguageModel,
    folder: Path,
    tokenizer: Path,
    sharded: bool,
    *,
    batch: int = 40,
    weights: Mapping[str, torch.Tensor] | None = None,
    data: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write a complete checkpoint to `folder`, with optimizer state that is NaN; returns its path."""
    model_state = {f"model.{name}": weight for name, weight in (model.state_dict() if weights is None else weights).items()}
    optimizer_state = {name: torch.full((16,), float("nan")) for name in model_state}
    state = {
        "state": {
            "model": model_state,
            "optimizers": {"AdamW": optimizer_state},
            "callbacks": {"RunRecord": {"record": json.dumps(record_of(model, tokenizer, batch, data))}},
        }
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (f"ep0-ba{batch}" if sharded else f"ba{batch}-rank0.pt")
    if sharded:
        dcp.save(state, storage_writer=ShardWriter(path), no_dist=True)
        files = {f"{path.name}/{file.name}": (file.stat().st_size, file_hash(file)) for file in path.iterdir()}
    else:
        torch.save(state, path)
        files = {path.name: (path.stat().st_size, file_hash(path))}
    manifest = Manifest(batch, path.name, files, {"name": "stored"})
    (folder / manifest.name).write_bytes(manifest.to_bytes())
    return path
