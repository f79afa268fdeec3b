"""Metrics as a file of lines: one JSON object for each batch."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, TextIO

from composer.core import State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist


class JSONLLogger(LoggerDestination):
    """Writes `{"batch": …, "tokens": …, "time": …, metric: value, …}` lines; only the first rank does.

    `batch` counts the batches that are done, `tokens` theirs, `time` is seconds since the epoch. A resumed run appends, so
    a batch that an earlier attempt had trained stands there twice: `read_metrics` takes the last.

    Args:
        path: the file; its folder is made.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.file: TextIO | None = None
        self.pending: dict[str, float] = {}

    def init(self, state: State, logger: Logger) -> None:
        """Open the file."""
        if dist.get_global_rank() == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("a", encoding="utf-8")

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keep numbers until the batch is over."""
        for name, value in metrics.items():
            try:
                self.pending[name] = float(value)
            except (TypeError, ValueError):
                continue

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write the batch's line."""
        self._write(state)

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Write what a validation found, under the batch that it followed."""
        self._write(state)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write what is left."""
        self._write(state)

    def _write(self, state: State) -> None:
        if self.file is not None and self.pending:
            when = {"batch": state.timestamp.batch.value, "tokens": state.timestamp.token.value, "time": time.time()}
            self.file.write(json.dumps({**when, **self.pending}) + "\n")
            self.file.flush()
        self.pending = {}

    def post_close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()
            self.file = None


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The metrics of each batch, in order; of what several attempts wrote, the last. A torn last line is left out."""
    found: dict[int, dict[str, Any]] = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        # A validation's line follows its batch's line and adds to it, but not its time; a batch trained again begins anew.
        before = {} if "loss/train/total" in entry else found.get(entry["batch"], {})
        found[entry["batch"]] = {**before, **entry, "time": before.get("time", entry["time"])}
    return [found[batch] for batch in sorted(found)]
