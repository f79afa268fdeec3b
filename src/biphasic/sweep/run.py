"""The driver of a sweep: it runs what has no record yet, whatever dies in between.

A trial's record is written by the worker that ran it, whole, so nothing that is finished depends on the driver. Started
again, the driver reads which records there are and goes on. Beside the grid and the records (`records.py`) the output
holds `claims/`, a file for each driver that is at work (`claims.py`).
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType

from biphasic.amounts import in_time
from biphasic.config.errors import UserError
from biphasic.config.sweep import SweepConfig
from biphasic.storage import Store, is_remote, short, store
from biphasic.sweep.claims import Claims
from biphasic.sweep.grid import TRIAL, Made, configurations, content_of, describe, functions_of, make, one_of_each
from biphasic.sweep.records import TRIALS, Record, read_records, write_grid, write_record
from biphasic.sweep.selection import pruned, wanted
from biphasic.sweep.view import View, open_view
from biphasic.sweep.worker import Ended, Job, failed
from biphasic.sweep.workers import Workers, open_workers

STOPPED = 75
"""Exit status of a sweep that was asked to stop: the same command goes on. (sysexits' EX_TEMPFAIL)"""
_LOOK_HERE, _LOOK_FAR = 1.0, 15.0
"""Seconds between two looks at what other drivers have done, in a folder and in a bucket."""
_WAIT = 0.5
_SHOWN = 5
_PATIENCE = 300.0
"""Seconds that the end of a sweep waits for an output that can't be written."""


def run(config: SweepConfig, limit: int | None = None, retry_failed: bool = False, module: str = TRIAL) -> int:
    """Run the trials that have no record.

    Args:
        config: the sweep.
        limit: how many trials to begin at most.
        retry_failed: run those again that have failed.
        module: of the functions that make and run trials.

    Returns:
        0: all that could be done is done. 1: there are failed trials. `STOPPED`: it was asked to stop.

    Raises:
        ConfigError: everything that is wrong in the tasks' YAMLs.
        UserError: models or data that aren't there, no cluster, an output that can't be read or written.
    """
    begin = time.monotonic()
    cells = configurations(config)
    place = store(config.output)
    functions = partial(functions_of, module)
    needs: list[int | None] = []
    driver: Driver | None = None
    asked: list[str] = []

    def estimates() -> list[int | None]:
        known = {(cell.model, cell.task): functions().cost_of(one).bytes for cell, one in one_of_each(cells).items()}
        needs[:] = [known[cell.model, cell.task] for cell in cells]
        return needs

    try:
        with ExitStack() as stack, _readable(config.output):
            start = partial(open_workers, module, config.output, config.cluster, estimates)
            # Workers import Composer while this process does, and hashes what the trials read.
            something = len(place.list(TRIALS)) < len(cells) or retry_failed
            workers = stack.enter_context(start()) if something else None
            made = make(config, cells, functions())
            write_grid(place, made.grid)
            driver = Driver(config, made, place, dict(zip(made.grid.trials, needs, strict=bool(needs))))
            driver.read(retry_failed)
            if driver.left():
                workers = workers or stack.enter_context(start())
                view = stack.enter_context(open_view(made.grid, driver.records, workers.size, config.output))
                asked = stack.enter_context(stopping())
                claims = stack.enter_context(Claims(place))
                # Before the claims on them are given up.
                stack.callback(workers.stop)
                driver.work(workers, claims, view, asked, limit)
    except KeyboardInterrupt:
        asked.append("SIGINT")
    if asked:
        print(f"{asked[0]}: stopped; what was running is given up, and the same command goes on (status {STOPPED})")
    return _summary(config, driver, time.monotonic() - begin) if driver is not None and not asked else STOPPED


class Driver:
    """What is done, what runs, what is left."""

    def __init__(self, config: SweepConfig, made: Made, place: Store, bytes_of: dict[str, int | None]):
        self.config, self.made, self.place = config, made, place
        self.grid = made.grid
        self.records: dict[str, Record] = {}
        """Of the grid's trials."""
        self._by_content: dict[str, Record] = {}
        """Done ones, those of other grids in this output too."""
        self._retried: dict[str, Record] = {}
        """Failed ones that are to be run again."""
        self._bytes_of = bytes_of
        self._unwritten: dict[str, Record] = {}
        self._again: list[Job] = []
        """Whose workers have died."""
        self._names: list[str] | None = None
        self._looked = 0.0

    def read(self, retry_failed: bool) -> None:
        """Read the records there are.

        Raises:
            UserError, OSError: they can't be read.
        """
        names = [name.removeprefix(f"{TRIALS}/")[: -len(".json")] for name in self.place.list(TRIALS)]
        contents = {content_of(trial) for trial in self.grid.trials}
        found = read_records(self.place, [name for name in names if content_of(name) in contents])
        for trial, record in found.items():
            if record.status == "done":
                self._by_content.setdefault(content_of(trial), record)
            elif retry_failed:
                self._retried[trial] = record
                continue
            if trial in self.grid.trials:
                self.records[trial] = record

    def left(self, limit: int | None = None) -> list[str]:
        """Trials that may begin now, in their order; records that can be copied are."""
        while self._names is None:
            names = wanted(self.grid, self.records)
            copies = [trial for trial in names if content_of(trial) in self._by_content]
            for trial in copies:
                self._copy(trial)
            self._names = None if copies else names
        return self._names[:limit]

    def work(self, workers: Workers, claims: Claims, view: View, asked: list[str], limit: int | None = None) -> None:
        """Until nothing is left, or somebody has `asked` to stop.

        Raises:
            UserError: workers can't start, or records can't be written.
        """
        begun = 0
        while not asked:
            self._look(claims, view, waiting=not workers.running)
            with _patient(view, self.place):
                begun += self._begin(workers, claims, view, None if limit is None else limit - begun)
            if not workers.running and not self._again:
                if limit is not None and begun >= limit:
                    break
                if not self.left():
                    break
            for ended in workers.wait(_WAIT):
                self._ended(ended, claims, view)
            view.tick(len(workers.running), len(claims.elsewhere & set(self.grid.trials)))
        if not asked:
            self._write_rest(view)

    def _begin(self, workers: Workers, claims: Claims, view: View, limit: int | None) -> int:
        again = workers.room(self._again)
        for job in again:
            self._again.remove(job)
        workers.begin(again)
        if self._again:
            return 0
        jobs = workers.room(self._jobs(workers, claims, limit))
        if not jobs:
            return 0
        mine = claims.take([job.trial for job in jobs])
        workers.begin([job for job in jobs if job.trial in mine])
        if len(mine) < len(jobs):
            # Two that want the same at the same time would, in step, again.
            time.sleep(random.uniform(0, 0.2))
        return len(mine)

    def _jobs(self, workers: Workers, claims: Claims, limit: int | None) -> Iterator[Job]:
        """What could begin, in the grid's order; of trials with the same content one at a time."""
        held = {content_of(job.trial) for job in [*workers.running, *self._again]}
        held |= {content_of(trial) for trial in claims.elsewhere}
        for trial in self.left():
            if limit is not None and limit <= 0:
                return
            if content_of(trial) in held:
                continue
            held.add(content_of(trial))
            limit = None if limit is None else limit - 1
            yield Job(trial, self.grid.trials[trial], self.made.configs[trial], self._bytes_of.get(trial))

    def _ended(self, ended: Ended, claims: Claims, view: View) -> None:
        job, record = ended.job, ended.record
        if record is None:
            if job.attempt < self.config.cluster.retries:
                view.say(f"{describe(job.cell)}: {ended.died}; it is given to another one")
                # Alone on a GPU, if that was what it needed.
                self._again.append(replace(job, attempt=job.attempt + 1, bytes=None))
                return
            times = f"{job.attempt + 1} time{'s' * (job.attempt > 0)}"
            advice = "is there memory for it (cluster.at_once, cluster.trials_per_gpu)?"
            record = failed(job, f"{ended.died} {times}; {advice}", "")
        if record.trial in self.records and self.records[record.trial].status == "done":
            record = self.records[record.trial]
        self._add(record)
        if ended.record is None or not ended.written:
            self._write(record)
        claims.drop([] if record.trial in self._unwritten else [record.trial])
        view.ended(record, ended.trained)

    def _add(self, record: Record) -> None:
        self.records[record.trial] = record
        if record.status == "done":
            self._by_content.setdefault(content_of(record.trial), record)
        self._names = None

    def _copy(self, trial: str) -> None:
        source = self._by_content[content_of(trial)]
        about = {**source.about, "copy_of": source.trial}
        record = replace(source, trial=trial, cell=self.grid.trials[trial], about=about)
        self._add(record)
        self._write(record)

    def _write(self, record: Record) -> None:
        try:
            write_record(self.place, record)
            self._unwritten.pop(record.trial, None)
        except OSError:
            self._unwritten[record.trial] = record

    def _write_rest(self, view: View) -> None:
        end = time.monotonic() + _PATIENCE
        while self._unwritten:
            for record in list(self._unwritten.values()):
                self._write(record)
            if self._unwritten:
                count = len(self._unwritten)
                if time.monotonic() > end:
                    raise UserError(f"output {self.place.root}: {count} records can't be written there; the same command "
                                    "runs their trials again")  # fmt: skip
                view.say(f"output {self.place.root}: can't be written; waiting with {count} records")
                time.sleep(5)

    def _look(self, claims: Claims, view: View, waiting: bool) -> None:
        """See what other drivers have done; without any there is nothing to ask for."""
        every = _LOOK_FAR if is_remote(self.place.root) else _LOOK_HERE
        if not (claims.others or waiting or self._unwritten) or time.monotonic() - self._looked < every:
            return
        self._looked = time.monotonic()
        for record in list(self._unwritten.values()):
            self._write(record)
        with _patient(view, self.place):
            changed = claims.look()
            if changed or waiting:
                missing = [trial for trial in self.grid.trials if trial not in self.records]
                for trial, record in read_records(self.place, missing).items():
                    if record == self._retried.get(trial):
                        continue
                    self._add(record)
                    view.ended(record, trained=False)


def _summary(config: SweepConfig, driver: Driver, seconds: float) -> int:
    trials, records = driver.grid.trials, driver.records
    counts = Counter(records[trial].status for trial in trials if trial in records)
    out = len(pruned(driver.grid, records))
    more = f", {out} left out by halving" if out else ""
    left = len(trials) - sum(counts.values()) - out
    said = f"{counts['done']} of {len(trials)} trials done, {counts['failed']} failed, {left} left{more}"
    print(f"{config.output}: {said}; {in_time(seconds)}")
    broken = [record for record in records.values() if record.status == "failed"]
    for record in broken[:_SHOWN]:
        print(f"  failed: {describe(record.cell)}: {record.error}")
    if broken:
        more = f"  and {len(broken) - _SHOWN} more; " if len(broken) > _SHOWN else "  "
        print(f"{more}tracebacks are in their records in {TRIALS}/; --retry-failed runs them again")
    if counts["done"]:
        print(f"report: python -m biphasic.report {config.output}")
    return 1 if broken else 0


@contextmanager
def stopping() -> Iterator[list[str]]:
    """SIGINT and SIGTERM are noted in the list that this gives; a second one interrupts at once."""
    asked: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(signal.Signals(number).name)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _patient(view: View, place: Store) -> Iterator[None]:
    """What runs goes on while the output can't be reached."""
    try:
        yield
    except OSError as error:
        view.say(f"output {place.root}: can't be read and written now ({short(error)}); it is tried again")
        time.sleep(2)


@contextmanager
def _readable(output: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"output {output}: can't be read and written ({short(error)})") from error
