"""Read the progress of a study's runs from their checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from biphasic.checkpointing.manifest import Manifest, manifest_batches, manifest_name, read_manifest
from biphasic.checkpointing.start_rules import ResumeGuard
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.study import StudyConfig
from biphasic.errors import UserError
from biphasic.storage import open_store, user_errors
from biphasic.study.tree import StudyRun

RUN_FILE = "run.yaml"
"""The resolved YAML of a run, in its local folder."""


@dataclass(frozen=True)
class RunState:
    """The checkpoints of a run: the batches of those with a manifest, and the newest manifest."""

    batches: frozenset[int] = frozenset()
    newest: Manifest | None = None

    @property
    def trained(self) -> int:
        """Batch of the newest checkpoint; 0 if there is none."""
        return 0 if self.newest is None else self.newest.batch

    def is_done(self, config: PretrainConfig) -> bool:
        """Return whether the newest checkpoint is the end of the run, and not that of a longer one."""
        return self.newest is not None and self.newest.is_first_at(config.max_duration)

    def past_differences(self, config: PretrainConfig) -> list[str]:
        """Return a line for each key whose value in the run's checkpoints differs from the study's.

        Training data is compared later, by its hash, when the run opens it.
        """
        if self.newest is None:
            return []
        try:
            guard = ResumeGuard(config)
            differences = guard.past_differences(self.newest, guard.overrides)
        except UserError as error:
            return [str(error)]
        return [
            f"{difference.key}: {difference.first} in its checkpoints, {difference.second} in the study"
            for difference in differences
        ]


def require_own_folders(study: StudyConfig) -> None:
    """Raise a UserError if a local folder of a study in a bucket is that of another run, which has the same `output`."""
    for name in study.models if study.local_folder != study.folder else ():
        for file in (Path(study.local_folder, name, each) for each in ("config.yaml", RUN_FILE)):
            with user_errors(f"{file}: can't be read", yaml.YAMLError, LookupError, TypeError):
                folder = yaml.safe_load(file.read_text(encoding="utf-8"))["checkpoint"]["folder"] if file.is_file() else None
            if folder not in (None, study.checkpoints_of(name)):
                raise UserError(
                    f"output {study.output}: {file.parent} is of the run that saves to {folder}: set another output"
                )


def read_states(study: StudyConfig) -> dict[str, RunState]:
    """Return the state of each model's run.

    Raises a UserError if the folder or bucket can't be read, or a model's local folder is another run's.
    """
    require_own_folders(study)
    return {name: _read_state(study.checkpoints_of(name)) for name in study.models}


def _read_state(place: str) -> RunState:
    try:
        with user_errors(f"folder {place}: can't be read"):
            store = open_store(place)
            batches = manifest_batches(store.list())
            newest = read_manifest(store, manifest_name(batches[0])) if batches else None
    except ValueError as error:
        raise UserError(f"{place}: {error}") from None
    return RunState(frozenset(batches), newest)


def is_ready(run: StudyRun, configs: Mapping[str, PretrainConfig], states: Mapping[str, RunState]) -> bool:
    """Return whether all checkpoints that a run needs to start exist."""
    if run.continues is not None and not states[run.continues].is_done(configs[run.continues]):
        return False
    return run.parent is None or states[run.parent].trained >= run.start


def starting_run(run: StudyRun, tree: Mapping[str, StudyRun], states: Mapping[str, RunState]) -> str | None:
    """Return the run whose checkpoints a run starts from; None if it trains from the beginning.

    Usually this is its parent. If the parent was trained before another run branched off at this point, it may have no
    checkpoint at or before it; then it is the nearest ancestor that has one.
    """
    name, batch = run.parent, run.start
    while name is not None and not any(saved <= batch for saved in states[name].batches):
        name, batch = tree[name].parent, min(batch, tree[name].start)
    return name
