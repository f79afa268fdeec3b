"""Decide which checkpoint a run starts from: its own newest one, or one of another run whose past is this run's past.

Nothing here imports torch, so that `--plan` can say where a run will start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from biphasic.checkpointing.manifest import Manifest, StoredCheckpoint, batch_of, manifest_name, newest_first
from biphasic.config.durations import TrainingProgress
from biphasic.config.history import Difference, constant_differences, first_difference, is_overridden
from biphasic.config.plan import StartPlan
from biphasic.config.pretrain import PretrainConfig
from biphasic.errors import UserError
from biphasic.storage import first_line, is_remote, join, open_store, user_error


@dataclass(frozen=True)
class BranchPoint:
    """A checkpoint of another run, and the folder or bucket prefix that holds it."""

    folder: str
    manifest: Manifest

    @property
    def path(self) -> str:
        """Path or URL of the checkpoint."""
        return join(self.folder, self.manifest.path)


def recorded_config(manifest: Manifest) -> PretrainConfig:
    """Return the configuration with which a checkpoint was trained.

    Raises:
        UserError: the manifest has none that can be read, for example because another version wrote it.
    """
    try:
        return PretrainConfig.model_validate(manifest.run.get("config"))
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in ("config", *fault["loc"]))
        raise UserError(f"{manifest.name}: the run's configuration can't be read ({where}: {fault['msg']})") from None


def past_differences(manifest: Manifest, config: PretrainConfig) -> list[Difference]:
    """Return how a checkpoint's past differs from the beginning of a run: nothing if the run may start from it.

    Raises:
        UserError: the checkpoint's configuration can't be read.
    """
    return _past_differences(manifest, config, [])


def _past_differences(manifest: Manifest, config: PretrainConfig, overrides: list[str]) -> list[Difference]:
    recorded = recorded_config(manifest)
    constants = list(constant_differences(recorded, config, overrides))
    if constants:
        return constants
    difference = first_difference(recorded, config, overrides)
    return [] if difference is None or not difference.is_past(_last_batch(manifest)) else [difference]


def _last_batch(manifest: Manifest) -> TrainingProgress:
    """Return when the checkpoint's last batch began."""
    return TrainingProgress(*manifest.run["last_batch"])


def _end(manifest: Manifest) -> TrainingProgress:
    """Return what has been trained at the checkpoint."""
    return TrainingProgress(manifest.batch, *(manifest.run[name] for name in ("rows", "tokens", "epochs")))


def other_run_message(manifest: Manifest, config: PretrainConfig) -> str | None:
    """Return a message if a checkpoint is of a run with another name and another configuration.

    A common past is not enough: the run would write into the other run's folder.
    """
    name = manifest.run["name"]
    try:
        if name == config.run_name or first_difference(recorded_config(manifest), config) is None:
            return None
    except UserError:
        pass
    return f"it is of another run, {name}"


def foreign_folder_message(destination: str, run: str) -> str:
    """Return the message for a folder that holds nothing but the checkpoints of another run."""
    return (
        f"checkpoint.folder {destination}: holds the checkpoints of another run, {run}: choose another folder, or set "
        "run_name to that run's name, so that the configurations are compared"
    )


def require_same_past(manifest: Manifest, config: PretrainConfig, indexes: dict[str, str]) -> None:
    """Check that a run may resume from its own checkpoint: a restart may change the future, but not the past.

    Args:
        manifest: the checkpoint's manifest.
        config: the run's configuration. `checkpoint.resume_overrides` names what may differ.
        indexes: hash of each training stream's index, by key.

    Raises:
        UserError: something that affects the trained batches has changed, or the run would end before the checkpoint.
    """
    overrides = config.checkpoint.resume_overrides
    differences = _past_differences(manifest, config, overrides)
    lines = [_describe(difference) for difference in differences]
    keys = [difference.key for difference in differences]
    for key, old, new in _changed_indexes(manifest, indexes):
        if not is_overridden(key, overrides):
            lines.append(f"{key}: {old!r} until now, {new!r} here")
            keys.append(key)
    if lines:
        raise UserError(
            f"{config.run_name}: its checkpoint {manifest.path} was trained with another configuration:\n  "
            + "\n  ".join(lines)
            + "\nchange that back, choose another run_name (start_from takes what the two share), or let it differ: "
            f"checkpoint.resume_overrides=[{', '.join(keys)}]"
        )
    if _last_batch(manifest).reached(config.max_duration):
        raise UserError(
            f"max_duration: {config.max_duration} ends before {config.run_name}'s checkpoint {manifest.path}: choose at "
            "least that length, or another run_name"
        )


def overridden_keys(manifest: Manifest, config: PretrainConfig, indexes: dict[str, str]) -> list[str]:
    """Return the keys that a run has changed on the way, by `checkpoint.resume_overrides`, if it resumes from a checkpoint.

    The checkpoints of such a run hold its last configuration, which isn't that of its past.
    """
    keys = {difference.key for difference in _past_differences(manifest, config, [])}
    return sorted({*manifest.run["overridden"], *keys, *(key for key, _, _ in _changed_indexes(manifest, indexes))})


def require_same_data(point: BranchPoint, indexes: dict[str, str]) -> None:
    """Check that the run reads the rows that the other run has read.

    Raises:
        UserError: the index of a training stream is another one.
    """
    for key, old, new in _changed_indexes(point.manifest, indexes):
        raise UserError(f"start_from: {point.path} was trained on other rows: {key} is {old!r} there, {new!r} here")


