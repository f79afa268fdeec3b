"""What the files of raw records have in common: the sources of their runs and fine-tunings, and their form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from biphasic.checkpointing.manifest import newest_first
from biphasic.model.checkpoint import read_record
from biphasic.storage import open_store


class Sources:
    """Distinct sources. A record names one by its index in `rows`."""

    def __init__(self) -> None:
        self.rows = list[dict[str, Any]]()
        """Commit, host, hardware and versions of each."""

    def index(self, about: dict[str, Any]) -> int:
        """Return the index of the source that a fine-tuning's or a checkpoint's record names."""
        source = {key: about[key] for key in ("commit", "host", "hardware", "versions")}
        if source not in self.rows:
            self.rows.append(source)
        return self.rows.index(source)

    def index_of_run(self, run: Path) -> int:
        """Return the index of the source of a run's newest checkpoint."""
        checkpoints = run / "checkpoints"
        newest = next(each.manifest for each in newest_first(open_store(str(checkpoints))) if each.manifest is not None)
        return self.index(read_record(str(checkpoints / newest.path)))


def record_bytes(record: dict[str, Any], *lists: str) -> bytes:
    """Return a record as JSON, with a line for each entry (a named tuple) of the lists that are named."""
    text = json.dumps({**record, **{name: [] for name in lists}}, indent=1)
    for name in lists:
        rows = ",\n".join(f"  {json.dumps(row._asdict())}" for row in record[name])
        text = text.replace(f'"{name}": []', f'"{name}": [\n{rows}\n ]')
    return text.encode() + b"\n"
