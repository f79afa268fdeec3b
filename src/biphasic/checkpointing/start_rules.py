"""Decide which checkpoint a run may start from: its own newest one, or one of another run that has the same past.

Nothing here imports torch, so that `--plan` can say where a run will start.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from biphasic.checkpointing.manifest import Manifest, StoredCheckpoint, batch_of, manifest_name, newest_first
from biphasic.checkpointing.upload import require_moved
from biphasic.config.base import within
from biphasic.config.history import Difference, compare_pasts, first_difference, history_of, is_overridden, phase_paths
from biphasic.config.phase_inputs import inputs_differ, phase_key
from biphasic.config.plan import StartPlan
from biphasic.config.pretrain import PretrainConfig
from biphasic.data.streams import INDEX, index_hashes
from biphasic.durations import TrainingProgress
from biphasic.errors import Missing, Unavailable, UserError, first_line
from biphasic.storage import is_remote, join, open_store, user_errors
from biphasic.storage.hub import is_made_by_jobs
from biphasic.timeline import phase_at, resolve_phases

_PATHS = ("local", "remote", "cache", "folder", "tokenizer", "output", "init_from", "start_from")
"""Keys whose values are paths, which may differ between nodes."""


class ResumeGuard:
    """Compares a run with its checkpoints and with other runs, by its configuration.

    Methods raise a UserError if the run must not start. `indexes` holds the hash of each training stream's index, by key.
    `overrides` are the keys that a restart may change, though they affect batches that are trained.
    """

    def __init__(self, config: PretrainConfig):
        self.config = config
        # The data of phases is compared by the hash of its index, as the run's own is.
        self.overrides = [*config.checkpoint.resume_overrides, *phase_paths(config)]

    def own_checkpoints(self, checkpoints: Iterable[StoredCheckpoint]) -> Iterator[StoredCheckpoint]:
        """Yield the checkpoints in the run's folder. One of another run has a fault instead of its manifest, and is skipped.

        A checkpoint is another run's if name and configuration both differ: a common past is not enough, because the run
        would write into the other's folder. After the last one, raises a UserError if there were some of another run.
        """
        other = None
        for checkpoint in checkpoints:
            if checkpoint.manifest is not None and not self._is_own(checkpoint.manifest):
                name = checkpoint.manifest.run["name"]
                other = other or name
                checkpoint = StoredCheckpoint(checkpoint.batch, None, f"it belongs to another run, {name}")
            yield checkpoint
        if other is not None:
            raise UserError(
                f"checkpoint.folder {self.config.checkpoint_destination}: holds the checkpoints of another run, {other}: "
                "choose another folder, or set run_name to that run's name, so that the configurations are compared"
            )

    def _is_own(self, manifest: Manifest) -> bool:
        with suppress(UserError):  # its configuration can't be read
            is_named = manifest.run["name"] == self.config.run_name
            is_own = is_named or first_difference(history_of(recorded_config(manifest)), history_of(self.config)) is None
            return is_own and "merged" not in manifest.run  # a mean has no optimizer state
        return False

    def past_differences(self, manifest: Manifest, overrides: Sequence[str] = ()) -> list[Difference]:
        """Return how a checkpoint's past differs from the run's, but for `overrides`."""
        return compare_pasts(recorded_config(manifest), self.config, manifest.last_batch, overrides)

    def require_same_past(self, manifest: Manifest, indexes: Mapping[str, str]) -> None:
        """Check that the run may resume from its own checkpoint: a restart may change the future, but not the past.

        `checkpoint.resume_overrides` names what may differ. Raises a UserError if something that affects the trained
        batches has changed, or the run would end before the checkpoint.
        """
        config = self.config
        recorded, trained = recorded_config(manifest), f"{config.run_name}: its checkpoint {manifest.path} was trained"
        # Phases that all read the same may begin again.
        has_inputs = any(inputs_differ(one.inputs) for one in (recorded, config))
        old, new = _phase_index(recorded, manifest.last_batch), _phase_index(config, manifest.progress)
        if new < old and has_inputs:
            raise UserError(
                f"{trained} in phase {old} and would continue in phase {new} here. As phases differ in data or batch size, "
                "the run's place in the data would be lost, also with checkpoint.resume_overrides: restore the phases and "
                "their `until`, or choose another run_name"
            )
        lines = {difference.key: _describe(difference) for difference in self.past_differences(manifest, self.overrides)}
        for key, before, now in self._changed_indexes(manifest, indexes):
            if not is_overridden(key, self.overrides):
                lines[key] = f"{key}: {before!r} until now, {now!r} here"
        if lines:
            # Another batch size would lose the place in the data.
            allowed = ", ".join(key for key in lines if key != "global_batch_size")
            raise UserError(
                f"{trained} with another configuration:\n  "
                + "\n  ".join(lines.values())
                + "\nrestore the earlier values, choose another run_name (start_from can use the common part)"
                + (f", or allow the difference: checkpoint.resume_overrides=[{allowed}]" if allowed else "")
            )
        # The place in the data is counted in batches of the phases so far.
        places = [
            [(each.source, each.rows) for each in one.inputs[: index + 1 if has_inputs else 1]]
            for one, index in ((recorded, old), (config, _phase_index(config, manifest.last_batch)))
        ]
        if places[0] != places[1]:
            raise UserError(
                f"{trained} on batches of other sizes or other data, so the run's place in the data would be lost, also "
                "with checkpoint.resume_overrides: restore global_batch_size and the phases until now. For another size "
                "from here on, begin a further phase at this batch, with its own global_batch_size"
            )
        if manifest.last_batch.reached(config.max_duration):
            raise UserError(
                f"max_duration: {config.max_duration} ends before {config.run_name}'s checkpoint {manifest.path}: choose at "
                "least that length, or another run_name"
            )

    def overridden_keys(self, manifest: Manifest, indexes: Mapping[str, str]) -> list[str]:
        """Return the keys that `checkpoint.resume_overrides` has changed, now or at an earlier restart, if the run resumes.

        The configuration in the checkpoints of such a run isn't that of its whole past.
        """
        keys = {difference.key for difference in self.past_differences(manifest, phase_paths(self.config))}
        changed = (key for key, _, _ in self._changed_indexes(manifest, indexes))
        return sorted({*manifest.run["overridden"], *keys, *changed})

    def require_rows_of_branch_point(self, path: str, manifest: Manifest, indexes: Mapping[str, str]) -> None:
        """Check that the index of each training stream is the one that the other run has read."""
        for key, old, new in self._changed_indexes(manifest, indexes):
            raise UserError(f"start_from: {path} was trained on other rows: {key} is {old!r} there, {new!r} here")

    def _changed_indexes(self, manifest: Manifest, indexes: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
        """Yield the streams that the run has read at the checkpoint and whose indexes differ."""
        recorded, last_batch = manifest.run["indexes"], manifest.last_batch
        spans = resolve_phases(self.config.objective.phases, self.config.max_duration)
        begun = ["data", *(phase_key(span.index) for span in spans if last_batch.reached(span.start))]
        for key in sorted(recorded.keys() | indexes.keys()):
            if recorded.get(key) != indexes.get(key) and any(within(key, section) for section in begun):
                yield key, recorded.get(key, "nothing"), indexes.get(key, "nothing")

    def _indexes_here(self, manifest: Manifest) -> dict[str, str]:
        """Return the hashes of the local streams' indexes; those of others are taken to be the checkpoint's."""
        streams = self.config.streams.items()
        local = {key: each for key, each in streams if each.remote is None and Path(each.local, INDEX).is_file()}
        return {**manifest.run["indexes"], **index_hashes(local)}

    def find_branch_point(self) -> tuple[str, Manifest]:
        """Find the newest complete checkpoint of another run whose past is this run's own past.

        `start_from` is a run's folder, a folder or bucket prefix that a run saves to, or one checkpoint in it. Returns that
        folder or prefix, and the checkpoint's manifest. If there is none, raises a UserError that says where the runs
        differ and which checkpoints there are.
        """
        path = self.config.start_from or ""
        folder, batch = checkpoint_folder(path), batch_in_path(path)
        end, complete, unusable, difference = self.config.max_duration, list[str](), list[str](), None
        with user_errors(f"start_from: {path}: can't be read"):
            for checkpoint in newest_first(open_store(folder)):
                manifest, name = checkpoint.manifest, f"ba{checkpoint.batch}"
                if batch is not None and checkpoint.batch != batch:
                    continue
                if manifest is None:
                    unusable.append(f"{name} ({checkpoint.fault})")
                elif "merged" in manifest.run:
                    unusable.append(f"{name} (it is a mean of checkpoints, without optimizer state: use model.init_from)")
                elif keys := ", ".join(manifest.run["overridden"]):
                    unusable.append(f"{name} (that run changed {keys} when it resumed, with resume_overrides)")
                else:
                    differences = self.past_differences(manifest)
                    if not differences and not manifest.progress.reached(end):
                        return folder, manifest
                    complete.append(name)
                    difference = difference or next(iter(differences), None)
        if difference is not None:
            reason = (
                f"no checkpoint there has the same past as this run: the two differ from batch {difference.batch} on "
                f"({difference.key} is {difference.first} there, {difference.second} here). Complete checkpoints there: "
                + _shortened(complete)
                + (f"; not usable: {_shortened(unusable)}" if unusable else "")
            )
        elif complete:
            reason = f"this run ends ({end}) before or at every checkpoint there: {_shortened(complete)}"
        elif unusable:
            reason = f"no usable checkpoint there ({_shortened(unusable)})"
        else:
            missing = "it holds no checkpoint" if batch is None else f"there is no {manifest_name(batch)}"
            raise Missing(f"start_from: {path}: {missing}; expected a complete checkpoint")
        raise UserError(f"start_from: {path}: {reason}")

    def plan_start(self) -> StartPlan:
        """Return where the run would start, from manifests and indexes of local data. Files are checked when it starts."""
        config, destination = self.config, self.config.checkpoint_destination
        try:
            checkpoints = self.own_checkpoints(newest_first(open_store(destination)))
            if is_remote(destination):
                require_moved(config.local_checkpoints, open_store(destination))
            own = next((checkpoint.manifest for checkpoint in checkpoints if checkpoint.manifest is not None), None)
            if own is not None:
                self.require_same_past(own, self._indexes_here(own))
                return StartPlan(own.batch, join(destination, own.path), "its own newest checkpoint")
        except OSError as error:
            return StartPlan(unknown=f"checkpoint.folder {destination}: can't be read ({first_line(error)})")
        except UserError as error:
            return StartPlan(problem=str(error))
        try:
            if config.start_from is not None:
                folder, manifest = self.find_branch_point()
                path, name = join(folder, manifest.path), manifest.run["name"]
                self.require_rows_of_branch_point(path, manifest, self._indexes_here(manifest))
                return StartPlan(manifest.batch, path, f"of {name}, by start_from", is_branch=True)
        except Unavailable as error:
            return StartPlan(unknown=str(error))
        except UserError as error:
            place = config.start_from or ""
            is_made = isinstance(error, Missing) and (is_remote(place) or is_made_by_jobs(place))
            return StartPlan(missing=str(error)) if is_made else StartPlan(problem=str(error))
        weights = "new weights" if config.model.init_from is None else f"the weights of {config.model.init_from}"
        return StartPlan(0, None, weights)


def recorded_config(manifest: Manifest) -> PretrainConfig:
    """Return the configuration that a checkpoint was trained with. Raises a UserError if it can't be read."""
    try:
        return PretrainConfig.model_validate(manifest.run.get("config"))
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in ("config", *fault["loc"]))
        raise UserError(f"{manifest.name}: the run's configuration can't be read ({where}: {fault['msg']})") from None


