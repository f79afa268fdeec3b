"""What a run says of itself, inside every checkpoint: enough to load it, to go on, and to write its model card."""

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

from biphasic.config.load import dump
from biphasic.config.schema import PretrainConfig
from biphasic.config.timeline import span_at, spans
from biphasic.model.language_model import LanguageModel
from biphasic.training.objective_schedule import elapsed

_VERSIONS = ("biphasic", "mosaicml", "mosaicml-streaming", "torch", "transformers")


class RunRecord(Callback):
    """Keeps the record; Composer stores it under this class's name (see `biphasic.model.checkpoint.RECORD`).

    Args:
        config: the run's configuration.
        model: whose architecture is recorded.
        data: what the conversion recorded of the training rows; may be empty.
    """

    def __init__(self, config: PretrainConfig, model: LanguageModel, data: dict[str, Any]):
        self.spans = spans(config.objective.phases, config.max_duration)
        self.record: dict[str, Any] = {
            "config": dump(config),
            "backbone": json.dumps({**model.config.to_diff_dict(), "model_type": model.config.model_type}),
            "command": " ".join(sys.argv),
            "versions": {name: importlib.metadata.version(name) for name in _VERSIONS},
            "hardware": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})",
            "ranks": dist.get_world_size(),
            "batches": 0,
            "rows": 0,
            "tokens": 0,
            "epochs": 0,
            "seconds": 0.0,
            "phases": [{"name": span.phase.name, "batches": 0, "tokens": 0} for span in self.spans],
            "losses": {},
            "data": data,
        }

    def batch_end(self, state: State, logger: Logger) -> None:
        """Count the batch, under the phase that it was trained in."""
        before, record = state.previous_timestamp, self.record
        assert before is not None
        tokens = state.timestamp.token.value
        record["seconds"] += state.timestamp.batch_wct.total_seconds() if state.timestamp.batch_wct else 0.0
        phase = record["phases"][span_at(self.spans, elapsed(before)).index]
        phase["batches"] += 1
        phase["tokens"] += tokens - before.token.value
        now = elapsed(state.timestamp)
        record.update(batches=now.batches, rows=now.rows, tokens=now.tokens, epochs=now.epochs)
        record["losses"].update({name: float(value) for name, value in (state.total_loss_dict or {}).items()})

    def eval_end(self, state: State, logger: Logger) -> None:
        """Keep a validation's losses."""
        label = state.dataloader_label
        for name, metric in state.eval_metrics.get(str(label), {}).items():
            self.record["losses"][f"metrics/{label}/{name}"] = float(metric.compute())

    def state_dict(self) -> dict[str, Any]:
        """The record: plain values only."""
        return json.loads(json.dumps(self.record))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from a checkpoint. What describes this attempt (command, versions, hardware) stays this one's."""
        for name in ("batches", "rows", "tokens", "epochs", "seconds", "losses"):
            self.record[name] = state[name]
        for mine, theirs in zip(self.record["phases"], state["phases"], strict=False):
            mine.update(batches=theirs["batches"], tokens=theirs["tokens"])
