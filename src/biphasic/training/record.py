"""Keep the run record, which every checkpoint stores for loading, resuming and model cards."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from biphasic.checkpointing.schedule import elapsed
from biphasic.config.data import read_conversions
from biphasic.config.load import dump
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.timeline import resolve_phases
from biphasic.data.conversion_checks import row_problems
from biphasic.data.tokenizer import Tokenizer
from biphasic.errors import UserError
from biphasic.model.language_model import LanguageModel
from biphasic.training.step import PreparedBatch

_VERSIONS = ("biphasic", "mosaicml", "mosaicml-streaming", "torch", "transformers")


class RunRecord(Callback):
    """Callback that keeps the run record. Composer stores it in checkpoints under this class's name.

    `data` is the result of `conversion_record`.
    """

    def __init__(self, config: PretrainConfig, model: LanguageModel, data: dict[str, Any]):
        phases = [span.phase.name for span in resolve_phases(config.objective.phases, config.max_duration)]
        self.record: dict[str, Any] = {
            "config": dump(config),
            "backbone": json.dumps({**model.config.to_diff_dict(), "model_type": model.config.model_type}),
            "command": " ".join(sys.argv),
            "versions": {name: importlib.metadata.version(name) for name in _VERSIONS},
            "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})",
            "ranks": dist.get_world_size(),
            **{"batches": 0, "rows": 0, "tokens": 0, "epochs": 0, "seconds": 0.0},
            "phases": [{"name": name, "batches": 0, "tokens": 0} for name in phases],
            "losses": {},
            "data": data,
        }

    def batch_end(self, state: State, logger: Logger) -> None:
        """Count the batch in the run's and its phase's totals, and record its losses."""
        batch: PreparedBatch = state.batch  # pyright: ignore[reportAssignmentType]
        previous, record = state.previous_timestamp, self.record
        assert previous is not None and batch.phase is not None
        record["seconds"] += state.timestamp.batch_wct.total_seconds() if state.timestamp.batch_wct else 0.0
        phase = record["phases"][batch.phase]
        phase["batches"] += 1
        phase["tokens"] += state.timestamp.token.value - previous.token.value
        now = elapsed(state.timestamp)
        record.update(batches=now.batches, rows=now.rows, tokens=now.tokens, epochs=now.epochs)
        record["losses"].update({name: float(value) for name, value in (state.total_loss_dict or {}).items()})

    def eval_end(self, state: State, logger: Logger) -> None:
        """Record the validation losses."""
        label = state.dataloader_label
        for name, metric in state.eval_metrics.get(str(label), {}).items():
            self.record["losses"][f"metrics/{label}/{name}"] = float(metric.compute())

    def state_dict(self) -> dict[str, Any]:
        """Return the record as one string of JSON.

        PyTorch would store a dictionary's entries one by one, and a run that starts from a sharded checkpoint would
        need to have the same entries, such as the same number of phases.
        """
        return {"record": json.dumps(self.record)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a checkpoint's counts and losses. Command, versions and hardware stay those of this attempt."""
        previous = json.loads(state["record"])
        for name in ("batches", "rows", "tokens", "epochs", "seconds", "losses"):
            self.record[name] = previous[name]
        for phase, stored in zip(self.record["phases"], previous["phases"], strict=False):
            phase.update(batches=stored["batches"], tokens=stored["tokens"])


def conversion_record(config: PretrainConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Read how the training data was converted, for the run record; empty if no stream has a conversion record.

    Raises:
        UserError: a stream was converted with another tokenizer or sequence length.
    """
    streams: dict[str, dict[str, Any]] = {}
    conversions = read_conversions(config.data)
    if problems := row_problems(config, conversions, tokenizer):
        raise UserError("\n".join(problems))
    for key, conversion in conversions.items():
        record = conversion.record
        counts = {name: conversion.split[name] for name in ("tokens", "rows", "documents") if name in conversion.split}
        source, commit = record.get("config", {}).get("source"), record.get("source", {}).get("commit")
        if isinstance(source, dict) and commit is not None:
            # The YAML may name a branch, which may have moved since the conversion.
            source = {**source, "revision": commit}
        streams[key] = {"source": source, **counts}
    if not streams:
        return {}
    if config.data.mix is None:
        return {"tokenizer_sha256": tokenizer.sha256, **streams["data.train"]}
    names = {key: key.rpartition(".")[2] for key in streams}
    shares = [f"{names[key]} ({config.data.mix[names[key]].proportion:.4g})" for key in streams]
    counted = set.intersection(*(set(counts) for counts in streams.values())) - {"source"}
    return {
        "tokenizer_sha256": tokenizer.sha256,
        "source": f"a mix of {', '.join(shares)}",
        **{name: sum(counts[name] for counts in streams.values()) for name in sorted(counted)},
        "mix": {names[key]: counts for key, counts in streams.items()},
    }
