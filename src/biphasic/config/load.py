"""Load a YAML file and `key=value` overrides as a checked configuration, or report all errors at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from omegaconf import OmegaConf
from pydantic import BaseModel

from biphasic.config.base import JOBS, JobConfig, schema_of
from biphasic.config.check import check
from biphasic.config.read import escape_interpolations, read_tree
from biphasic.errors import UserError

if TYPE_CHECKING:
    from biphasic.config.convert import ConvertConfig
    from biphasic.config.evaluate import EvaluateConfig
    from biphasic.config.finetune import FinetuneConfig
    from biphasic.config.pretrain import PretrainConfig
    from biphasic.config.study import StudyConfig
    from biphasic.config.sweep import SweepConfig
    from biphasic.config.tasks import TasksConfig

    Config = PretrainConfig | FinetuneConfig | EvaluateConfig | ConvertConfig | TasksConfig | SweepConfig | StudyConfig

Job = TypeVar("Job", bound=JobConfig)


def load(file: str | Path, overrides: list[str] | None = None, ranks: int = 1) -> Config:
    """Read a YAML with its `defaults:` and overrides, and check it.

    Args:
        file: path of the YAML. Its `defaults: other.yaml` (or a list) is read first, relative to the file.
        overrides: `key=value`, the value as YAML; `objective.phases.0.until=100ba` changes an element of a list.
        ranks: number of ranks, which some values must be divisible by.

    Raises:
        ConfigError: lists every unknown key, wrong type and impossible combination with its file and line, also in the
            models of a study.
    """
    tree = read_tree(file, overrides or [])
    config: Config = check(tree.content(), JOBS, tree.source, ranks)  # pyright: ignore[reportAssignmentType]
    if config.job == "study":
        from biphasic.config.study import expand

        expand(config, tree, ranks)
    return config


def load_job(schema: type[Job], file: str | Path, overrides: list[str] | None = None) -> Job:
    """Read a YAML as `load` does. Raises a UserError if its job is not that of `schema`."""
    config = None if Path(file).is_dir() else load(file, overrides)
    if not isinstance(config, schema):
        expected = next(job for job in JOBS if schema_of(job) is schema)
        found = "a folder" if config is None else f"job: {config.job}"
        raise UserError(f"{file}: is {found}; expected a YAML of job: {expected}")
    return config


def dump(config: BaseModel) -> str:
    """Return the complete configuration as YAML, including defaults. Loading it gives an equal configuration."""
    return OmegaConf.to_yaml(OmegaConf.create(escape_interpolations(config.model_dump(mode="json"))))
