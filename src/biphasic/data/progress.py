"""What a person sees of a conversion: the bar, a line for each task in the log, the summary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from biphasic.config.conversion import ConvertConfig
from biphasic.data.pool import Outcome
from biphasic.data.work import Record, Task


class Progress:
    """A bar over the tokens of all tasks. How many there will be is estimated from the text that has been done."""

    def __init__(self, config: ConvertConfig, tasks: list[Task], known: dict[str, Record], log: Callable[[str], None]):
        self.config, self.tasks, self.log = config, tasks, log
        self.done = dict(known)
        self.tokens = self.bytes = 0
        self._bar: Any = None

    def __enter__(self) -> Progress:
        from tqdm import tqdm

        size = sum(task.bytes for task in self.tasks) / 1e6
        text = f"{len(self.tasks)} task{'s' * (len(self.tasks) > 1)} ({size:,.1f} MB)"
        rows = f"MDS shards of rows of {self.config.sequence_length} tokens"
        print(f"converting {text} to {self.config.output}: {rows}")
        if self.done:
            self.say(f"{len(self.done)} of {len(self.tasks)} tasks were finished before and are kept")
        before = sum(_tokens(record) for record in self.done.values())
        self._bar = tqdm(desc="tokens", unit="tok", unit_scale=True, smoothing=0.05, initial=before)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, tokens: int, size: int) -> None:
        """Count what a worker has done."""
        if not size:
            return
        if not self.bytes:
            # What the workers needed to start is no part of the rate.
            self._bar.unpause()
        self.tokens += tokens
        self.bytes += size
        self._bar.total = max(self._estimate(), self._bar.n + tokens)
        self._bar.update(tokens)

    def finished(self, outcome: Outcome) -> None:
        """Note a task's end in the log."""
        record = outcome.record
        if record is None:
            self.say(outcome.damaged or outcome.fault or "")
            return
        self.done[outcome.task.name] = record
        tokens, seconds = _tokens(record), max(record["seconds"], 1e-9)
        documents = sum(part["documents"] for part in record["splits"].values())
        self.log(
            f"{outcome.task.name} {outcome.task.what()}: {documents:,} documents, {tokens:,} tokens, "
            f"{seconds:.1f} s, {tokens / seconds:,.0f} tokens/s ({len(self.done)} of {len(self.tasks)})"
        )
        for line in [*record["damaged"], *record["documents"]["examples"]]:
            self.say(f"skipped: {line}")

    def say(self, line: str) -> None:
        """Print a line above the bar, and note it in the log."""
        from tqdm import tqdm

        self.log(line)
        tqdm.write(line)

    def _estimate(self) -> int:
        """Tokens of all tasks: those of the text that was done, for all the text there is."""
        finished = [(task.bytes, self.done[task.name]["text_bytes"]) for task in self.tasks if task.name in self.done]
        planned, found = (sum(column) for column in zip(*finished, strict=True)) if finished else (0, 0)
        text = sum(task.bytes for task in self.tasks) * (found / planned if planned and found else 1)
        tokens = round(text * self.tokens / max(self.bytes, 1))
        return tokens if self.config.max_tokens is None else min(tokens, self.config.max_tokens)


def summary(output: str, record: dict[str, Any]) -> str:
    """What a conversion gave, for the terminal."""
    lines = [
        f"{name}: {split['documents']:,} documents, {split['tokens']:,} tokens in {split['rows']:,} rows of "
        f"{record['sequence_length']} ({100 * split['fill']:.2f}% filled), {len(split['shards'])} shards, "
        f"{split['bytes'] / 1e6:,.1f} MB"
        for name, split in record["splits"].items()
    ]
    documents = record["documents"]
    left = [f"{documents['filtered']:,} left out by filters"] if documents["filtered"] else []
    left += [f"{count:,} skipped ({kind})" for kind, count in documents["skipped"].items()]
    left += [f"{documents['repeated']:,} with an id that came before"] if documents["repeated"] else []
    if left:
        lines.append(f"documents: {documents['read']:,} read, {', '.join(left)}")
    lines += [f"left out: {fault}" for fault in record["source"]["left_out"]]
    tokens = sum(split["tokens"] for split in record["splits"].values())
    stored = sum(split["bytes"] for split in record["splits"].values())
    lines.append(
        f"{stored / tokens:.2f} bytes stored a token, {record['text_bytes'] / tokens:.2f} bytes of text a token, "
        f"{tokens / max(record['cpu_seconds'], 1e-9):,.0f} tokens/s a core"
    )
    if len(record["tasks"]) > 1:
        lines += [f"slowest: {slow['what']}: {slow['seconds']:.1f} s" for slow in record["slowest"]]
    return "\n".join([*lines, f"{output}: {record['seconds']:.1f} s"])


def _tokens(record: Record) -> int:
    return sum(part["tokens"] for part in record["splits"].values())
