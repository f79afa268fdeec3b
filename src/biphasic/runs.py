"""Show a run's checkpoints, its attempts and why each ended, and the tokens lost between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from biphasic.amounts import format_bytes
from biphasic.checkpointing.manifest import StoredCheckpoint, batch_of, list_checkpoints
from biphasic.checkpointing.run_lock import read_attempts
from biphasic.errors import UserError
from biphasic.storage import first_line, is_remote, join, open_store


def print_report(folder: str) -> None:
    """Print the report about a run's folder, or about the folder or bucket prefix where it saves.

    Raises:
        UserError: the folder can't be read or contains no run.
    """
    destination = checkpoint_destination(folder)
    try:
        print("\n".join(report(destination)))
    except (UserError, OSError) as error:
        if destination != folder and is_remote(destination):
            print("\n".join(_local_report(join(folder, "checkpoints"))))
        if isinstance(error, UserError | BrokenPipeError):
            raise
        raise UserError(f"{destination}: can't be read ({first_line(error)})") from None


def checkpoint_destination(folder: str) -> str:
    """Return the folder or bucket prefix to which a run saves checkpoints; `folder` itself if it has no `config.yaml`."""
    file = Path(folder) / "config.yaml"
    if is_remote(folder) or not file.is_file():
        return folder
    section = yaml.safe_load(file.read_text(encoding="utf-8")).get("checkpoint") or {}
    return section.get("folder") or join(folder, "checkpoints")


def report(path: str) -> list[str]:
    """Return the lines about the checkpoints and attempts in a folder or a bucket prefix.

    Raises:
        UserError: the folder contains no run.
        OSError: the folder can't be read.
    """
    place = open_store(path)
    checkpoints, attempts = list_checkpoints(place), read_attempts(place)
    if not checkpoints and not attempts:
        raise UserError(f"{path}: no checkpoints and no attempts of a run are here")
    sizes = {name: file.bytes for name, file in place.list().items()}
    lines = [path, "", f"{'batch':>10}  {'tokens':>16}  {'phase':6} {'bytes':>9}  checkpoint"]
    lines += [_checkpoint_line(checkpoint, sizes) for checkpoint in reversed(checkpoints)]
    lines += ["", "attempts"] if attempts else []
    for index, attempt in enumerate(attempts):
        lines += _attempt_lines(index + 1, attempt)
        # An attempt that failed before it found its checkpoint has lost nothing.
        later = (start for after in attempts[index + 1 :] if (start := after["from"]) is not None)
        if (start := next(later, None)) is not None:
            lines.append(f"     {_lost_tokens(attempt, start)}")
    return lines


def _local_report(folder: str) -> list[str]:
    """Return the lines about local copies of checkpoints, for a bucket that can't be read."""
    place = open_store(folder)
    sizes = {name: file.bytes for name, file in place.list().items()}
    batches = [checkpoint.batch for checkpoint in list_checkpoints(place)]
    lines = [
        f"{batch:>10,}  {_batch_size(batch, sizes):>9}  on this machine; its manifest is in the bucket"
        for batch in batches
    ]
    return [folder, "", *(lines or ["no checkpoints on this machine"]), ""]


def _checkpoint_line(checkpoint: StoredCheckpoint, sizes: dict[str, int]) -> str:
    if checkpoint.manifest is None:
        size = _batch_size(checkpoint.batch, sizes)
        return f"{checkpoint.batch:>10,}  {'':>16}  {'':6} {size:>9}  not usable: {checkpoint.fault}"
    run = checkpoint.manifest.run
    size = format_bytes(sum(size for size, _ in checkpoint.manifest.files.values()))
    kept = ", kept" if run.get("kept") else ""
    return f"{checkpoint.batch:>10,}  {run['tokens']:>16,}  {run['phase']:6} {size:>9}  complete{kept}"


def _batch_size(batch: int, sizes: dict[str, int]) -> str:
    """Format the total size of the files in a batch's checkpoint."""
    return format_bytes(sum(size for name, size in sizes.items() if batch_of(name) == batch))


def _attempt_lines(number: int, attempt: dict[str, Any]) -> list[str]:
    start = attempt["from"] or {"batch": 0}
    ranks = f"{attempt['ranks']} rank{'s' * (attempt['ranks'] > 1)}"
    end = attempt.get("reason", "is running, or was killed and has not been started again")
    return [
        f"{number:>3}  {attempt['since']}  process {attempt['pid']} on {attempt['host']}, {ranks}",
        f"     batch {start['batch']:,} to {attempt['batch']:,}: {end}",
    ]


def _lost_tokens(attempt: dict[str, Any], start: dict[str, Any]) -> str:
    lost = max(attempt["tokens"] - start["tokens"], 0)
    # A killed attempt may have trained up to 15 seconds after its last heartbeat.
    least = "" if attempt.get("until") else "at least "
    return f"lost: {least}{lost:,} tokens" if lost or least else "lost: nothing"
