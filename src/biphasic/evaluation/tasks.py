"""What an evaluation is about: mteb's tasks and benchmarks by name, from the hub or a mirror, and a person's own sets."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mteb
from mteb.abstasks.aggregated_task import AbsTaskAggregate
from mteb.abstasks.retrieval import AbsTaskRetrieval

from biphasic.config.checks_evaluate import set_name
from biphasic.config.errors import UserError
from biphasic.config.evaluate import EvaluateConfig
from biphasic.evaluation.sets import read_set
from biphasic.storage import hash_of, short
from biphasic.versions import require_form


@dataclass(frozen=True)
class Planned:
    """A task that will be run.

    `official`: mteb's leaderboard knows it. `retrieval`: it has queries and documents. `source` says where its data is from,
    and `mark` which it is: of the hub the revision, of a folder a hash of its files. `load` gives it with its data.
    """

    name: str
    official: bool
    retrieval: bool
    source: str
    mark: str
    load: Callable[[], Any]


def plan_tasks(config: EvaluateConfig) -> list[Planned]:
    """The tasks that a configuration names.

    Raises:
        UserError: mteb knows no such task, benchmark, split or language, or a folder isn't there.
    """
    found = [_named(name, config) for name in config.tasks]
    for name in config.benchmarks:
        try:
            tasks = mteb.get_benchmark(name).tasks
        except KeyError as error:
            raise UserError(f"benchmarks: mteb has none of this name: {_said(error)}") from None
        known = {task.metadata.name for task in found}
        found += [task for task in tasks if task.metadata.name not in known]
    names = {task.metadata.name for task in found} | {set_name(path) for path in config.sets}
    for key in ("subsets", "splits"):
        if lost := [name for name in getattr(config, key) if name not in names]:
            raise UserError(f"{key}.{lost[0]}: is none of the tasks ({', '.join(sorted(names))})")
    if taken := {task.metadata.name for task in found} & {set_name(path) for path in config.sets}:
        raise UserError(f"sets: {taken.pop()} is the name of one of mteb's tasks: rename the folder")
    return [_planned(task, config) for task in found] + [_own(path, config) for path in config.sets]


def _named(name: str, config: EvaluateConfig) -> Any:
    subsets, splits = config.subsets.get(name), config.splits.get(name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            task = mteb.get_task(name)
    except KeyError as error:
        raise UserError(f"tasks: mteb has none of this name: {_said(error)}") from None
    for key, given, known in (("subsets", subsets, task.hf_subsets), ("splits", splits, task.eval_splits)):
        if lost := [one for one in given or () if one not in known]:
            raise UserError(f"{key}.{name}: {lost[0]} is none of {', '.join(known)}")
    if isinstance(task, AbsTaskAggregate) and (subsets or splits):
        raise UserError(f"{name}: is made of other tasks ({len(task.metadata.tasks)}): name these to choose among them")
    return mteb.get_task(name, eval_splits=splits, hf_subsets=subsets) if subsets or splits else task


def _planned(task: Any, config: EvaluateConfig) -> Planned:
    name, dataset, retrieval = task.metadata.name, task.metadata.dataset, isinstance(task, AbsTaskRetrieval)
    if config.mirror is None:
        mark = f"{dataset['path']}@{dataset['revision']}"
        return Planned(name, True, retrieval, mark, mark, lambda: _loaded(task))
    parts = list(task.metadata.tasks) if isinstance(task, AbsTaskAggregate) else [task]
    copies = [_mirrored(part.metadata.dataset, config.mirror) for part in parts]
    mark = hashlib.sha256("".join(map(_folder_hash, copies)).encode()).hexdigest()[:24]

    def load() -> Any:
        for part, copy in zip(parts, copies, strict=True):
            about = {**part.metadata.dataset, "path": str(copy)}
            part.metadata = part.metadata.model_copy(update={"dataset": about})
        with _offline(), _own_cache(Path(config.cache) / "datasets" / mark):
            return _loaded(task)

    return Planned(name, True, retrieval, ", ".join(map(str, copies)), mark, load)


def _own(path: str, config: EvaluateConfig) -> Planned:
    name = set_name(path)
    place = Path(path)
    if not place.is_dir():
        raise UserError(f"sets: {path}: there is no such folder")
    splits = config.splits.get(name)

    def load() -> Any:
        task = read_set(path, name, config.sets_language, splits)
        task.load_data()
        return task

    return Planned(name, False, True, path, _folder_hash(place), load)


def _loaded(task: Any) -> Any:
    try:
        if isinstance(task, AbsTaskAggregate):
            for part in task.metadata.tasks:
                part.load_data()
        else:
            task.load_data()
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        where = task.metadata.dataset["path"]
        raise UserError(f"task {task.metadata.name}: its data can't be read from {where} ({short(error)})") from None
    return task


def _mirrored(dataset: Any, mirror: str) -> Path:
    path, revision = str(dataset["path"]), dataset["revision"]
    for name in (path, path.rpartition("/")[2], path.replace("/", "__")):
        if (Path(mirror) / name).is_dir():
            return (Path(mirror) / name).absolute()
    raise UserError(
        f"mirror {mirror}: has no {path}; bring it where there is a network: hf download --repo-type dataset {path} "
        f"--revision {revision} --local-dir {Path(mirror) / path}"
    )


def _folder_hash(folder: Path) -> str:
    """Of its files' names and contents."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and "/." not in file.as_posix())
    content = [(file.relative_to(folder).as_posix(), hash_of(file)) for file in files]
    return hashlib.sha256(repr(content).encode()).hexdigest()[:24]


@contextmanager
def _offline() -> Iterator[None]:
    """Nobody asks the hub: both libraries read these when they ask, and the environment is for their processes."""
    from datasets import config
    from huggingface_hub import constants

    places: tuple[tuple[str, Any], ...] = (("datasets", config), ("huggingface_hub", constants))
    before = [(place, require_form(package, place, "HF_HUB_OFFLINE", True)) for package, place in places]
    environment = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        for place, _ in before:
            place.HF_HUB_OFFLINE = True
        yield
    finally:
        for place, value in before:
            place.HF_HUB_OFFLINE = value
        os.environ.pop("HF_HUB_OFFLINE")
        if environment is not None:
            os.environ["HF_HUB_OFFLINE"] = environment


@contextmanager
def _own_cache(folder: Path) -> Iterator[None]:
    """A place of its own for what `datasets` makes of a local folder: it knows one by its last name and card alone."""
    from datasets import config

    before = require_form("datasets", config, "HF_DATASETS_CACHE", folder)
    config.HF_DATASETS_CACHE = folder
    try:
        yield
    finally:
        config.HF_DATASETS_CACHE = before


def _said(error: KeyError) -> str:
    return str(error.args[0]).removeprefix("KeyError: ")