def require_same(first: Mapping[str, Any], own: Mapping[str, Any], node: int, advice: str) -> None:
    """Check that a node's values are those of the first rank, but for paths. Raises a UserError."""
    for key in dict.fromkeys([*own, *first]):
        here, there = own.get(key, "not given"), first.get(key, "not given")
        if key.rpartition(".")[2] in _PATHS:
            here, there = here is None, there is None
        if here != there:
            raise UserError(f"node {node}: {key} is {own.get(key)} there, and {first.get(key)} on node 0: {advice}")


def _phase_index(config: PretrainConfig, progress: TrainingProgress) -> int:
    return phase_at(resolve_phases(config.objective.phases, config.max_duration), progress).index


def _describe(difference: Difference) -> str:
    since = f", from batch {difference.batch} on" if difference.batch else ""
    return f"{difference.key}: {difference.first} until now, {difference.second} here{since}"


def _shortened(names: list[str]) -> str:
    """Join names, or only the first three and the last if there are many."""
    return ", ".join(names if len(names) <= 5 else [*names[:3], "…", names[-1]])


def batch_in_path(path: str) -> int | None:
    """Return the batch of a checkpoint from its path or URL; None if the path is not that of one checkpoint."""
    name = path.rstrip("/").rpartition("/")[2]
    return batch_of(name if name.endswith(".pt") else f"{name}/")


def checkpoint_folder(path: str) -> str:
    """Return the folder or bucket prefix that holds a run's checkpoints.

    `path` is a run's folder, whose `config.yaml` says where it saves; that folder or prefix; or one checkpoint in it.
    """
    if batch_in_path(path) is not None:
        return path.rstrip("/").rpartition("/")[0] or "."
    if is_remote(path):
        return path
    config, local = Path(path) / "config.yaml", join(path, "checkpoints")
    if config.is_file():
        with user_errors(f"{config}: is not a run's configuration", yaml.YAMLError, LookupError, TypeError, AttributeError):
            content = yaml.safe_load(config.read_text(encoding="utf-8"))
            if content.get("job", "pretrain") != "pretrain":
                raise UserError(f"{config}: is of job: {content['job']}; expected a run of job: pretrain, with checkpoints")
            folder = content["checkpoint"]["folder"] or local
            # If it is relative, it is so to the directory in which the run was started.
            is_in_run = Path(folder) == Path(content.get("output", ""), content.get("run_name", ""), "checkpoints")
            return local if is_in_run else folder
    return local if Path(local).is_dir() else path
