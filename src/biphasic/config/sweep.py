"""Schema of a sweep YAML (`job: sweep`): keys, types, defaults and checks."""

from __future__ import annotations

from posixpath import normpath
from typing import Annotated, Any, Literal

from pydantic import Field

from biphasic.config.base import (
    ClusterConfig,
    Count,
    Destination,
    JobConfig,
    KeyProblems,
    LocalPath,
    Name,
    PathSection,
    Positive,
    Section,
    Seed,
    distinct,
    within,
)
from biphasic.config.finetune import EncoderConfig
from biphasic.storage import is_remote

Rate = Annotated[float, Field(gt=0)]

_SET_BY_THE_SWEEP = ("job", "run_name", "seed", "model", "optimizer.lr", "save_model")
"""Fine-tuning keys that the sweep sets for each trial."""


class SweepModel(EncoderConfig):
    """A model to fine-tune in the sweep."""

    steps: Positive | None = None
    """Number of optimizer steps in the model's pretraining, for plots of scores by steps."""


class SweepTask(PathSection):
    """A task of the sweep. The path of its YAML alone is short for `{file: PATH}`."""

    file: LocalPath
    """Path of the fine-tuning YAML, relative to the working directory."""
    encoder_from: Name | None = None
    """Another task of the sweep, whose fine-tuned encoder the trials start from: of the same model, at the rate that is
    chosen for its first test set, with the first seed. Default: the model itself."""


class SweepCluster(ClusterConfig):
    """Where trials run: on this machine or on a Ray cluster, and how many at a time."""

    cpus_per_trial: Positive = 1
    """Number of cores for a trial, which is also its number of threads in PyTorch and in the tokenizer."""
    trials_per_gpu: Positive | Literal["auto"] = "auto"
    """Number of trials that share a GPU. `auto`: as many as fit its memory, estimated from each trial's model and batch."""
    at_once: Positive | None = None
    """Maximum number of trials at a time. Default: the number of cores divided by `cpus_per_trial`; with GPUs, at
    most as many as fit the GPUs."""
    retries: Count = 2
    """How often a trial is retried on another worker after its worker died (killed, out of memory, node lost)."""


class CostConfig(Section):
    """Prices and throughput for the cost estimate of `--plan`. A device is a GPU, or a node without GPUs."""

    dollars_per_hour: Rate | None = None
    """Price of a device for one hour."""
    flops_per_second: Rate | None = None
    """Total throughput of a device over its concurrent trials, used for models and tasks without a recorded trial."""


class SweepConfig(JobConfig):
    """`job: sweep`: fine-tune and score every combination of model, task, learning rate and seed."""

    job: Literal["sweep"]
    output: Destination
    """Local folder or bucket prefix for the trials' records."""
    models: Annotated[dict[Name, SweepModel], Field(min_length=1)]
    """Models by name. The paper's models are named as on the hub: `610m-clm-10k-mlm40-42k`."""
    tasks: Annotated[dict[Name, SweepTask], Field(min_length=1)]
    """Tasks by name: the path of each one's fine-tuning YAML, or a section."""
    task_group: Name | None = None
    """Name of one group with one mean that all tasks form in the report. Default: a group for each family of tasks."""
    learning_rates: Annotated[list[Rate], Field(min_length=1), distinct]
    """Peak learning rates. The paper: 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4."""
    seeds: Annotated[list[Seed], Field(min_length=1), distinct]
    """Random seeds. The paper: 0 to 4."""
    rate_seeds: Positive | None = None
    """Choose each rate by this many of the seeds, the first ones; the other seeds run at the chosen rates only. Default: all
    seeds, as in the paper."""
    overrides: list[str] = []
    """Overrides `key=value` of the fine-tuning YAMLs, applied to every trial. `{task}` stands for the task's name."""
    cluster: SweepCluster = SweepCluster()
    """Where the trials run."""
    cost: CostConfig | None = None
    """Prices for the estimate of `--plan`. Null: no dollars."""

    def problems(self, ranks: int) -> KeyProblems:
        """Check combinations of values. `biphasic.sweep.grid` checks the tasks' YAMLs."""
        places: dict[str, Any] = {f"tasks.{name}": normpath(task.file) for name, task in self.tasks.items()}
        for name, model in self.models.items():
            path = model.path if is_remote(model.path) else normpath(model.path)
            places[f"models.{name}.path"] = path, model.revision
        first_keys: dict[Any, str] = {}
        for key, place in places.items():
            if (first := first_keys.setdefault(place, key)) != key:
                yield [key, first], f"expected another one than that of {first}"
        yield from self._encoder_problems()
        if self.rate_seeds is not None and self.rate_seeds > len(self.seeds):
            yield ["rate_seeds", "seeds"], f"expected at most the number of seeds, {len(self.seeds)}"
        for index, override in enumerate(self.overrides):
            key, equals, _ = override.partition("=")
            fixed = [name for name in _SET_BY_THE_SWEEP if within(key, name) or within(name, key)]
            if not equals or not key:
                yield [f"overrides.{index}"], "expected key=value, such as batch_size=64"
            elif fixed:
                yield [f"overrides.{index}"], f"expected a key that the sweep doesn't give itself ({fixed[0]})"
        if self.cost is not None and self.cost.dollars_per_hour is None and self.cost.flops_per_second is None:
            yield ["cost"], "is empty; expected dollars_per_hour, flops_per_second, or both"

    def _encoder_problems(self) -> KeyProblems:
        in_cycles = set[str]()
        for name, task in self.tasks.items():
            key, path = f"tasks.{name}.encoder_from", [name]
            while (source := self.tasks[path[-1]].encoder_from) in self.tasks and source not in path:
                path.append(source)
            if task.encoder_from is not None and task.encoder_from not in self.tasks:
                yield [key], f"expected a task of the sweep ({', '.join(self.tasks)}); got {task.encoder_from}"
            elif source == name and name not in in_cycles:
                in_cycles.update(path)
                yield [key], f"is a cycle: {' from '.join([*path, name])}"
            if task.encoder_from is not None and is_remote(self.output):
                yield [key, "output"], "keeps encoders in output, which must be a folder; trials can't read a bucket's"
