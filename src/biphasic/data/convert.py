"""Text to MDS shards of packed rows: find the tasks, do those that have no record, merge, publish.

While it runs, the output holds `conversion.started` and what finished tasks have left (see `biphasic.data.work`), and no
index, so that nothing can open it. When all tasks are done it gets `tokenizer/`, `validation/index.json`,
`train/index.json`, and `conversion.json`, the record:

    config              the whole configuration
    source              commit (of a hub dataset), files (path, bytes, version), left_out (damaged files)
    tokenizer           sha256, vocab_size, pad_id, bos_id, eos_id, mask_id
    sequence_length, dtype, hash
    splits.<split>      documents, tokens, rows, fill (tokens over positions), bytes, index_sha256, and for each shard
                        its file, bytes, rows and hash
    documents           read, filtered, skipped (by kind), repeated (ids that came before)
    tasks               their names, in the order of the index; `slowest`: what the slowest ones read, and their seconds
    text_bytes, cpu_seconds (of all tasks), seconds (of the command that finished it), tokens_per_second (of all tasks,
                        over the seconds that their workers took)
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from biphasic.config.conversion import ConvertConfig, FilesSource, HubSource
from biphasic.config.errors import UserError
from biphasic.data.merge import merged, publish
from biphasic.data.output import Claim, claim, read_record, require_same, told
from biphasic.data.pool import Outcome, Pool, open_pool
from biphasic.data.progress import Progress
from biphasic.data.reading import Reading
from biphasic.data.sources import SourceFile, find_files, find_hub_files, look_at
from biphasic.data.tokenizer import load_tokenizer
from biphasic.data.work import Limit, Record, Task, Work, is_of, plan_tasks
from biphasic.data.worker import document_ends

_ADVICE = "mend it and run the same command again, or set on_bad_file: skip"


def convert(config: ConvertConfig) -> dict[str, Any]:
    """Convert as a `job: convert` YAML says, from where an earlier attempt stopped; when all is done, do nothing.

    Returns:
        The record (see the module's docstring).

    Raises:
        UserError: source, tokenizer or output can't be used, or a task failed. Finished tasks are kept.
    """
    start = time.monotonic()
    tokenizer = load_tokenizer(config.tokenizer)
    document_ends(config, tokenizer)
    work = Work.of(config, tokenizer)
    done = read_record(config.output)
    files, commit = source_files(config)
    if done is not None:
        require_same(done, work, files)
        print(f"{config.output}: already converted from the same text with the same settings; nothing to do")
        return done
    if isinstance(config.source, HubSource) and commit not in (None, config.source.revision):
        print(f"the hub dataset is read as of this commit, which others can name too: source.revision: {commit}")
    looks = look_at(files, Reading.of(config).columns)
    tasks = plan_tasks(files, looks, config.task_bytes)
    damaged = [f"source {file.path}: {look.fault}" for file, look in zip(files, looks, strict=True) if look.fault]
    with told(config.output), claim(work, tasks, commit) as place:
        records = _run(work, tasks, damaged, place)
        record = merged(work, records, files, damaged, time.monotonic() - start)
        record["source"]["commit"] = commit
        publish(place, record, records, tokenizer)
    return record


def source_files(config: ConvertConfig) -> tuple[list[SourceFile], str | None]:
    """The files of the YAML's `source:`, and the commit of a hub dataset.

    Raises:
        UserError: nothing usable is there.
    """
    if isinstance(config.source, FilesSource):
        return find_files(config.source), None
    return find_hub_files(config.source)


def _run(work: Work, tasks: list[Task], damaged: list[str], place: Claim) -> list[tuple[Task, Record]]:
    """Do the tasks that have no record yet.

    Returns:
        The tasks that the dataset is made of, with their records. With a limit these are the first ones, the last of
        them stopped where the limit is reached: that depends on the text alone, not on the order in which tasks end.

    Raises:
        UserError: what is wrong, a line each, once all that could be done is done.
    """
    config, whole = work.config, Limit(work.config.max_documents, work.config.max_tokens)
    known = {task.name: found for task in tasks if (found := place.records.get(task.name)) and is_of(found, task, work)}
    kept, _ = _within(tasks, known, whole)
    # One that was stopped at another limit is no whole one.
    known = {name: found for name, found in known.items() if not _stopped(found) or name in {t.name for t, _ in kept}}
    faults = [f"{fault}; {_ADVICE}" for fault in damaged if config.on_bad_file == "stop"]
    waiting = deque(task for task in tasks if task.name not in known and not _unneeded(task, tasks, known, whole))
    with (
        Progress(config, tasks, known, place.log.add) as progress,
        open_pool(work, len(waiting), progress.add, progress.say) as pool,
    ):
        for line in damaged:
            progress.say(line)
        faults += _drain(pool, waiting, tasks, known, whole, progress)
        kept, last = _within(tasks, known, whole)
        if last is not None and not faults:
            # The task in which the limit lies, once more and only so far.
            pool.submit(*last)
            outcome = pool.next()
            progress.finished(outcome)
            faults += _faults(outcome)
            kept += [(outcome.task, outcome.record)] if outcome.record is not None else []
    if faults:
        done = f"{len(known)} of {len(tasks)} tasks are finished and kept"
        raise UserError("\n".join([*faults, f"{config.output}: {done}; no dataset is published yet"]))
    return kept


def _drain(
    pool: Pool, waiting: deque[Task], tasks: list[Task], known: dict[str, Record], whole: Limit, progress: Progress
) -> list[str]:
    """Run what waits, and add it to `known`, until all is done, the rest is not needed, or something is wrong that stops
    everything; returns what was wrong."""
    faults: list[str] = []
    running, stop = 0, False
    while True:
        while waiting and running < pool.size and not stop:
            if _unneeded(waiting[0], tasks, known, whole):
                waiting.clear()
                break
            # Whole even where the limit is near: where in it that lies is known once all tasks before it are done.
            pool.submit(waiting.popleft(), Limit(None, None))
            running += 1
        if not running:
            return faults
        outcome = pool.next()
        running -= 1
        progress.finished(outcome)
        faults += _faults(outcome)
        stop = stop or outcome.fault is not None
        if outcome.record is not None:
            known[outcome.task.name] = outcome.record


def _faults(outcome: Outcome) -> list[str]:
    if outcome.damaged is not None:
        return [f"{outcome.damaged}; {_ADVICE}"]
    return [] if outcome.fault is None else [outcome.fault]


def _unneeded(task: Task, tasks: list[Task], known: dict[str, Record], whole: Limit) -> bool:
    """Whether the tasks before this one reach the limit, as far as they are known."""
    if whole == Limit(None, None):
        return False
    before = [known[other.name] for other in tasks[: tasks.index(task)] if other.name in known]
    read = sum(record["documents"]["read"] for record in before)
    taken = sum(record["splits"]["train"]["tokens"] for record in before)
    return (whole.documents is not None and read >= whole.documents) or (
        whole.tokens is not None and taken >= whole.tokens
    )


def _stopped(record: Record) -> bool:
    return any(value is not None for value in record["limit"].values())


def _within(
    tasks: list[Task], known: dict[str, Record], whole: Limit
) -> tuple[list[tuple[Task, Record]], tuple[Task, Limit] | None]:
    """The first tasks, up to the limit or to one that isn't known; and the one that reaches over the limit, with what is
    left for it."""
    kept: list[tuple[Task, Record]] = []
    documents, tokens = whole.documents, whole.tokens
    for task in tasks:
        record = known.get(task.name)
        if record is None or documents == 0 or tokens == 0:
            break
        read, taken = record["documents"]["read"], record["splits"]["train"]["tokens"]
        left = Limit(documents, tokens)
        if _stopped(record):
            if record["limit"] != {"documents": documents, "tokens": tokens}:
                break
        elif (documents is not None and read > documents) or (tokens is not None and taken > tokens):
            return kept, (task, left)
        kept.append((task, record))
        documents = None if documents is None else documents - read
        tokens = None if tokens is None else tokens - taken
    return kept, None
