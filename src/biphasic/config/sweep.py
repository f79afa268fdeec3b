"""Schema of a sweep YAML (`job: sweep`): keys, types, defaults and checks."""

from os.path import abspath
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


class SweepCluster(ClusterConfig):
    """Where trials run: on this machine or on a Ray cluster, and how many at a time."""

    cpus_per_trial: Positive = 1
    """Number of cores for a trial, which is also its number of threads in PyTorch and in the tokenizer."""
    trials_per_gpu: Positive = 1
    """Number of trials that share a GPU."""
    at_once: Positive | None = None
    """Maximum number of trials at a time. Default: the number of cores divided by `cpus_per_trial`; with GPUs, at
    most as many as fit the GPUs."""
    retries: Count = 2
    """How often a trial is retried on another worker after its worker died (killed, out of memory, node lost)."""


class SweepCostConfig(Section):
    """The price for the estimate of `--plan`."""

    dollars_per_hour: Rate
    """Price of a device (a GPU, or a node without GPUs) for one hour."""


class SweepConfig(JobConfig):
    """`job: sweep`: fine-tune and score every combination of model, task, learning rate and seed."""

    job: Literal["sweep"]
    output: Destination
    """Local folder or bucket prefix for the trials' records."""
    models: Annotated[dict[Name, EncoderConfig], Field(min_length=1)]
    """Models by name. The paper's models are named as on the hub: `610m-clm-10k-mlm40-42k`."""
    tasks: Annotated[dict[Name, LocalPath], Field(min_length=1)]
    """Tasks by name: the path of each one's fine-tuning YAML, relative to the working directory."""
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
    cost: SweepCostConfig | None = None
    """The price for the estimate of `--plan`. Null: no dollars."""

    def problems(self, ranks: int) -> KeyProblems:
        """Check combinations of values. `biphasic.sweep.grid` checks the tasks' YAMLs."""
        places: dict[str, Any] = {f"tasks.{name}": abspath(file) for name, file in self.tasks.items()}
        for name, model in self.models.items():
            path = model.path if is_remote(model.path) else abspath(model.path)
            places[f"models.{name}.path"] = path, model.revision
        first_keys: dict[Any, str] = {}
        for key, place in places.items():
            if (first := first_keys.setdefault(place, key)) != key:
                yield [key, first], f"expected another one than that of {first}"
        if self.rate_seeds is not None and self.rate_seeds > len(self.seeds):
            yield ["rate_seeds", "seeds"], f"expected at most the number of seeds, {len(self.seeds)}"
        for index, override in enumerate(self.overrides):
            key, equals, _ = override.partition("=")
            fixed = [name for name in _SET_BY_THE_SWEEP if within(key, name) or within(name, key)]
            if not equals or not key:
                yield [f"overrides.{index}"], "expected key=value, such as batch_size=64"
            elif fixed:
                yield [f"overrides.{index}"], f"expected a key that the sweep doesn't give itself ({fixed[0]})"
