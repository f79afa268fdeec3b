"""Which checkpoint a run goes on from."""

from __future__ import annotations

import logging
import re
import zipfile
from pathlib import Path

FILENAME = "ba{batch}-rank{rank}.pt"
"""Name of a monolithic checkpoint; a sharded one is a folder that Composer names `ep…-ba…`."""
_NAME = re.compile(r"^(?:ep\d+-)?ba(\d+)(?:-rank0\.pt)?$")
_log = logging.getLogger(__name__)


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the latest batch that is complete; a damaged or unfinished one is passed over with a warning.

    The folder is listed, rather than a `latest` link followed: a link can point to what was never finished.

    Args:
        folder: where a run saves; it need not exist.
    """
    if not folder.is_dir():
        return None
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.match(path.name))]
    for _, path in sorted(found, reverse=True):
        if (reason := _incomplete(path)) is None:
            return path
        _log.warning("checkpoint %s is passed over: %s", path, reason)
    return None


def _incomplete(path: Path) -> str | None:
    if path.is_dir():
        # Torch's distributed checkpoints write this file last, when every rank's part is there.
        return None if (path / ".metadata").is_file() else "it has no .metadata, so it was not finished"
    try:
        # torch.save writes a zip archive, whose directory comes last.
        with zipfile.ZipFile(path):
            return None
    except (zipfile.BadZipFile, OSError) as error:
        return f"it was not finished ({error})"
