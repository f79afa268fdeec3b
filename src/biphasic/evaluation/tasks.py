"""Find the tasks of an evaluation: mteb's tasks and benchmarks, from the hub or a mirror, and local datasets."""

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mteb
from mteb.abstasks.aggregated_task import AbsTaskAggregate
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.types import PromptType

from biphasic.config.evaluate import EvaluateConfig, set_name
from biphasic.errors import UserError
from biphasic.evaluation.sets import read_set
from biphasic.storage import file_hash, user_errors
from biphasic.versions import require_form


@dataclass(frozen=True)
class PlannedTask:
    """A task of an evaluation, before its data is loaded."""

    name: str
    official: bool
    """Whether it is one of mteb's tasks."""
    retrieval: bool
    source: str
    fingerprint: str
    """Fingerprint of the data: the hub's path and revision, or a hash of a folder's files."""
    chosen: dict[str, Any]
    """Splits, subsets and language, each only if it is not the default."""
    load: Callable[[], Any]
    """Returns mteb's task with its data loaded."""


def plan_tasks(config: EvaluateConfig) -> list[PlannedTask]:
    """Return the tasks that a configuration names.

    Raises a UserError if mteb has no such task, benchmark, split or language, a folder is missing, or a task would not
    be scored.
    """
    tasks = {name: _from_mteb("tasks", mteb.get_task, name) for name in config.tasks}
    for name in config.benchmarks:
        for task in _from_mteb("benchmarks", mteb.get_benchmark, name).tasks:
            tasks.setdefault(task.metadata.name, task)
    sets = [set_name(path) for path in config.sets]
    names = sorted({*tasks, *sets})
    for key in ("subsets", "splits"):
        if unknown := [name for name in getattr(config, key) if name not in names]:
            raise UserError(f"{key}.{unknown[0]}: is not one of the tasks ({', '.join(names)})")
    if taken := [name for name in sets if name in tasks]:
        raise UserError(f"sets: {taken[0]} is the name of one of mteb's tasks: rename the folder")
    for name, task in tasks.items():
        if others := [kind for kind in _modalities(task) if kind != "text"]:
            raise UserError(f"tasks: {name} is not of text alone ({', '.join(others)})")
    others = [name for name, task in tasks.items() if not isinstance(task, AbsTaskRetrieval)]
    if others and "full" not in config.documents:
        reason = f"{', '.join(others)} would not be scored: only retrieval tasks have documents"
        raise UserError(f"documents: expected full too, because {reason}; got {', '.join(config.documents)}")
    planned = [_plan_mteb_task(_choose(name, task, config), config) for name, task in tasks.items()]
    return planned + [_plan_set(path, config) for path in config.sets]


def _modalities(task: Any) -> set[str]:
    """Return what a task's inputs are; of a retrieval task, those of queries or documents without text (mteb's check)."""
    if not isinstance(task, AbsTaskRetrieval):
        return set(task.modalities)
    of_roles = [set(task.metadata.get_modalities(role)) for role in (PromptType.query, PromptType.document)]
    return {kind for kinds in of_roles if "text" not in kinds for kind in kinds}


