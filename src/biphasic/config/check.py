"""Check keys and values against the schema of a job, and report every error at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from biphasic.config.base import JobConfig, secret_problems
from biphasic.config.jobs import schema_of
from biphasic.config.messages import nearest, translate
from biphasic.errors import ConfigError, Problem


def check(content: dict[Any, Any], jobs: tuple[str, ...], source: Callable[[str], str], ranks: int) -> JobConfig:
    """Return the checked configuration.

    Args:
        content: keys and values. A key with a problem is removed from it.
        jobs: the allowed values of `job`.
        source: function that returns where a key was written.
        ranks: processes of the run.

    Raises:
        ConfigError: with every unknown key, wrong type and impossible combination.
    """
    problems, config = _validate(content, jobs, source)
    broken = {problem.key for problem in problems}
    if problems:
        # The other keys are checked without the broken ones, so that one call reports everything.
        for key in sorted(broken, key=len, reverse=True):
            _remove(content, key.split("."))
        more, config = _validate(content, jobs, source)
        if more:
            raise ConfigError(sorted(problems))
    assert config is not None
    for keys, message in [*secret_problems(config), *config.problems(ranks)]:
        if not any(_overlap(key, other) for key in keys for other in broken):
            problems.append(Problem(source(keys[0]), keys[0], message))
    if problems:
        raise ConfigError(sorted(problems))
    return config


def _validate(
    content: dict[Any, Any], jobs: tuple[str, ...], source: Callable[[str], str]
) -> tuple[list[Problem], JobConfig | None]:
    if "job" not in content:
        return [Problem(source(""), "job", f"is missing; expected one of {', '.join(jobs)}")], None
    job = content["job"]
    if job not in jobs:
        message = f"got {job!r}, expected one of {', '.join(jobs)}{nearest(job, list(jobs))}"
        return [Problem(source("job"), "job", message)], None
    schema = schema_of(job)
    try:
        return [], schema.model_validate(content)
    except ValidationError as error:
        return translate(error, schema, content, source), None


def _remove(content: Any, keys: list[str]) -> None:
    for key in keys[:-1]:
        content = content[int(key)] if isinstance(content, list) else content.get(key)
        if not isinstance(content, dict | list):
            return
    if isinstance(content, dict):
        content.pop(keys[-1], None)
    elif keys[-1].isdigit() and int(keys[-1]) < len(content):
        content.pop(int(keys[-1]))


def _overlap(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")
