"""The jobs, and the schema of each. A schema is imported when it is needed, because building its classes takes time."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from biphasic.config.base import JobConfig

JOBS = ("pretrain", "finetune", "evaluate", "convert", "tasks", "sweep", "study")


def schema_of(job: str) -> type[JobConfig]:
    """Return the class of a job's YAML."""
    return getattr(import_module(f"biphasic.config.{job}"), f"{job.capitalize()}Config")