def _from_mteb(key: str, get: Callable[[str], Any], name: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return get(name)
    except KeyError as error:
        reason = str(error.args[0]).removeprefix("KeyError: ")
        raise UserError(f"{key}: mteb has no {key.removesuffix('s')} of this name: {reason}") from None


def _choose(name: str, task: Any, config: EvaluateConfig) -> Any:
    """Return the task with only the splits and subsets that the configuration names."""
    subsets, splits = config.subsets.get(name), config.splits.get(name)
    if not (subsets or splits):
        return task
    for key, chosen, known in (("subsets", subsets, task.hf_subsets), ("splits", splits, task.eval_splits)):
        if unknown := [value for value in chosen or () if value not in known]:
            raise UserError(f"{key}.{name}: {unknown[0]} is not one of {', '.join(known)}")
    if isinstance(task, AbsTaskAggregate):
        advice = "to choose splits or subsets, list those tasks instead"
        raise UserError(f"{name}: combines {len(task.metadata.tasks)} other tasks: {advice}")
    task = copy.copy(task)  # mteb's benchmarks keep their tasks
    task.filter_eval_splits(splits or task.eval_splits)
    return task.filter_languages(None, hf_subsets=subsets or task.hf_subsets)


def _plan_mteb_task(task: Any, config: EvaluateConfig) -> PlannedTask:
    name, dataset, retrieval = task.metadata.name, task.metadata.dataset, isinstance(task, AbsTaskRetrieval)
    default = {"splits": list(task.metadata.eval_splits), "subsets": list(task.metadata.hf_subsets)}
    current = {"splits": list(task.eval_splits), "subsets": list(task.hf_subsets)}
    chosen = {key: names for key, names in current.items() if names != default[key]}
    if config.mirror is None:
        revision = f"{dataset['path']}@{dataset['revision']}"
        return PlannedTask(name, True, retrieval, revision, revision, chosen, lambda: _load(task))
    parts = _parts(task)
    copies = [_find_in_mirror(part.metadata.dataset, config.mirror) for part in parts]
    fingerprint = hashlib.sha256("".join(map(_folder_hash, copies)).encode()).hexdigest()[:24]

    def load() -> Any:
        for part, folder in zip(parts, copies, strict=True):
            local = {**part.metadata.dataset, "path": str(folder)}
            part.metadata = part.metadata.model_copy(update={"dataset": local})
        with _local_only(Path(config.cache) / "datasets" / fingerprint):
            return _load(task)

    return PlannedTask(name, True, retrieval, ", ".join(map(str, copies)), fingerprint, chosen, load)


def _plan_set(path: str, config: EvaluateConfig) -> PlannedTask:
    name = set_name(path)
    if not Path(path).is_dir():
        raise UserError(f"sets: {path}: there is no such folder")
    chosen: dict[str, Any] = {"splits": config.splits[name]} if name in config.splits else {}
    if config.sets_language != EvaluateConfig.model_fields["sets_language"].default:
        chosen["language"] = config.sets_language
    return PlannedTask(
        name, False, True, path, _folder_hash(Path(path)), chosen,
        lambda: _load(read_set(path, name, config.sets_language, config.splits.get(name))),
    )  # fmt: skip


def _load(task: Any) -> Any:
    problem = f"task {task.metadata.name}: its data can't be read from {task.metadata.dataset['path']}"
    with user_errors(problem, ValueError, KeyError, TypeError, RuntimeError):
        for part in _parts(task):
            part.load_data()
            if isinstance(part, AbsTaskRetrieval):  # mteb does the same later, but `judged_only` needs it
                part.convert_v1_dataset_format_to_v2(num_proc=None)
    return task


def _parts(task: Any) -> list[Any]:
    return list(task.metadata.tasks) if isinstance(task, AbsTaskAggregate) else [task]


def _find_in_mirror(dataset: Any, mirror: str) -> Path:
    path, revision = str(dataset["path"]), dataset["revision"]
    for name in (path, path.rpartition("/")[2], path.replace("/", "__")):
        if (Path(mirror) / name).is_dir():
            return (Path(mirror) / name).absolute()
    command = f"hf download --repo-type dataset {path} --revision {revision} --local-dir {Path(mirror) / path}"
    raise UserError(f"mirror {mirror}: has no {path}; download it where there is a network: {command}")


def _folder_hash(folder: Path) -> str:
    """Return a hash of the names and contents of a folder's files, except hidden ones."""
    names = [file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*")) if file.is_file()]
    content = [(name, file_hash(folder / name)) for name in names if "/." not in f"/{name}"]
    return hashlib.sha256(repr(content).encode()).hexdigest()[:24]


@contextmanager
def _local_only(cache: Path) -> Iterator[None]:
    """Forbid requests to the hub, and give `datasets` a cache folder that no other mirror uses.

    Both libraries read their flag when they make a request. The cache is separate because `datasets` identifies a local
    folder in a cache only by the folder's name and its dataset card.
    """
    from datasets import config
    from huggingface_hub import constants

    with ExitStack() as stack:
        for package, module, name, value in (
            ("datasets", config, "HF_HUB_OFFLINE", True),
            ("huggingface_hub", constants, "HF_HUB_OFFLINE", True),
            ("datasets", config, "HF_DATASETS_CACHE", cache),
        ):
            stack.callback(setattr, module, name, require_form(package, module, name, value))
            setattr(module, name, value)
        yield
