"""Everything a sweep's YAML may say."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from biphasic.config.base import Count, Positive, Section

Rate = Annotated[float, Field(gt=0)]


class SweepModel(Section):
    """A model that is fine-tuned."""

    path: str
    """An exported folder, a Biphasic checkpoint, a folder of Hugging Face's format, or a hub id."""
    steps: Positive | None = None
    """Optimizer steps of its pretraining, for curves over them."""
    trust_remote_code: bool = False
    """Let a Hugging Face folder run its own Python files."""
    revision: str | None = None
    """Of a hub id: commit, tag or branch. Default: the newest, which is looked up."""


class HalvingConfig(Section):
    """Successive halving of the learning rates, a seed at a time; see `biphasic.sweep.selection`."""

    keep: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the rates, rounded up, that goes on to the next seed."""
    audit: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the pairs of model and task that are run whole all the same, to see what halving loses."""


class SweepCluster(Section):
    """Where the trials run, on Ray, and how many at a time."""

    address: str | None = None
    """Null: this machine. `auto`: the Ray cluster that this machine belongs to. Else a cluster's address."""
    cpus_per_trial: Positive = 1
    """Cores of a trial: that many threads of PyTorch and of the tokenizer."""
    trials_per_gpu: Positive | Literal["auto"] = "auto"
    """`auto`: as many as fit the GPU's memory, as it is estimated from each trial's model and batch."""
    at_once: Positive | None = None
    """Trials at a time. Default: as many as there are cores, over `cpus_per_trial`; with GPUs as many as those take."""
    retries: Count = 2
    """How often a trial is given to another worker when its own dies (killed, out of memory, machine lost)."""
    shared_folder: bool = False
    """On several machines, local folders of `output`, models and data are folders that all of them see."""


class CostConfig(Section):
    """What `--plan` reckons with. A device is a GPU; on machines without one it is the machine."""

    dollars_per_hour: Annotated[float, Field(gt=0)] | None = None
    """Of a device."""
    flops_per_second: Annotated[float, Field(gt=0)] | None = None
    """What a device achieves, all its trials together: for models and tasks of which no trial is recorded yet."""


class SweepConfig(Section):
    """`job: sweep`: models x tasks x learning rates x seeds, each a fine-tuning that is scored."""

    job: Literal["sweep"]
    output: str
    """Local folder or bucket prefix of the records. Several machines may work on one."""
    models: Annotated[dict[str, SweepModel], Field(min_length=1)]
    """By name, as on the hub: `610m-clm-10k-mlm40-42k`."""
    tasks: Annotated[dict[str, str], Field(min_length=1)]
    """By name: a fine-tuning YAML, relative to where the command runs."""
    learning_rates: Annotated[list[Rate], Field(min_length=1)]
    seeds: Annotated[list[Count], Field(min_length=1)]
    overrides: list[str] = []
    """`key=value` for every trial."""
    halving: HalvingConfig | None = None
    """Null: the whole grid, as in the paper."""
    cluster: SweepCluster = SweepCluster()
    cost: CostConfig | None = None
