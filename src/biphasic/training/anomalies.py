"""Record batches with NaN or Inf, and loss spikes, with the ids of their rows."""

import json
import statistics
from collections import deque
from pathlib import Path
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from biphasic.objectives.batch import step_of
from biphasic.ranks import is_first_rank

ANOMALOUS_BATCHES = "anomalous_batches.jsonl"
_THRESHOLD, _WINDOW, _MIN_LOSSES = 1.5, 100, 20


def phase_of(batch: Any) -> int | None:
    """Return the phase of a batch; None in fine-tuning, which has no phases."""
    return step_of(batch).phase if "step" in batch else None


class AnomalyLog:
    """Writes a line of JSON for each anomalous batch to the run's folder, on rank 0.

    `biphasic show FOLDER/config.yaml ID ...` prints the rows' text; another YAML may have other data.
    """

    def __init__(self, folder: Path):
        self.file = folder / ANOMALOUS_BATCHES

    def write(self, state: State, fields: dict[str, Any], batch: int | None = None) -> list[int]:
        """Write a line about the current batch, with its number or `batch`. Return the ids of its rows on all ranks."""
        rows: Any = state.batch
        local = rows["row_ids"].tolist()
        row_ids = [row for rank in dist.all_gather_object(local) for row in rank]
        if is_first_rank():
            batch = int(state.timestamp.batch) if batch is None else batch
            phase = phase_of(rows)
            when = {"batch": batch, "epoch": int(state.timestamp.epoch), **({} if phase is None else {"phase": phase})}
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as out:
                out.write(json.dumps({**when, **fields, "rows": row_ids}) + "\n")
        return row_ids


class SpikeDetector(Callback):
    """Callback that records losses above 1.5 times the median of the phase's last 100 batches.

    It logs `loss/spike`, the loss divided by the median.
    """

    def __init__(self, anomalies: AnomalyLog):
        self.anomalies = anomalies
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._phase = -1

    def batch_end(self, state: State, logger: Logger) -> None:
        phase = phase_of(state.batch) or 0
        if phase != self._phase:
            self._phase = phase
            self._losses.clear()
        loss: float | None = (state.total_loss_dict or {}).get("loss/train/total")
        if loss is None or loss != loss:
            return
        if len(self._losses) >= _MIN_LOSSES and loss > _THRESHOLD * (median := statistics.median(self._losses)):
            logger.log_metrics({"loss/spike": loss / median})
            # Composer has counted the batch already.
            self.anomalies.write(state, {"anomaly": "spike", "loss": loss, "median": median}, int(state.timestamp.batch) - 1)
        self._losses.append(loss)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "phase": self._phase}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._losses, self._phase = deque(state["losses"], maxlen=_WINDOW), state["phase"]
