"""Where a run's files lie, from its configuration alone."""

from __future__ import annotations

from pathlib import Path

from biphasic.config.evaluate import EvaluateConfig
from biphasic.config.finetune import FinetuneConfig
from biphasic.config.schema import DataConfig, PretrainConfig, StreamConfig
from biphasic.storage import is_remote


def folder_of(config: PretrainConfig | FinetuneConfig | EvaluateConfig) -> Path:
    """Where a run writes."""
    return Path(config.output) / config.run_name


def checkpoint_places(config: PretrainConfig) -> tuple[str, Path]:
    """Where the run saves, a folder or a bucket's prefix, and this machine's folder of checkpoints."""
    here = folder_of(config) / "checkpoints"
    place = config.checkpoint.folder or str(here)
    return place, here if is_remote(place) else Path(place)


def splits_of(data: DataConfig) -> dict[str, StreamConfig]:
    """What is trained on and what validates, by its key in the YAML."""
    return data.streams if data.validation is None else {**data.streams, "data.validation": data.validation}
