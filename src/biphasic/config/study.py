"""Schema of a study YAML (`job: study`): many pretraining runs over one base, how they start, and what follows them.

`expand` makes a checked pretraining configuration for each model.
"""

import shlex
from bisect import bisect_left
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from biphasic.config.base import (
    Destination,
    JobConfig,
    KeyProblems,
    LocalPath,
    Name,
    Positive,
    Section,
    Share,
    flatten,
    template,
    within,
)
from biphasic.config.check import check
from biphasic.config.merging import MergeShape, merge_weights
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.read import KeyTree, escape_interpolations, read_tree
from biphasic.durations import Duration
from biphasic.errors import ConfigError, Problem, UserError
from biphasic.storage import is_remote, join

CONTINUES = "continues"
"""The only key of a model that is not a pretraining key."""
SET_BY_THE_STUDY = ("job", "run_name", "output", "checkpoint.folder", "start_from")
"""Pretraining keys that the study sets for each model."""
STAGE_FOLDERS = ("sweep", "evaluate")
"""Folders of the stages, next to the models' folders."""

_Batches = Annotated[list[Positive], Field(min_length=1)]
_Places = list[tuple[str, str]]


class MergeConfig(Section):
    """A model that is not trained, but a mean of checkpoints of the study's models."""

    merge_of: Annotated[dict[Name, _Batches], Field(min_length=1)]
    """For each of these models the batches of its run whose checkpoints are merged. The study keeps these checkpoints."""
    weights: MergeShape | list[float] = "mean"
    """`mean`; `linear`, `1-sqrt` or `cosine`: weights that equal such a decay; or a number for each checkpoint."""


class LocalExecutor(Section):
    """Train the runs on this machine, one after another, with Composer's launcher."""

    kind: Literal["local"]
    processes: Positive | None = None
    """Number of processes of a run. Default: Composer's, one for each GPU."""


class SlurmExecutor(Section):
    """Submit each run with `sbatch`. A run waits for the run that it starts from (`--dependency=afterok`)."""

    kind: Literal["slurm"]
    options: list[str] = []
    """Options of sbatch, such as `--nodes=4`."""
    script: LocalPath = "recipes/launch/slurm.sbatch"
    """The batch script, which gets the run's YAML as its argument."""


class CommandExecutor(Section):
    """Submit each run that is ready with a command, for SkyPilot, Kubernetes and others."""

    kind: Literal["command"]
    command: Annotated[str, template("name", "file", required="file")]
    """The command, split as a shell splits it. `{name}` is the model's name and `{file}` its complete YAML here."""


Executor = Annotated[LocalExecutor | SlurmExecutor | CommandExecutor, Field(discriminator="kind")]


class StudyCostConfig(Section):
    """What `--plan` needs to compute hours and dollars from FLOPs. A device is a GPU."""

    peak_flops: Annotated[float, Field(gt=0)]
    """Peak FLOPs of a device in a second, at the run's precision."""
    mfu: Share
    """Model FLOPs utilization: the share of the peak that training reaches."""
    dollars_per_hour: Annotated[float, Field(gt=0)] | None = None
    """Price of a device for one hour."""
    devices: Positive | None = None
    """Number of devices that train at a time, for the total time."""


class StagesConfig(Section):
    """What follows pretraining (`--stage`). YAMLs of single jobs, whose models the study sets."""

    finetune: LocalPath | None = None
    """A sweep's YAML. The study sets its `models` and `output`."""
    evaluate: LocalPath | None = None
    """An evaluation's YAML. The study sets its `model`, `run_name` and `output`."""
    checkpoints: dict[Name, _Batches] = {}
    """For learning curves: for each of these models the batches of its run whose checkpoints are exported, fine-tuned and
    scored as models of their own, named `<model>-<steps>`. The study keeps these checkpoints."""


