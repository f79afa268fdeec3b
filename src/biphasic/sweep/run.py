"""Run `job: sweep`: a driver process starts the trials without a record on workers.

The worker that ran a trial writes its record, so no finished trial is lost if the driver dies. The same command then
reads the records and resumes the sweep. A run lock ensures that a sweep has only one driver at a time.
"""

import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from biphasic.amounts import format_seconds
from biphasic.checkpointing.run_lock import RunLock
from biphasic.config.finetune import FinetuneConfig
from biphasic.config.sweep import SweepConfig
from biphasic.errors import Preempted, UserError, first_line
from biphasic.processes import STOP_SIGNALS, noted_signals
from biphasic.storage import Store, open_store
from biphasic.sweep.grid import TRIAL_MODULE, build_grid, check_trials, trial_configs
from biphasic.sweep.plan import device_seconds
from biphasic.sweep.records import TRIALS_FOLDER, Cell, Grid, TrialRecord, read_records, write_grid, write_record
from biphasic.sweep.selection import planned_trials, startable_trials
from biphasic.sweep.workers import FinishedJob, TrialJob, failed_record, finished_job, open_workers
from biphasic.workers.group import WorkerGroup

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
        Preempted: a signal stopped the sweep; KeyboardInterrupt: Ctrl-C did.
        UserError: models or data are missing, no cluster answers, another driver runs, or the output can't be used.
    """
    start = time.monotonic()
    configs, folder = trial_configs(config), open_store(config.output)
    driver: Driver | None = None
    signals: list[str] = []
    try:
        with ExitStack() as stack:
            lock = RunLock(config.output, key="output", alternative="output")
            lock.acquire(ranks=1)
            stack.push(lambda error, *_: lock.release("ended" if error is None else error.__name__))
            warnings = check_trials(configs, module)
            grid = build_grid(config, configs, module)
            warnings += (
                f"{config.output}: {line}: its report will be of this grid alone" for line in grid.other_records(folder)
            )
            print(*(f"WARNING: {line}\n" for line in warnings), sep="", end="", flush=True)
            write_grid(folder, grid)
            driver = Driver(grid, configs, folder, config.cluster.retries)
            driver.read_records(retry_failed)
            if driver.missing():
                workers = stack.enter_context(open_workers(module, config.output, config.cluster, _inputs(configs)))
                numbers = (signal.SIGINT, *STOP_SIGNALS)
                signals = stack.enter_context(noted_signals(numbers, interrupt_on_second=True))
                driver.work(workers, lock, signals, limit)
    except OSError as error:
        raise UserError(f"output {config.output}: can't be read and written ({first_line(error)})") from error
    except KeyboardInterrupt:
        signals.append("SIGINT")
    if signals or driver is None:
        stop = KeyboardInterrupt if signals[0] == "SIGINT" else Preempted
        raise stop(f"{signals[0]}: stopped, running trials were abandoned")
    print(f"{config.output}: {driver.progress()}; {format_seconds(time.monotonic() - start)}")
    return driver.print_outcome()


def _inputs(configs: dict[Cell, FinetuneConfig]) -> list[str]:
    """Return the local folders of models and data."""
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
        self._unwritten: dict[str, TrialRecord] = {}
        self._lost: Counter[str] = Counter()
        """Number of lost workers by trial."""
        self._started: set[str] = set()

    def read_records(self, retry_failed: bool) -> None:
        """Read the records in the output. Raises UserError or OSError if they can't be read."""
        found = read_records(self.folder, self.grid.trials)
        self.records = {trial: each for trial, each in found.items() if each.status == "done" or not retry_failed}

    def missing(self) -> list[str]:
        """Return the trials without a record that may start, in order."""
        return [trial for trial in startable_trials(self.grid, self.records) if trial not in self.records]

    def jobs(self, workers: WorkerGroup, limit: int | None) -> Iterator[TrialJob]:
        """Yield the jobs that may start, in the grid's order."""
        running = {job.trial for job in workers.running}
        new = 0
        for trial in self.missing():
            is_new = trial not in self._started
            if trial in running or (is_new and limit is not None and len(self._started) + new >= limit):
                continue
            new += is_new
            cell = self.grid.trials[trial]
            yield TrialJob(trial, cell, self._configs[cell], self._lost[trial])

    def work(self, workers: WorkerGroup, lock: RunLock, signals: list[str], limit: int | None = None) -> None:
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
            for slot, job in zip(workers.idle, jobs, strict=False):
                slot.give(job, "run", job)
                self._started.add(job.trial)
            for ended in workers.wait(_POLL_SECONDS):
                finished = finished_job(ended)
                if finished.is_broken:
                    workers.replace(ended.worker)
                self._finish(finished)
            if time.monotonic() - last_summary >= _SUMMARY_SECONDS:
                last_summary = time.monotonic()
                # Trials share devices as the recorded ones did.
                sharing = max((record.about.get("trials_on_device", 1) for record in self.records.values()), default=1)
                waiting = [cell for name, cell in self._planned().items() if name not in self.records]
                ahead = (device_seconds(self.records, waiting) or 0.0) * sharing / workers.size
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
            print(f"  failed: {record.cell}: {record.error}")
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
                print(f"{job.cell}: {finished.lost}; another worker runs the trial", flush=True)
                return
        if record is None:
            times = f"{self._lost[job.trial]} time{'s' * (self._lost[job.trial] > 1)}"
            advice = "is there memory for it (cluster.at_once, cluster.trials_per_gpu)?"
            record = failed_record(job, f"{finished.lost} {times}; {advice}", "")
        self.records[record.trial] = record
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
        print(f"{count} {record.cell}: {outcome}", flush=True)

    def _write(self) -> None:
        """Write the records that are not written yet. Those that can't be written are kept for the next attempt."""
        for record in list(self._unwritten.values()):
            with suppress(OSError):
                write_record(self.folder, record)
                del self._unwritten[record.trial]

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
