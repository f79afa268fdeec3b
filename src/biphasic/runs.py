"""What became of a run: its checkpoints, its attempts and why each ended, and the tokens lost between them.

python -m biphasic.runs FOLDER      runs/my-run, its checkpoints' folder, or s3://bucket/prefix
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from biphasic.amounts import in_bytes
from biphasic.checkpointing.claim import attempts_in
from biphasic.checkpointing.manifest import Found, checkpoints_in
from biphasic.config.errors import UserError
from biphasic.storage import is_remote, join, short, store


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 when the folder can't be read or holds no run."""
    parser = argparse.ArgumentParser(prog="python -m biphasic.runs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", help="a run's folder, or where it saves: a folder or a bucket's prefix")
    folder = parser.parse_args(arguments).folder
    try:
        print("\n".join(report(place_of(folder))))
    except (UserError, OSError) as error:
        print(error if isinstance(error, UserError) else f"{folder}: can't be read ({short(error)})", file=sys.stderr)
        return 2
    return 0


def place_of(folder: str) -> str:
    """Where the run saves whose folder this is."""
    file = Path(folder) / "config.yaml"
    if is_remote(folder) or not file.is_file():
        return folder
    said = yaml.safe_load(file.read_text(encoding="utf-8")).get("checkpoint") or {}
    return said.get("folder") or join(folder, "checkpoints")


def report(place: str) -> list[str]:
    """The lines that are printed.

    Raises:
        UserError: there is nothing of a run.
        OSError: the place can't be read.
    """
    there = store(place)
    found, attempts = checkpoints_in(there), attempts_in(there)
    if not found and not attempts:
        raise UserError(f"{place}: no checkpoints and no attempts of a run are here")
    sizes = {name: known.bytes for name, known in there.list().items()}
    lines = [place, "", f"{'batch':>10}  {'tokens':>16}  {'phase':6} {'bytes':>9}  checkpoint"]
    lines += [_checkpoint(one, sizes) for one in reversed(found)]
    lines += ["", "attempts"]
    for number, one in enumerate(attempts):
        lines += _attempt(number + 1, one)
        if number + 1 < len(attempts):
            lines.append(f"     {_lost(one, attempts[number + 1])}")
    return lines


def _checkpoint(one: Found, sizes: dict[str, int]) -> str:
    if one.manifest is None:
        of = f"ba{one.batch}"
        there = sum(size for name, size in sizes.items() if of in name.replace("/", ".").replace("-", ".").split("."))
        return f"{one.batch:>10,}  {'':>16}  {'':6} {in_bytes(there):>9}  not usable: {one.fault}"
    run = one.manifest.run
    total = sum(size for size, _ in one.manifest.files.values())
    kept = ", kept" if run.get("kept") else ""
    return f"{one.batch:>10,}  {run['tokens']:>16,}  {run['phase']:6} {in_bytes(total):>9}  complete{kept}"


def _attempt(number: int, one: dict[str, Any]) -> list[str]:
    begun = one["from"] or {"batch": 0}
    ranks = f"{one['ranks']} rank{'s' * (one['ranks'] > 1)}"
    end = one.get("reason", "is running, or was killed and nobody has started again")
    return [
        f"{number:>3}  {one['since']}  process {one['pid']} on {one['host']}, {ranks}",
        f"     batch {begun['batch']:,} to {one['batch']:,}: {end}",
    ]


def _lost(before: dict[str, Any], after: dict[str, Any]) -> str:
    begun = (after["from"] or {"tokens": 0})["tokens"]
    lost = max(before["tokens"] - begun, 0)
    # A killed attempt's last word is a quarter of a minute old at most.
    least = "" if before.get("until") else "at least "
    return f"lost: {least}{lost:,} tokens" if lost or least else "lost: nothing"


if __name__ == "__main__":
    sys.exit(main())
