"""Open a pretraining run: join the other ranks, lock its folder, find its checkpoint, and close it whatever happens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple

from composer import Trainer
from composer.core import Callback, State
from composer.utils import dist, reproducibility

from biphasic.checkpointing.attempt import Attempt, start_attempt
from biphasic.checkpointing.resume import fetch_branch_point, fetch_initial_weights
from biphasic.checkpointing.save import PhaseTracker, Saver
from biphasic.checkpointing.schedule import checkpoint_schedule, progress_after_batch
from biphasic.checkpointing.start import BranchPoint, overridden_keys, require_same_data, require_same_past
from biphasic.checkpointing.store import Uploader
from biphasic.config.durations import TrainingProgress
from biphasic.config.load import dump
from biphasic.config.pretrain import PretrainConfig
from biphasic.devices import rank_device, require_precision
from biphasic.errors import UserError
from biphasic.faults import COLLECTIVE_SECONDS, close_on_fault
from biphasic.model.checkpoint import require_safe_checkpoint


class Run:
    """An open run.

    Args:
        config: the run's configuration.
        attempt: this start of the run.

    Attributes:
        checkpoint: local path of the checkpoint to load: the run's newest one, or another run's (`start_from`); None if the
            run starts with its initial weights.
        callbacks: callbacks that save checkpoints and stop the run.
        trainer: the run's Trainer, once it trains.
    """

    def __init__(self, config: PretrainConfig, attempt: Attempt):
        self._config, self._attempt = config, attempt
        self._branch_point: BranchPoint | None = None
        self._history: dict[str, object] = {"indexes": {}, "overridden": []}
        self.trainer: Trainer | None = None
        self._opened = time.monotonic()
        self.checkpoint = self._starting_checkpoint()
        # The saver comes first, because it may request a stop, to which the ranks then agree after the same batch.
        self.callbacks: list[Callback] = [self._saver(), attempt.stopping]
        if dist.get_global_rank() == 0:
            config.run_folder.mkdir(parents=True, exist_ok=True)
            (config.run_folder / "config.yaml").write_text(dump(config), encoding="utf-8")
        dist.barrier()

    @property
    def is_stopping(self) -> bool:
        """Whether the run stops after this batch."""
        return self._attempt.stopping.reason is not None

    def say(self, text: str) -> None:
        """Print a line, with the run's name, on rank 0."""
        if dist.get_global_rank() == 0:
            print(f"{self._config.run_name}: {text}", flush=True)

    def fetch_initial_weights(self) -> str:
        """Return the local path of `model.init_from`, after downloading it if it is in a bucket."""
        return fetch_initial_weights(self._config, self._attempt.ranks)

    def check_rows(self, indexes: dict[str, str]) -> None:
        """Check that the run reads the rows that its checkpoint was trained on, and has the same past.

        Args:
            indexes: hash of each training stream's index, by key.

        Raises:
            UserError: rows or configuration differ.
        """
        self._history["indexes"] = indexes
        resume = self._attempt.resume
        if resume is not None:
            require_same_past(resume, self._config, indexes)
            self._history["overridden"] = overridden_keys(resume, self._config, indexes)
        elif self._branch_point is not None:
            require_same_data(self._branch_point, indexes)

    def train(self, trainer: Trainer) -> None:
        """Train to the run's end, after repeating the validation within which the run was stopped, if it was."""
        self.trainer, config, resume = trainer, self._config, self._attempt.resume
        batch, end = int(trainer.state.timestamp.batch), config.max_duration
        length = f"of {int(end.value):,}" if end.unit == "ba" else f"(length: {end})"
        origin = f"resuming at batch {batch:,} {length} from {self.checkpoint}" if resume is not None else (
            f"starting at batch {batch:,} {length}"
        )  # fmt: skip
        self.say(f"{origin}, {time.monotonic() - self._opened:.1f} s")
        repeats = resume is not None and resume.is_within_validation and config.data.validation is not None
        if repeats:
            self._repeat_validation(trainer)
        if progress_after_batch(trainer.state).reached(end):
            self.say(f"already trained to {end}" + "; nothing to do" * (not repeats))
        else:
            trainer.fit()
        trainer.close()

    def _repeat_validation(self, trainer: Trainer) -> None:
        """Repeat a validation, and save its losses."""
        self.say("repeating the validation in which the run was stopped")
        trainer.eval()
        [saver] = (callback for callback in trainer.state.callbacks if isinstance(callback, Saver))
        saver.save_after_validation(trainer.state, trainer.logger)
        if progress_after_batch(trainer.state).reached(self._config.max_duration):
            saver.fit_end(trainer.state, trainer.logger)

    def _starting_checkpoint(self) -> str | None:
        attempt, config = self._attempt, self._config
        if attempt.resume is not None:
            if not config.checkpoint.autoresume:
                raise UserError(
                    f"{attempt.destination} holds checkpoints (the newest: {attempt.resume.path}) and checkpoint.autoresume "
                    "is false: choose another run_name, or remove them"
                )
            path = str(attempt.local_folder / attempt.resume.path)
        elif config.start_from is not None:
            self._branch_point, path = fetch_branch_point(config, attempt.ranks)
            batch, tokens = self._branch_point.manifest.batch, self._branch_point.manifest.run["tokens"]
            attempt.lock.record_start(batch, tokens)
            self.say(f"starts from batch {batch}, {self._branch_point.path}")
        else:
            return None
        require_safe_checkpoint(path)
        return path

    def _saver(self) -> Saver:
        config, attempt = self._config, self._attempt
        rank, local_rank = dist.get_global_rank(), dist.get_local_rank()
        attempt.local_folder.mkdir(parents=True, exist_ok=True)
        # Rank 0's, because paths may differ between nodes, and the ranks' manifests are compared.
        recorded = attempt.ranks.broadcast(config.model_dump(mode="json"))

        def describe(state: State) -> dict[str, object]:
            [tracker] = (algorithm for algorithm in state.algorithms if isinstance(algorithm, PhaseTracker))
            return {
                "name": config.run_name,
                "attempt": attempt.name,
                "config": recorded,
                **self._history,
                "phase": tracker.phase_name,
                "tokens": int(state.timestamp.token),
                "rows": int(state.timestamp.sample),
                "epochs": int(state.timestamp.epoch),
                "last_batch": list(astuple(tracker.last_batch or TrainingProgress(0, 0, 0, 0))),
                "ranks": dist.get_world_size(),
            }

        local_ranks = range(rank - local_rank, rank - local_rank + dist.get_local_world_size())
        uploader = Uploader(attempt.local_folder, attempt.destination, config.checkpoint.keep, rank, local_ranks)
        return Saver(attempt, uploader, checkpoint_schedule(config), describe, config.checkpoint.upload_timeout)


@contextmanager
def open_run(config: PretrainConfig) -> Iterator[Run]:
    """Open a run. On leaving the block, close it, release its lock and record why the attempt ended.

    Raises:
        UserError: the machine can't compute in the run's precision, another run holds the lock, or the checkpoint is missing
            or doesn't match.
    """
    require_precision(config.precision)
    if config.compute.deterministic:
        reproducibility.configure_deterministic_mode()  # before CUDA is initialized
    dist.initialize_dist(rank_device(), COLLECTIVE_SECONDS)
    attempt = start_attempt(config)
    run = None

    def close(reason: str) -> None:
        # Not `trainer.close()`, because it waits for the other ranks, which wait for this rank's batch.
        if run is not None and run.trainer is not None:
            run.trainer.engine.close()
        attempt.end(reason)

    with close_on_fault(close):
        run = Run(config, attempt)
        reproducibility.seed_all(config.seed)
        yield run
    attempt.end("finished")
