"""Run `job: sweep`: a driver process starts the trials without a record on workers.

The worker that ran a trial writes its record, so no finished trial is lost if the driver dies. The same command then
reads the records and resumes the sweep. A run lock ensures that a sweep has only one driver at a time.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from biphasic.amounts import format_seconds
from biphasic.checkpointing.run_lock import RunLock
from biphasic.config.finetune import FinetuneConfig
from biphasic.config.sweep import SweepConfig
from biphasic.errors import Preempted, UserError, first_line
from biphasic.processes import noted_signals
from biphasic.storage import Store, open_store
from biphasic.sweep.grid import (
    TRIAL_MODULE,
    build_grid,
    content_hash,
    describe,
    encoder_folder,
    fewest_trials,
    first_cells,
    trial_configs,
)
from biphasic.sweep.plan import TrialSeconds
from biphasic.sweep.records import (
    TRIALS_FOLDER,
    Cell,
    Grid,
    TrialRecord,
    read_records,
    recorded_trials,
    write_grid,
    write_record,
)
from biphasic.sweep.selection import encoder_trials, planned_trials, startable_trials
from biphasic.sweep.workers import FinishedJob, TrialJob, Workers, failed_record, open_workers

_POLL_SECONDS = 0.5
_SUMMARY_SECONDS = 60.0
_SHOWN_FAILURES = 5
_WRITE_TIMEOUT = 300.0
"""Seconds to retry writing the last records if the output can't be written."""


def run(config: SweepConfig, limit: int | None = None, retry_failed: bool = False, module: str = TRIAL_MODULE) -> int:
    """Run the trials without a record, and return the exit status: 1 if trials failed, else 0.

    Args:
        limit: maximum number of trials to start.
        retry_failed: whether to run failed trials again.
        module: name of the module that names and runs trials.

    Raises:
        ConfigError: the tasks' YAMLs or `overrides` have problems; it lists all.
        Preempted: a signal stopped the sweep.
        UserError: models or data are missing, no cluster answers, another driver runs, or the output can't be used.
    """
    start = time.monotonic()
    configs, folder = trial_configs(config), open_store(config.output)
    driver: Driver | None = None
    signals: list[str] = []

    def estimate_bytes() -> dict[tuple[str, str], int | None]:
        estimate = import_module(module).estimate_cost
        return {(cell.model, cell.task): estimate(first).bytes for cell, first in first_cells(configs).items()}

    try:
        with ExitStack() as stack:
            lock = RunLock(config.output, key="output", alternative="output")
            lock.acquire(ranks=1)
            stack.push(lambda error, *_: lock.release("ended" if error is None else error.__name__))

            def start_workers() -> Workers:
                local = _local_inputs(configs)
                return stack.enter_context(open_workers(module, config.output, config.cluster, estimate_bytes, local))

            # Workers start first so that they import Composer while this process hashes the model and data files.
            incomplete = len(recorded_trials(folder)) < fewest_trials(config) or retry_failed
            early_workers = start_workers() if incomplete else None
            grid = build_grid(config, configs, import_module(module))
            write_grid(folder, grid)
            driver = Driver(grid, configs, folder, config.cluster.retries)
            driver.read_records(retry_failed)
            if driver.missing():
                workers = early_workers or start_workers()
                numbers = (signal.SIGINT, signal.SIGTERM)
                signals = stack.enter_context(noted_signals(numbers, interrupt_on_second=True))
                driver.work(workers, lock, signals, limit)
    except OSError as error:
        raise UserError(f"output {config.output}: can't be read and written ({first_line(error)})") from error
    except KeyboardInterrupt:
        signals.append("SIGINT")
    if signals or driver is None:
        raise Preempted(f"{signals[0]}: stopped, running trials were abandoned")
    print(f"{config.output}: {driver.progress()}; {format_seconds(time.monotonic() - start)}")
    return driver.print_outcome()


def _local_inputs(configs: dict[Cell, FinetuneConfig]) -> list[str]:
    """Return the folders of models and data, without those in buckets and on the hub."""
    trials = configs.values()
    data = {path for trial in trials for path in (trial.task.data, *trial.task.retrieval_sets.values())}
    return [path for path in sorted(data | {trial.model.path for trial in trials}) if Path(path).exists()]


