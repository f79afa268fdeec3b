"""Where a run's metrics go."""

from __future__ import annotations

from pathlib import Path

from composer.loggers import LoggerDestination, TensorboardLogger

from biphasic.config.errors import UserError
from biphasic.config.schema import LoggingConfig
from biphasic.training.jsonl_logger import JSONLLogger


def loggers(config: LoggingConfig, folder: Path, run_name: str) -> list[LoggerDestination]:
    """Where metrics go.

    Raises:
        UserError: a logger's package isn't installed.
    """
    found: list[LoggerDestination] = []
    if config.jsonl:
        found.append(JSONLLogger(folder / "metrics.jsonl"))
    if config.tensorboard:
        found.append(TensorboardLogger(log_dir=str(folder / "tensorboard")))
    try:
        if config.wandb is not None:
            from composer.loggers import WandBLogger

            settings = config.wandb
            found.append(WandBLogger(settings.project, settings.group, run_name, settings.entity, settings.tags))
        if config.mlflow is not None:
            from composer.loggers import MLFlowLogger

            found.append(MLFlowLogger(config.mlflow.experiment, run_name, tracking_uri=config.mlflow.tracking_uri))
    except ImportError as error:
        raise UserError(f"logging: {error.name or error} isn't installed: uv pip install '.[loggers]'") from None
    return found