class StudyConfig(JobConfig):
    """`job: study`: pretrain models that share the beginnings of their histories, then export, fine-tune and score them."""

    job: Literal["study"]
    folder: Destination
    """Local folder or bucket prefix of all checkpoints: `<folder>/<model>`."""
    output: LocalPath = "runs"
    """Local folder for logs and exports, `<output>/<model>`, if `folder` is in a bucket. A local `folder` holds them too."""
    base: LocalPath | dict[str, Any]
    """What the models have in common: the path of a pretraining YAML, relative to the working directory, or pretraining
    keys, of which `defaults` may name such a YAML."""
    models: Annotated[dict[Name, dict[str, Any]], Field(min_length=1)]
    """For each model by name the pretraining keys that differ from `base`, nested or dotted (`model.preset: 610m`).
    `continues: NAME` starts from the final weights of another model, with a new optimizer, schedule and history; the model
    section of `base` is then not used. Add models at the end: where runs start from depends on the order."""
    merges: dict[Name, MergeConfig] = {}
    """Models that are means of checkpoints, by name. They are exported and scored as the others."""
    executor: Executor = LocalExecutor(kind="local")
    """How the runs are started. Default: on this machine."""
    cost: StudyCostConfig | None = None
    """What `--plan` needs for hours and dollars. Null: FLOPs only."""
    stages: StagesConfig = StagesConfig()
    """What follows pretraining."""

    @property
    def local_folder(self) -> str:
        """Local folder of the runs' logs, resolved YAMLs and exports."""
        return self.output if is_remote(self.folder) else self.folder

    def checkpoints_of(self, name: str) -> str:
        """Return the folder or bucket prefix to which a model's run saves checkpoints."""
        place = join(self.folder, name)
        return place if is_remote(place) else join(place, "checkpoints")

    @property
    def continues(self) -> dict[str, str]:
        """For each model that continues another, the name of the other."""
        return {name: str(keys[CONTINUES]) for name, keys in self.models.items() if CONTINUES in keys}

    @property
    def base_file(self) -> str | None:
        """Path of the pretraining YAML in `base`, or None."""
        return self.base if isinstance(self.base, str) else self.base.get("defaults")

    @property
    def base_keys(self) -> dict[str, Any]:
        """The pretraining keys in `base` itself."""
        return {} if isinstance(self.base, str) else {k: v for k, v in self.base.items() if k != "defaults"}

    def problems(self, ranks: int) -> KeyProblems:
        """Check combinations of values. `expand` checks the models' own keys."""
        if not is_remote(self.folder) and not self.is_default("output"):
            yield ["output", "folder"], "has no effect with a local folder, which holds the logs too: remove this key"
        if not isinstance(self.base_file, str | None):
            yield ["base.defaults"], f"expected the path of a pretraining YAML; got {self.base_file!r}"
        for key, keys in (("base", self.base_keys), *((f"models.{name}", keys) for name, keys in self.models.items())):
            for at, _ in flatten(keys):
                for name in SET_BY_THE_STUDY:
                    if within(at, name):
                        yield [f"{key}.{at}"], f"can't be given, because the study sets {name} itself"
        if CONTINUES in self.base_keys:
            yield [f"base.{CONTINUES}"], "is a key of a model, not of base"
        for name in self.models:
            yield from self._continues_problems(name)
            if name in STAGE_FOLDERS:
                yield [f"models.{name}"], "expected another name, because a stage writes to a folder of this name"
        for name, merge in self.merges.items():
            if name in (*self.models, *STAGE_FOLDERS):
                yield [f"merges.{name}"], "expected another name, because a model or a stage has a folder of this name"
            if unknown := merge.merge_of.keys() - self.models.keys():
                yield [f"merges.{name}.merge_of"], f"expected names of models of this study; got {min(unknown)!r}"
            batches = [batch for of_model in merge.merge_of.values() for batch in of_model]
            if len(batches) < 2:
                yield [f"merges.{name}.merge_of"], f"expected at least two checkpoints; got {len(batches)}"
                continue
            try:
                merge_weights(merge.weights, batches)
            except UserError as error:
                yield [f"merges.{name}.weights", f"merges.{name}.merge_of"], str(error)
        for name in self.stages.checkpoints:
            if name not in self.models:
                yield [f"stages.checkpoints.{name}"], f"expected the name of a model of this study; got {name!r}"
        if isinstance(self.executor, CommandExecutor):
            try:
                shlex.split(self.executor.command)
            except ValueError as error:
                yield ["executor.command"], f"can't be split as a shell does ({error})"

    def _continues_problems(self, name: str) -> KeyProblems:
        if CONTINUES not in self.models[name]:
            return
        key, given, continues = f"models.{name}.{CONTINUES}", self.models[name][CONTINUES], self.continues
        if not isinstance(given, str) or given not in self.models or given == name:
            yield [key], f"expected the name of another model of this study; got {given!r}"
            return
        path = [name]
        while (other := continues.get(path[-1])) in self.models and other not in path:
            path.append(str(other))
        if other == name == min(path):  # a cycle is reported once
            yield [key], f"forms a cycle: {' continues '.join([*path, name])}"
        if any(at == "model.init_from" for at, _ in flatten(self.models[name])):
            yield [f"models.{name}.model.init_from"], f"can't be given beside {CONTINUES}, which sets it"