class Driver:
    """Starts trials and collects their records.

    `configs` are fine-tuning configurations by cell; `retries` is how often a trial is repeated after its worker died.
    """

    def __init__(self, grid: Grid, configs: dict[Cell, FinetuneConfig], folder: Store, retries: int):
        self.grid, self.folder = grid, folder
        self.records: dict[str, TrialRecord] = {}
        """Records of the grid's trials."""
        self._configs, self._retries = configs, retries
        self._from_others = {task.name for task in grid.tasks if task.encoder_from is not None}
        self._done_by_hash: dict[str, TrialRecord] = {}
        """Records of done trials by content hash, including those of other grids in this output."""
        self._unwritten: dict[str, TrialRecord] = {}
        self._lost: Counter[str] = Counter()
        """Number of lost workers by trial."""
        self._started: set[str] = set()
        self._sources: dict[tuple[str, str], str | None] = {}
        """The trial whose encoder the trials of a (model, task) start from; see `encoder_trials`."""
        self._no_encoder: dict[str | None, str] = {None: "encoder_from: its task has no trial with a validation score"}
        """Errors of trials whose encoder couldn't be kept, and that of no trial."""

    def read_records(self, retry_failed: bool) -> None:
        """Read the records in the output. Raises UserError or OSError if they can't be read."""
        hashes = {content_hash(trial) for trial in self.grid.trials}
        names = [trial for trial in recorded_trials(self.folder) if content_hash(trial) in hashes]
        for trial, record in read_records(self.folder, names).items():
            if record.status == "done":
                self._done_by_hash.setdefault(content_hash(trial), record)
            if trial in self.grid.trials and (record.status == "done" or not retry_failed):
                self.records[trial] = record

    def missing(self) -> list[str]:
        """Copy records from done trials with equal content hashes, and return the trials that may start, in order."""
        # Copied records may decide a learning rate, and so allow further trials to start.
        while True:
            self._sources = encoder_trials(self.grid, self.records)
            for trial in [trial for trial, record in self.records.items() if not self._is_current(record, trial)]:
                del self.records[trial]
                self._done_by_hash.pop(content_hash(trial), None)
            waiting = [trial for trial in startable_trials(self.grid, self.records) if trial not in self.records]
            copies = [trial for trial in waiting if content_hash(trial) in self._done_by_hash]
            errors = {trial: self._no_encoder.get(self._source(trial)) for trial in waiting}
            failed = {t: TrialRecord(t, self.grid.trials[t], "failed", error=e) for t, e in errors.items() if e}
            if not copies and not failed:
                return waiting
            self.records |= failed
            self._unwritten |= failed
            for trial in copies:
                original = self._done_by_hash[content_hash(trial)]
                about = {**original.about, "copy_of": original.trial}
                self.records[trial] = replace(original, trial=trial, cell=self.grid.trials[trial], about=about)
                self._unwritten[trial] = self.records[trial]
            self._write()

    def _source(self, trial: str) -> str | None:
        """Return the trial whose encoder a trial starts from; empty if it isn't known or it starts from the model."""
        cell = self.grid.trials[trial]
        return self._sources.get((cell.model, cell.task), "")

    def _is_current(self, record: TrialRecord, trial: str) -> bool:
        """Return False for the record of a trial that started from another encoder than the one that is chosen now."""
        source = self._source(trial)
        started_from = record.about.get("encoder_from") or ""
        return record.status != "done" or not source or content_hash(started_from) == content_hash(source)

    def _job(self, trial: str, workers: Workers, keep: bool = False) -> TrialJob | None:
        """Return the job of a trial, or first that of the trial whose encoder it needs; None while that isn't chosen."""
        cell, source = self.grid.trials[trial], None
        config = self._configs[cell]
        if cell.task in self._from_others:
            if not (source := self._source(trial)):
                return None
            folder = encoder_folder(self.folder.root, source)
            if not folder.is_dir():
                return self._job(source, workers, keep=True)
            model = config.model.model_copy(update={"path": str(folder), "revision": None})
            config = config.model_copy(update={"model": model})
        # A trial that lost its worker gets a GPU to itself: the memory estimate may have been too small.
        size = None if self._lost[trial] else workers.bytes_of.get((cell.model, cell.task))
        return TrialJob(trial, cell, config, size, self._lost[trial], source, keep)

    def jobs(self, workers: Workers, limit: int | None) -> Iterator[TrialJob]:
        """Yield the jobs that may start, in the grid's order. Trials with equal content hashes run one at a time."""
        busy = {content_hash(job.trial) for job in workers.running}
        new = 0
        for missing in self.missing():
            if (job := self._job(missing, workers)) is None or content_hash(job.trial) in busy:
                continue
            is_new = job.trial not in self._started
            if is_new and limit is not None and len(self._started) + new >= limit:
                continue
            busy.add(content_hash(job.trial))
            new += is_new
            yield job

    def work(self, workers: Workers, lock: RunLock, signals: list[str], limit: int | None = None) -> None:
        """Run trials until none is left or a signal arrives. Print a line for each trial, and a summary every minute.

        Raises a UserError if workers can't start, records can't be written, or another driver has taken the lock.
        """
        start = last_summary = time.monotonic()
        while not signals:
            if lock.lost is not None:
                raise UserError(lock.lost)
            jobs = list(self.jobs(workers, limit))
            if not jobs and not workers.running:
                self._write_rest()
                return
            self._started.update(job.trial for job in workers.start(jobs))
            for finished in workers.wait(_POLL_SECONDS):
                self._finish(finished)
            if time.monotonic() - last_summary >= _SUMMARY_SECONDS:
                last_summary = time.monotonic()
                waiting = [cell for name, cell in self._planned().items() if name not in self.records]
                ahead = TrialSeconds(self.records).total(waiting) / workers.size
                left = f", about {format_seconds(ahead)} left" if ahead else ""
                times = f"{format_seconds(last_summary - start)}{left}"
                print(f"{self.progress()}, {len(workers.running)} running; {times}", flush=True)

    def progress(self) -> str:
        """Return the numbers of planned trials by status as one line."""
        planned = self._planned()
        counts = Counter(self.records[trial].status for trial in planned if trial in self.records)
        left = len(planned) - counts.total()
        return f"{counts['done']} of {len(planned)} trials done, {counts['failed']} failed, {left} left"

    def print_outcome(self) -> int:
        """Print failures and the command for the report. Return the exit status: 1 if trials failed, else 0."""
        records = [self.records[trial] for trial in self._planned() if trial in self.records]
        failures = [record for record in records if record.status == "failed"]
        for record in failures[:_SHOWN_FAILURES]:
            print(f"  failed: {describe(record.cell)}: {record.error}")
        if failures:
            more = f"and {len(failures) - _SHOWN_FAILURES} more; " if len(failures) > _SHOWN_FAILURES else ""
            print(f"  {more}tracebacks are in their records in {TRIALS_FOLDER}/; --retry-failed runs them again")
        if len(failures) < len(records):
            print(f"report: biphasic report {self.folder.root}")
        return 1 if failures else 0

    def _planned(self) -> dict[str, Cell]:
        return planned_trials(self.grid, self.records)

    def _finish(self, finished: FinishedJob) -> None:
        job, record = finished.job, finished.record
        if finished.lost is not None:
            self._lost[job.trial] += 1
            if self._lost[job.trial] <= self._retries:
                print(f"{describe(job.cell)}: {finished.lost}; another worker runs the trial", flush=True)
                return
        if record is None:
            times = f"{self._lost[job.trial]} time{'s' * (self._lost[job.trial] > 1)}"
            advice = "is there memory for it (cluster.at_once, cluster.trials_per_gpu)?"
            record = failed_record(job, f"{finished.lost} {times}; {advice}", "")
        if job.keep:
            if record.status != "done":
                self._no_encoder[job.trial] = (
                    f"encoder_from: {describe(job.cell)} couldn't be trained again: {record.error}"
                )
            print(f"{describe(job.cell)}: {self._no_encoder.get(job.trial, 'its encoder is kept')}", flush=True)
            return
        self.records[record.trial] = record
        if record.status == "done":
            self._done_by_hash[content_hash(record.trial)] = record
        if finished.record is None or not finished.written:
            self._unwritten[record.trial] = record
        self._write()
        planned = self._planned()
        outcome = f"failed: {record.error}"
        if record.status == "done":
            scores = [f"{result.name} {result.metric} {_percent(result.validation)} validation, {_percent(result.test)} test"
                      for result in record.results]  # fmt: skip
            outcome = f"{'; '.join(scores)}; {format_seconds(record.seconds['total'])}"
        count = f"{len(planned.keys() & self.records.keys())}/{len(planned)}"
        print(f"{count} {describe(record.cell)}: {outcome}", flush=True)

    def _write(self) -> None:
        """Write the records that are not written yet. Those that can't be written are kept for the next attempt."""
        for record in list(self._unwritten.values()):
            try:
                write_record(self.folder, record)
                del self._unwritten[record.trial]
            except OSError:
                continue

    def _write_rest(self) -> None:
        end = time.monotonic() + _WRITE_TIMEOUT
        while self._unwritten:
            self._write()
            count = len(self._unwritten)
            if count and time.monotonic() > end:
                raise UserError(f"output {self.folder.root}: {count} records can't be written there; the same command "
                                "runs their trials again")  # fmt: skip
            if count:
                print(f"output {self.folder.root}: can't be written; waiting with {count} records", flush=True)
                time.sleep(5)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"
