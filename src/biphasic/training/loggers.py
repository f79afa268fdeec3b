"""Build the loggers of a run, and write metrics as JSON lines."""

import atexit
import json
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from composer.core import State
from composer.loggers import Logger, LoggerDestination, MLFlowLogger, ProgressBarLogger, TensorboardLogger, WandBLogger

from biphasic.config.pretrain import LoggingConfig, PretrainConfig
from biphasic.errors import UserError, first_line
from biphasic.ranks import is_first_rank


def loggers(config: LoggingConfig, folder: Path, run_name: str, run_id: str | None = None) -> list[LoggerDestination]:
    """Build the loggers of a YAML's `logging:` section. Raises a UserError if a logger's package isn't installed.

    With a `run_id`, W&B and MLflow log all starts of a run as one run. Otherwise each start is a new run there.
    """
    destinations: list[LoggerDestination] = []
    if config.progress_bar:
        # Composer warns about a ProgressBarLogger among the loggers, but takes a subclass in no other way.
        warnings.filterwarnings("ignore", "Specifying the ProgressBarLogger")
        destinations.append(ProgressBar())
    if config.jsonl:
        destinations.append(JSONLLogger(folder / "metrics.jsonl"))
    if config.tensorboard:
        destinations.append(TensorboardLogger(log_dir=str(folder / "tensorboard")))
    try:
        if config.wandb is not None:
            resuming = None if run_id is None else {"id": run_id, "resume": "allow"}
            destinations.append(WandBRunLogger(config.wandb, name=run_name, init_kwargs=resuming))
        if config.mlflow is not None:
            destinations.append(MLFlowRunLogger(config.mlflow, run_name, run_id))
    except ImportError as error:
        raise UserError(f"logging: {error.name or error} isn't installed: uv pip install '.[loggers]'") from None
    return destinations


class WandBRunLogger(WandBLogger):
    """Composer's logger to W&B, without its call of `get_url`, which W&B's runs no longer have."""

    def init(self, state: State, logger: Logger) -> None:
        if self._enabled:
            import wandb

            wandb.init(**self._init_kwargs)
            atexit.register(self._set_is_in_atexit)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        if self._enabled:
            import wandb

            wandb.config.update(hyperparameters, allow_val_change=True)  # a run may resume on another number of GPUs


class MLFlowRunLogger(MLFlowLogger):
    """Composer's logger to MLflow, which resumes the run with an id. Composer would resume any run of the same name."""

    def __init__(self, experiment: str, run_name: str, run_id: str | None):
        super().__init__(experiment, run_name, resume=run_id is not None)
        self._id = run_id

    def _start_mlflow_run(self, state: State) -> None:
        if self._id is not None:
            self.tags["run_name"] = self._id  # the tag by which Composer finds a run
        super()._start_mlflow_run(state)


class ProgressBar(ProgressBarLogger):
    """Composer's progress bar, without printing Composer's settings, and without state in checkpoints.

    Composer can't load the state of a bar that was saved during a validation (`KeyError: 'n'`).
    """

    def __init__(self) -> None:
        super().__init__(stream="stderr")
        self.hparams_already_logged_to_console = True

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    # A resume within an epoch, for which Composer doesn't call `epoch_start`.
    def batch_start(self, state: State, logger: Logger) -> None:
        if self.train_pbar is None:
            self.epoch_start(state, logger)

    def _build_pbar(self, state: State, is_train: bool) -> Any:
        bar = super()._build_pbar(state, is_train)
        if is_train:
            # A resumed run's bar begins at the run's batch, and its rate counts only batches of this attempt.
            bar.pbar.initial = bar.pbar.n = bar.pbar.last_print_n = int(getattr(state.timestamp, bar.timestamp_key))
        return bar


class JSONLLogger(LoggerDestination):
    """Logger that writes `{"batch": …, "tokens": …, "time": …, metric: value, …}` lines on rank 0.

    `batch` and `tokens` are totals trained so far, and `time` is Unix time in seconds. A resumed run appends to the file.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.file: TextIO | None = None
        self.pending: dict[str, float] = {}

    def init(self, state: State, logger: Logger) -> None:
        if is_first_rank():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.path.open("a+", encoding="utf-8")
            self.file.seek(max(self.file.tell() - 1, 0))  # lines are ASCII
            if self.file.read() not in ("", "\n"):  # its writer was killed, or the disk was full
                self.file.write("\n")

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        for name, value in metrics.items():
            with suppress(TypeError, ValueError):
                self.pending[name] = float(value)

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.file is not None and self.pending:
            when = {"batch": state.timestamp.batch.value, "tokens": state.timestamp.token.value, "time": time.time()}
            self.file.write(json.dumps({**when, **self.pending}) + "\n")
            self.file.flush()
        self.pending = {}

    eval_after_all = eval_standalone_end = fit_end = batch_end  # standalone: a resumed run's `Trainer.eval`

    def post_close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


def log_scores(config: PretrainConfig, name: str, batch: int, scores: dict[str, float]) -> None:
    """Log the scores of a checkpoint to the run's loggers, at its batch. A failure is one printed line.

    They are a run of their own, as the pretraining run still writes to its own, where W&B takes no step below the newest.
    """
    logging, run = config.logging, f"{config.run_name}-{name}"
    try:
        if logging.tensorboard and config.run_folder.is_dir():
            from torch.utils.tensorboard import SummaryWriter

            with SummaryWriter(str(config.run_folder / "tensorboard" / run)) as writer:
                for key, value in scores.items():
                    writer.add_scalar(key, value, batch)
        if logging.wandb is not None:
            import wandb

            with wandb.init(project=logging.wandb, id=run, name=run, group=config.run_name, resume="allow") as session:
                session.log(scores, step=batch)
        if logging.mlflow is not None:
            import mlflow

            query, experiment = f"attributes.run_name = '{run}'", mlflow.set_experiment(logging.mlflow).experiment_id
            found: Any = mlflow.search_runs([experiment], query, output_format="list")
            with mlflow.start_run(run_id=found[0].info.run_id if found else None, run_name=run):
                mlflow.log_metrics(scores, step=batch)
    except Exception as error:
        print(f"ba{batch}: its scores can't be logged ({type(error).__name__}: {first_line(error)})", flush=True)