def expand(study: StudyConfig, written: KeyTree | None = None, ranks: int = 1) -> dict[str, PretrainConfig]:
    """Return the configuration of each model's run, without the run that it starts from.

    `study` must be checked. `written` says where its keys were written. Raises a ConfigError with the problems of all
    models; their keys begin with `models.NAME`, unless `base` causes the problem in every model.
    """
    written = written or KeyTree(Path("study"))
    if study.base_file is None:
        base = KeyTree(written.file)
        base.update("job", "pretrain", {})
    else:
        base = read_tree(study.base_file, [])
    places = sorted(written.where.items())
    _apply(study.base_keys, "base", base, written, places)
    configs: dict[str, PretrainConfig] = {}
    problems: dict[str, list[Problem]] = {}
    for name in study.models:
        try:
            configs[name] = _expand(study, name, base, written, places, ranks)
        except ConfigError as error:
            problems[name] = error.problems
    if problems:
        raise ConfigError(list(_named(problems, study, written)))
    return configs


def _expand(study: StudyConfig, name: str, base: KeyTree, written: KeyTree, places: _Places, ranks: int) -> PretrainConfig:
    tree, place = deepcopy(base), written.source(f"models.{name}")
    continued = study.continues.get(name)
    if continued is not None:
        tree.merged.pop("model", None)
        tree.update("model.init_from", study.checkpoints_of(continued), {"model": place})
    keys = {key: value for key, value in study.models[name].items() if key != CONTINUES}
    _apply(keys, f"models.{name}", tree, written, places)
    own = {"run_name": name, "output": study.local_folder, "checkpoint.folder": study.checkpoints_of(name)}
    for key, value in own.items():
        tree.update(key, escape_interpolations(value), {key: place})
    config = check(tree.content(), ("pretrain",), tree.source, ranks)
    assert isinstance(config, PretrainConfig)
    expected = "expected batches, rows or tokens, so that runs can be compared"
    problems = [
        Problem(tree.source(key), key, f"{expected}; got {time}")
        for key, time in flatten(config)
        if isinstance(time, Duration) and time.unit == "ep" and not within(key, "evaluation")
    ]
    if problems:
        raise ConfigError(problems)
    return config


def _apply(keys: Mapping[str, Any], prefix: str, tree: KeyTree, written: KeyTree, places: _Places) -> None:
    """Merge dotted or nested keys into `tree`. `prefix` is their key in the study; `places` is sorted `written.where`."""
    own = places[bisect_left(places, (f"{prefix}.",)) : bisect_left(places, (f"{prefix}/",))]  # "/" comes after "."
    for key, value in keys.items():
        above = f"{prefix}.{key}"
        below = {k.removeprefix(f"{prefix}."): at for k, at in own if within(k, above)}
        tree.update(key, escape_interpolations(value), {key: written.source(above), **below})


def _named(problems: dict[str, list[Problem]], study: StudyConfig, written: KeyTree) -> dict[Problem, None]:
    """Prefix all problems' keys with their model's name, except problems of the base, which are reported once."""
    everywhere = set.intersection(*(set(problems.get(name, [])) for name in study.models))
    in_base = {at for key, at in written.where.items() if within(key, "base")}
    named: dict[Problem, None] = {}
    for name, model_problems in problems.items():
        in_model = {at for key, at in written.where.items() if within(key, f"models.{name}")}
        for problem in model_problems:
            prefix = f"models.{name}."
            if problem in everywhere and problem.where not in in_model:
                prefix = "base." if problem.where in in_base else ""
            named[replace(problem, key=f"{prefix}{problem.key}")] = None
    return named
