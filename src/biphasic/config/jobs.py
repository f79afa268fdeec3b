"""The jobs, and the schema of each. A schema is imported when it is needed, because building its classes takes time."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from biphasic.config.base import JobConfig

_SCHEMAS = {
    "pretrain": "PretrainConfig",
    "finetune": "FinetuneConfig",
    "evaluate": "EvaluateConfig",
    "convert": "ConvertConfig",
    "tasks": "TasksConfig",
    "sweep": "SweepConfig",
    "study": "StudyConfig",
}
"""Name of the class in `biphasic.config.<job>`."""
JOBS = tuple(_SCHEMAS)


def name_of(schema: type[JobConfig]) -> str:
    """Return the name of the job whose YAML this class describes."""
    return next(job for job, name in _SCHEMAS.items() if name == schema.__name__)


def schema_of(job: str) -> type[JobConfig]:
    """Return the class of a job's YAML."""
    return getattr(import_module(f"biphasic.config.{job}"), _SCHEMAS[job])
