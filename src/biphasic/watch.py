"""Score a run's checkpoints on a downstream task while the run trains: `biphasic watch`.

Each score is a file of its own where the run saves, `scores/<name>/ba2000.json`: complete or missing on any store, without a
lock. The run's `metrics.jsonl` has another writer, on a disk that this machine may not see. These files are the state, too.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from biphasic.checkpointing.manifest import Known, Manifest, batch_of, download_files, newest_first
from biphasic.checkpointing.run_lock import process_id, read_attempts
from biphasic.checkpointing.start_rules import recorded_config
from biphasic.config.finetune import NOT_IN_RESULT, EncoderConfig, FinetuneConfig
from biphasic.config.load import dump
from biphasic.config.pretrain import LoggingConfig
from biphasic.errors import PREEMPTED, UserError, first_line
from biphasic.processes import INTERRUPTED, STOP_SIGNALS, die_with_parent, noted_signals
from biphasic.ranks import FAILED
from biphasic.storage import Store, is_remote, is_unreachable, json_bytes, open_store, user_error
from biphasic.training.loggers import log_scores
from biphasic.training.metrics_file import SCORES

POLL_SECONDS = 30.0
NICENESS = 19
"""Of trials, so that they yield to a run on the same machine."""
_TRIAL = (sys.executable, "-m", "biphasic.main")


def due_batches(complete: Collection[int], scored: Collection[int], every: int, end: int | None) -> list[int]:
    """Return the checkpoints to score, oldest first: the first one after each `every` batches, and the run's last (`end`).

    `complete` are the batches of the checkpoints, `scored` of those that need no score any more.
    """
    taken, due = {0, *(batch // every for batch in scored)}, list[int]()
    for batch in sorted(set(complete).difference(scored)):
        if batch // every not in taken or batch == end:
            due.append(batch)
            taken.add(batch // every)
    return due


class Watcher:
    """Scores the checkpoints in `place`, every so many batches, with trials of `task`, whose `run_name` names the scores."""

    def __init__(self, place: str, task: FinetuneConfig, every: int = 1):
        self.place, self.task, self.every = place, task, every
        self._folder = f"{SCORES}/{task.run_name}"
        self._settings = task.model_dump(mode="json", exclude=NOT_IN_RESULT)
        self._scored, self._failed, self._said, self._signals = list[str](), list[int](), "", list[str]()
        self._known: Known = {}

    def watch(self) -> int:
        """Score checkpoints until the run's last one is scored, and return the exit status: 1 if a trial failed.

        After Ctrl-C it is 130, and after SIGTERM, SIGUSR1 or SIGHUP 75. Raises a UserError if the scores of this name were
        made with other settings, if the place can't be read, or if the first trial fails.
        """
        try:
            # An exception is not raised in the signal's handler: Python loses it while it starts a process, and this one
            # would go on; in the middle of a download, boto3's threads could keep it from ending.
            with noted_signals((signal.SIGINT, *STOP_SIGNALS), interrupt_on_second=True) as self._signals:
                while not self._step():
                    self._pause(0)
            status, end = 0, f"the run has finished; all scores: biphasic runs {self.place}"
            if self._failed:
                names = ", ".join(f"ba{batch}" for batch in self._failed)
                status, end = FAILED, f"failed: {names}; the same command tries again"
        except KeyboardInterrupt:
            status = INTERRUPTED if self._signals[:1] == ["SIGINT"] else PREEMPTED
            end = "interrupted: the same command goes on from there"
        print(f"scored since this start: {', '.join(self._scored) or 'nothing'}\n{end}", flush=True)
        return status

    def _step(self) -> bool:
        """Score the next checkpoint, or wait for one. Return whether the run has finished and is scored."""
        try:
            store = open_store(self.place)
            entries = store.list()
            names = {name: batch_of(name.rpartition("/")[2]) for name in entries if name.startswith(f"{self._folder}/")}
            for name in list(names)[:1]:
                if json.loads(store.read(name))["settings"] != self._settings:
                    problem = f"is of other settings than {self.task.run_name} here: give these scores another name"
                    raise UserError(f"{self.place}/{name}: {problem}, run_name=…")
            checkpoints = newest_first(store, entries, self._known)
            manifests = {each.batch: each.manifest for each in checkpoints if each.manifest}
            newest = manifests[max(manifests)] if manifests else None
            is_over = newest is not None and newest.progress.reached(recorded_config(newest).max_duration)
            scored = [batch for batch in names.values() if batch is not None]
            due = due_batches(manifests, [*scored, *self._failed], self.every, max(manifests) if is_over else None)
            if due:
                self._score(store, manifests[due[0]])
            if due or is_over:
                return not due
            attempt = next(reversed(read_attempts(store)), {"reason": "not started"})
            text = f"waiting for the next checkpoint; the run: {attempt.get('reason', 'training')}"
        except OSError as error:
            text = f"{self.place}: can't be read and written ({first_line(error)})"
            if not is_unreachable(error):
                raise user_error(text, error) from error
            text += f"; trying again every {POLL_SECONDS:g} s"
        if text != self._said:
            print(text, flush=True)
        self._said = text
        self._pause(POLL_SECONDS)
        return False

    def _pause(self, seconds: float) -> None:
        """Sleep. Raises KeyboardInterrupt if a signal has arrived or arrives."""
        end = time.monotonic() + seconds
        while not self._signals and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
        if self._signals:
            raise KeyboardInterrupt

    def _score(self, store: Store, manifest: Manifest) -> None:
        """Fine-tune a checkpoint, and log and write its scores. If the run has removed it meanwhile, only print so."""
        label, tokens, begin = f"ba{manifest.batch}", manifest.run["tokens"], time.monotonic()
        print(f"{label}: fine-tuning on {self.task.task.name}", flush=True)
        stored = store.stat(manifest.name)
        try:
            trial = self._train(store, manifest)
        except (ValueError, FileNotFoundError) as error:
            if stored is None or store.stat(manifest.name) != stored:
                print(f"{label}: skipped, because the run has removed or replaced it", flush=True)
            elif store.list(self._folder) or self._failed:
                print(f"{label}: FAILED: {error}", flush=True)
                self._failed.append(manifest.batch)
            else:  # a wrong setting would fail for every checkpoint
                raise UserError(f"{label}: {error}\nthe first trial failed, so no other is tried") from None
            return
        # A further metric of a test set is a result of its own: `conll2003 f1`.
        scores = {}
        for each in trial["results"]:
            name = f"{self._folder}/{each['name'].removesuffix(' ' + each['metric'])}"
            for split, values in each["more"].items():
                scores |= {f"{name}/{split}/{metric}": value for metric, value in values.items()}
        record = {"batch": manifest.batch, "tokens": tokens, "time": time.time(), "scores": scores}
        record |= {"settings": self._settings, "trial": trial}
        # The file comes last: a checkpoint without one is scored and logged again.
        log_scores(recorded_config(manifest), self.task.run_name, manifest.batch, scores)
        store.write(f"{self._folder}/{label}.json", json_bytes(record))
        self._scored.append(label)
        shown = ", ".join(f"{key.removeprefix(f'{SCORES}/')} {value:.4f}" for key, value in scores.items())
        print(f"{label}, {tokens:,} tokens: {shown} ({time.monotonic() - begin:.0f} s)", flush=True)

    def _train(self, store: Store, manifest: Manifest) -> dict[str, Any]:
        """Return the record of a trial on a checkpoint. Raises a ValueError or a FileNotFoundError if it fails."""
        with tempfile.TemporaryDirectory(prefix="biphasic-watch-") as work:
            local = Path(work, "checkpoint") if is_remote(self.place) else Path(self.place)
            download_files(manifest, store, local)
            quiet = LoggingConfig(jsonl=False, tensorboard=False, progress_bar=False)
            model = EncoderConfig(path=str(local / manifest.path))
            keys = {"run_name": "trial", "output": work, "save_model": False, "logging": quiet, "model": model}
            Path(work, "trial.yaml").write_text(dump(self.task.model_copy(update=keys)), encoding="utf-8")
            if status := self._run_trial(Path(work, "trial.yaml"), read_attempts(store)):
                lines = Path(work, "trial.log").read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
                raise ValueError("\n  ".join([f"the trial ended with status {status}", *lines]))
            return json.loads(Path(work, "trial", "record.json").read_text(encoding="utf-8"))

    def _run_trial(self, file: Path, attempts: list[dict[str, Any]]) -> int:
        """Run a fine-tuning in a process of low priority, and return its exit status."""
        environment, parent = dict(os.environ), os.getpid()
        # A run on this machine keeps its GPUs, unless the user has chosen one.
        if attempts and "until" not in attempts[-1] and attempts[-1]["process"][0] == process_id(parent)[0]:
            environment.setdefault("CUDA_VISIBLE_DEVICES", "")

        def prepare() -> None:
            os.nice(NICENESS)
            with suppress(OSError):  # some Linux systems weigh sessions against each other, instead of processes
                Path("/proc/self/autogroup").write_text(str(NICENESS))
            die_with_parent(parent)

        with file.with_suffix(".log").open("w") as log:
            # A session of its own doesn't receive the terminal's Ctrl-C.
            keys: dict[str, Any] = {"stdout": log, "stderr": log, "start_new_session": True, "preexec_fn": prepare}
            with subprocess.Popen([*_TRIAL, str(file)], env=environment, **keys) as trial:
                try:
                    while trial.poll() is None:
                        self._pause(0.1)
                finally:
                    trial.kill()
            return trial.returncode
