"""Show a run's checkpoints, its attempts and why each ended, and the tokens lost between them."""

from collections import Counter

from biphasic.amounts import format_bytes
from biphasic.checkpointing.manifest import batch_of, list_checkpoints
from biphasic.checkpointing.run_lock import read_attempts
from biphasic.errors import UserError
from biphasic.storage import open_store, user_errors
from biphasic.training.metrics_file import SCORES, read_scores


def report(path: str) -> list[str]:
    """Return the lines about the checkpoints and attempts in a folder or a bucket prefix.

    Raises a UserError if the folder contains no run or can't be read.
    """
    with user_errors(f"{path}: can't be read"):
        place = open_store(path)
        files = place.list()
        checkpoints, attempts, scores = list_checkpoints(place, files), read_attempts(place), read_scores(place)
    if not checkpoints and not attempts:
        raise UserError(f"{path}: holds no run (no checkpoints, no attempts)")
    sizes = Counter[int]()
    for name, file in files.items():
        if (batch := batch_of(name)) is not None:
            sizes[batch] += file.bytes
    lines = [path, "", f"{'batch':>10}  {'tokens':>16}  {'phase':6} {'bytes':>9}  checkpoint"]
    for checkpoint in reversed(checkpoints):
        tokens, phase, state = "", "", f"not usable: {checkpoint.fault}"
        if checkpoint.manifest is not None:
            record = checkpoint.manifest.run
            tokens, phase = f"{record['tokens']:,}", record["phase"]
            state = "complete, kept" if record.get("kept") else "complete"
        size = format_bytes(sizes[checkpoint.batch])
        lines.append(f"{checkpoint.batch:>10,}  {tokens:>16}  {phase:6} {size:>9}  {state}")
    for record in scores:
        shown = ", ".join(f"{key.removeprefix(f'{SCORES}/')} {value:.4f}" for key, value in record["scores"].items())
        lines.append(f"{record['batch']:>10,}  {record['tokens']:>16,}  {shown}")
    lines += ["", "attempts"] if attempts else []
    for index, attempt in enumerate(attempts):
        start, ranks = attempt["from"] or {"batch": 0}, f"{attempt['ranks']} rank{'s' * (attempt['ranks'] > 1)}"
        end = attempt.get("reason", "is running, or was killed and has not been started again")
        # An attempt that failed before it found its checkpoint has lost nothing.
        resumed = next((after["from"] for after in attempts[index + 1 :] if after["from"] is not None), None)
        # A killed attempt may have trained up to 15 seconds after its last heartbeat.
        least, reached = "" if attempt.get("until") else "at least ", attempt["batch"]
        if least and resumed is not None and attempt["from"] is not None:
            reached = max(reached, resumed["batch"])
        lines += [
            f"{index + 1:>3}  {attempt['since']}  process {attempt['pid']} on {attempt['host']}, {ranks}",
            f"     batch {start['batch']:,} to {least}{reached:,}: {end}",
        ]
        if resumed is not None:
            lost = max(attempt["tokens"] - resumed["tokens"], 0)
            lines.append(f"     lost: {least}{lost:,} tokens" if lost or least else "     lost: nothing")
    return lines
