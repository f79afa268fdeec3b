"""Keep the run record, which every checkpoint stores for loading, resuming and model cards."""

import json
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from biphasic.durations import TrainingProgress
from biphasic.model.language_model import LanguageModel
from biphasic.objectives.batch import step_of
from biphasic.objectives.objective import Objective
from biphasic.provenance import provenance


class RunRecord(Callback):
    """Callback that keeps the run record. Composer stores it in checkpoints under this class's name.

    `config` is the configuration as YAML, `objectives` are those of its phases, and `data` is how the data was converted.
    """

    def __init__(self, config: str, objectives: Sequence[Objective], model: LanguageModel, data: dict[str, Any]):
        self._backbone = model.config
        self.record: dict[str, Any] = {
            "config": config,
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
        label = state.dataloader_label
        for name, metric in state.eval_metrics.get(str(label), {}).items():
            self.record["losses"][f"metrics/{label}/{name}"] = float(metric.compute())

    def state_dict(self) -> dict[str, Any]:
        # One string: PyTorch would store a dictionary's entries one by one, and a run that starts from a sharded checkpoint
        # would need to have the same ones, such as the same number of phases. A phase may have changed the rotary positions.
        backbone = json.dumps({**self._backbone.to_diff_dict(), "model_type": self._backbone.model_type})
        return {"record": json.dumps({**self.record, "backbone": backbone})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        previous = json.loads(state["record"])
        for name in ("batches", "rows", "tokens", "epochs", "seconds", "losses"):
            self.record[name] = previous[name]
        for phase, stored in zip(self.record["phases"], previous["phases"], strict=False):
            phase.update(batches=stored["batches"], tokens=stored["tokens"])