def _changed_indexes(manifest: Manifest, indexes: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    recorded = manifest.run["indexes"]
    for key in sorted(recorded.keys() | indexes.keys()):
        if recorded.get(key) != indexes.get(key):
            yield key, recorded.get(key, "nothing"), indexes.get(key, "nothing")


def _describe(difference: Difference) -> str:
    since = f", from batch {difference.batch} on" if difference.batch else ""
    moved = " (a share moves when max_duration changes: write the first as it was)"
    has_moved = "dur of " in difference.first and "dur of " in difference.second
    return (
        f"{difference.key}: {difference.first} until now, {difference.second} here{since}{moved if has_moved else ''}"
    )


def find_branch_point(path: str, config: PretrainConfig) -> BranchPoint:
    """Find the newest complete checkpoint of another run whose past is this run's own past.

    Args:
        path: `start_from`: a run's folder, a folder or bucket prefix that a run saves to, or one checkpoint in it.
        config: the configuration of the run that will start.

    Raises:
        UserError: there is no such checkpoint. The message says where the runs part, and which checkpoints there are.
    """
    folder, batch = _folder_and_batch(path)
    complete, others, difference = list[str](), list[str](), None
    try:
        for checkpoint in newest_first(open_store(folder)):
            if batch is not None and checkpoint.batch != batch:
                continue
            if checkpoint.manifest is None:
                others.append(f"ba{checkpoint.batch} ({checkpoint.fault})")
                continue
            if checkpoint.manifest.run["overridden"]:
                keys = ", ".join(checkpoint.manifest.run["overridden"])
                others.append(f"ba{checkpoint.batch} (that run has changed {keys} on the way, by resume_overrides)")
                continue
            differences = past_differences(checkpoint.manifest, config)
            if not differences and not _end(checkpoint.manifest).reached(config.max_duration):
                return BranchPoint(folder, checkpoint.manifest)
            complete.append(f"ba{checkpoint.batch}")
            difference = difference or next(iter(differences), None)
    except OSError as error:
        raise user_error(f"start_from: {path}: can't be read ({first_line(error)})", error) from None
    raise UserError(f"start_from: {path}: {_no_branch_point(config, batch, complete, others, difference)}")


def _no_branch_point(
    config: PretrainConfig, batch: int | None, complete: list[str], others: list[str], difference: Difference | None
) -> str:
    if not complete:
        missing = f"there is no {manifest_name(batch)}" if batch is not None else "it holds no checkpoint"
        return (
            f"{missing}; expected a complete checkpoint"
            if not others
            else f"no usable checkpoint there ({_list(others)})"
        )
    if difference is None:
        return f"this run ends ({config.max_duration}) before or at every checkpoint there: {_list(complete)}"
    return (
        f"no checkpoint there is part of this run, since the two part at batch {difference.batch}: {difference.key} is "
        f"{difference.first} there, {difference.second} here. Complete checkpoints there: {_list(complete)}"
        + (f"; not usable: {_list(others)}" if others else "")
    )


def _list(names: list[str]) -> str:
    """Join names; of many, only the first three and the last."""
    shown = names if len(names) <= 5 else [*names[:3], "…", names[-1]]
    return ", ".join(shown)


def _folder_and_batch(path: str) -> tuple[str, int | None]:
    """Return the folder or prefix of checkpoints, and the batch if `path` is one checkpoint."""
    parent, _, name = path.rstrip("/").rpartition("/")
    batch = batch_of(name if name.endswith(".pt") else f"{name}/")
    if batch is not None:
        return parent or ".", batch
    if not is_remote(path) and (Path(path) / "checkpoints").is_dir():
        return str(Path(path) / "checkpoints"), None
    return path, None


def plan_start(config: PretrainConfig) -> StartPlan:
    """Say where a run would start now, from the manifests alone. Files' hashes and the data are compared when it starts."""
    destination = config.checkpoint_destination
    try:
        own = other = None
        for found in _existing(destination):  # reads a manifest only when it is reached
            if found.manifest is not None and other_run_message(found.manifest, config) is None:
                own = found.manifest
                break
            other = other or found.manifest
    except OSError as error:
        return StartPlan(problem=f"checkpoint.folder {destination}: can't be read ({first_line(error)})")
    try:
        if own is not None:
            require_same_past(own, config, own.run["indexes"])
            return StartPlan(own.batch, join(destination, own.path), "its own newest checkpoint")
    except UserError as error:
        return StartPlan(problem=str(error), refused=True)
    if other is not None:
        return StartPlan(problem=foreign_folder_message(destination, other.run["name"]), refused=True)
    try:
        if config.start_from is not None:
            point = find_branch_point(config.start_from, config)
            return StartPlan(point.manifest.batch, point.path, f"of {point.manifest.run['name']}, by start_from")
    except UserError as error:
        return StartPlan(problem=str(error))
    weights = "new weights" if config.model.init_from is None else f"the weights of {config.model.init_from}"
    return StartPlan(0, None, weights)


def _existing(destination: str) -> Iterator[StoredCheckpoint]:
    if is_remote(destination) or Path(destination).is_dir():
        yield from newest_first(open_store(destination))
