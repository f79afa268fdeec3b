"""Keep the run record, which every checkpoint stores for loading, resuming and model cards."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from biphasic.config.conversion_checks import row_problems
from biphasic.config.load import dump
from biphasic.config.phase_inputs import PhaseInputs, sources
from biphasic.config.pretrain import PretrainConfig
from biphasic.data.streams import StreamRecord
from biphasic.data.tokenizer import Tokenizer
from biphasic.durations import TrainingProgress
from biphasic.errors import UserError
from biphasic.model.language_model import LanguageModel
from biphasic.objectives.batch import step_of
from biphasic.provenance import provenance


class RunRecord(Callback):
    """Callback that keeps the run record. Composer stores it in checkpoints under this class's name.

    `data` is the result of `conversion_record`.
    """

    def __init__(self, config: PretrainConfig, model: LanguageModel, data: dict[str, Any]):
        objectives = [phase.objective for phase in config.objective.phases]
        self._backbone = model.config
        self.record: dict[str, Any] = {
            "config": dump(config),
            "command": shlex.join(sys.argv),
            **provenance(),
            "ranks": dist.get_world_size(),
            **{"batches": 0, "rows": 0, "tokens": 0, "epochs": 0, "seconds": 0.0},
            "phases": [
                {"name": each.name, "words": each.words, "causal": each.causal, "batches": 0, "tokens": 0}
                for each in objectives
            ],
            "losses": {},
            "data": data,
        }

    def batch_end(self, state: State, logger: Logger) -> None:
        """Count the batch in the run's and its phase's totals, and record its losses, which replace those before it."""
        batch: Any = state.batch
        index = step_of(batch).phase
        previous, record = state.previous_timestamp, self.record
        assert previous is not None and index is not None
        record["seconds"] += state.timestamp.batch_wct.total_seconds() if state.timestamp.batch_wct else 0.0
        phase = record["phases"][index]
        phase["batches"] += 1
        phase["tokens"] += state.timestamp.token.value - previous.token.value
        now = TrainingProgress.of(state.timestamp)
        record.update(batches=now.batches, rows=now.rows, tokens=now.tokens, epochs=now.epochs)
        # An earlier objective's loss would stay that of its last batch.
        kept = {name: value for name, value in record["losses"].items() if not name.startswith("loss/train/")}
        record["losses"] = kept | {name: float(value) for name, value in (state.total_loss_dict or {}).items()}

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
        # A phase may have changed the rotary positions.
        backbone = json.dumps({**self._backbone.to_diff_dict(), "model_type": self._backbone.model_type})
        return {"record": json.dumps({**self.record, "backbone": backbone})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a checkpoint's counts and losses. Command and provenance stay those of this attempt."""
        previous = json.loads(state["record"])
        for name in ("batches", "rows", "tokens", "epochs", "seconds", "losses"):
            self.record[name] = previous[name]
        for phase, stored in zip(self.record["phases"], previous["phases"], strict=False):
            phase.update(batches=stored["batches"], tokens=stored["tokens"])


def conversion_record(
    config: PretrainConfig, tokenizer: Tokenizer, conversions: dict[str, StreamRecord]
) -> dict[str, Any]:
    """Return how the training data was converted, for the run record; empty if no stream has a conversion record.

    Raises:
        UserError: a stream was converted with another tokenizer or sequence length.
    """
    if problems := row_problems(config, conversions, tokenizer):
        raise UserError("\n".join(problems))
    if not conversions:
        return {}
    first, *later = (_data_record(each, conversions) for each in sources(config.inputs))
    record = {"tokenizer_sha256": tokenizer.sha256, **first}
    if any(conversion.record.get("config", {}).get("add_bos") for conversion in conversions.values()):
        record["add_bos"] = True
    return {**record, "later": later} if later else record


def _data_record(inputs: PhaseInputs, conversions: dict[str, StreamRecord]) -> dict[str, Any]:
    """Return source and size of a phase's data, as far as its streams have records."""
    streams: dict[str, dict[str, Any]] = {}
    for key in filter(conversions.__contains__, inputs.streams):
        conversion = conversions[key]
        record = conversion.record
        counts = {name: conversion.split[name] for name in ("tokens", "rows", "documents") if name in conversion.split}
        source, commit = record.get("config", {}).get("source"), record.get("source", {}).get("commit")
        if isinstance(source, dict) and commit is not None:
            # The YAML may name a branch, which may have moved since the conversion.
            source = {**source, "revision": commit}
        streams[key.rpartition(".")[2]] = {"source": source, **counts}
    if inputs.data.mix is None or not streams:
        return streams.get("train", {})
    shares = [f"{name} ({inputs.data.mix[name].proportion:.4g})" for name in sorted(streams)]
    counted = set.intersection(*(set(counts) for counts in streams.values())) - {"source"}
    return {
        "source": f"a mix of {', '.join(shares)}",
        **{name: sum(counts[name] for counts in streams.values()) for name in sorted(counted)},
        "mix": streams,
    }
