"""Schema of a pretraining YAML (`job: pretrain`): keys, types, limits, defaults and checks.

`config.model`, `config.data` and `config.phases` contain the larger sections.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from biphasic.config.base import Address, Count, Destination, KeyProblems, Positive, RunConfig, Section, Seed, flatten
from biphasic.config.data import DataConfig, data_problems, expand_folder
from biphasic.config.model import ModelConfig, architecture_of, model_problems
from biphasic.config.phase_inputs import PhaseInputs, input_problems, inputs_differ, phase_inputs, phase_key, sources
from biphasic.config.phases import ObjectiveConfig, ScheduleConfig, phase_problems, schedule_problems
from biphasic.data.streams import RowStream
from biphasic.durations import BatchShapes, Duration
from biphasic.storage import is_remote
from biphasic.timeline import resolve_phases


class ValidationConfig(Section):
    """Validation during training. CLM loss, and MLM loss with fixed masks, are computed in every phase."""

    interval: Duration | None = None
    """Time between validations. There is always one after the last batch; it is the only one by default."""
    batches: Positive | None = None
    """Number of batches of the validation split to use. Default: all."""
    batch_size: Positive | None = None
    """Number of rows in a validation batch, over all ranks. Default: the training batch size."""
    masking_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.4
    """Masking ratio of the MLM loss. Fixed, so that losses are comparable across runs. Default: the paper's. A masked
    token is predicted where the last MLM phase predicts it (`target`)."""


class OptimizerConfig(Section):
    """The optimizer. The defaults are those of the paper's appendix, table 1, and of EuroBERT's code. Weight decay applies
    to every parameter."""

    name: Literal["adamw", "muon"] = "adamw"
    """`adamw`: as in the paper. `muon`: Muon for the layers' matrices, AdamW for embeddings, heads, norms and biases. Both
    have the same learning rate, because Muon's updates are scaled to the size of AdamW's (arXiv 2502.16982)."""
    lr: Annotated[float, Field(gt=0)] = 5e-4
    """Peak learning rate. In pretraining, the default is the paper's (appendix, table 1)."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    """Decay rates of Adam's two moving averages (the paper, appendix, table 1)."""
    eps: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the denominator of Adam's update (the paper, appendix, table 1)."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay, multiplied by the learning rate in each step (the paper, appendix, table 1)."""
    max_skipped_batches: Count = 0
    """Maximum number of batches of a run that are skipped because of NaN or Inf in their loss or gradient. One more such
    batch ends the run, with the weights from before that batch."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Maximum norm of the gradient. Null: no clipping."""

    @property
    def adam(self) -> dict[str, Any]:
        """AdamW's arguments."""
        return {"lr": self.lr, "betas": tuple(self.betas), "eps": self.eps, "weight_decay": self.weight_decay}


class CheckpointConfig(Section):
    """Which checkpoints are saved and kept, and how a run resumes."""

    folder: Destination | None = None
    """Local folder or bucket prefix (`s3://…`, `gs://…`, `az://…`, `oci://…`). Default: `checkpoints` in the run's folder,
    which also keeps the newest checkpoint of a run that saves to a bucket."""
    interval: Duration = Duration(1000, "ba")
    """Time between checkpoints. One is also saved at the end, at every switch, where the decay begins, and at `keep_at`."""
    keep: Literal[-1] | Positive = -1
    """Number of complete checkpoints to keep. -1: all. Older checkpoints are deleted once a newer one is complete, except
    those at a phase switch, at the start of the decay and at `keep_at`."""
    keep_at: list[Duration] = []
    """Additional times, such as `18000ba`, at which to save a checkpoint that is never deleted, e.g. to branch from it."""
    resume_overrides: list[str] = []
    """Keys or sections that affect the weights, but may differ from the checkpoint's when the run resumes."""


class ParallelismConfig(Section):
    """How ranks share the model. The number of ranks is set by the launcher."""

    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """`ddp`: replicate the model on each rank. `fsdp`: shard weights, gradients and optimizer state, by decoder layer.
    `auto`: ddp if these take at most half of a GPU's memory and the checkpoint to load is not sharded."""
    shard_degree: Positive | Literal["all", "node"] = "all"
    """Number of ranks that share one copy of the model. `node`: the ranks of a node, with a copy on each node (HSDP)."""


MAX_AUTOTUNE = "max-autotune-no-cudagraphs"


class ComputeConfig(Section):
    """Kernels and recomputation. They affect results only by rounding; see docs/throughput.md."""

    attention: Literal["auto", "varlen", "flex", "sdpa"] = "auto"
    """`varlen`: PyTorch's variable-length kernels. `flex`: FlexAttention. `sdpa`: PyTorch's dense attention of segments of
    similar length. `auto`: the first of these that is available and suitable; `sdpa` on CPUs."""
    varlen_kernels: Literal["auto", "fa4", "fa3", "cudnn", "fa2"] = "auto"
    """Kernels of `varlen`. `fa4`, `fa3`: FlashAttention 4 or 3, from their packages. `cudnn`: cuDNN's. `fa2`: FlashAttention
    2, a part of PyTorch. `auto`: the first of these, in this order, that pass a trial at the start of the run."""
    deterministic: bool = False
    """Compute with deterministic algorithms only, so that a run on GPUs can be repeated bit for bit; on CPUs it always can.
    Attention's backward pass and the embedding's gradient are slower then (docs/throughput.md)."""
    compile: bool | Literal["auto", "max-autotune-no-cudagraphs"] = "auto"
    """Whether to apply torch.compile to each decoder layer and the loss. `auto`: only on GPUs. `max-autotune-no-cudagraphs`:
    yes, and time several kernels for each matrix product at the start of the run, which takes minutes."""
    residual: Literal["fp32", "bf16"] = "fp32"
    """Precision of the sum over layers (the residual stream) with `precision: amp_bf16`. `bf16` takes less memory and
    time, and rounds the sum at every layer (docs/throughput.md)."""
    activation_checkpointing: Literal["none", "all"] | Positive = "none"
    """Layers whose activations are recomputed in the backward pass to save memory: `all`, or every Nth (`2`)."""

    def recomputed(self, layers: int) -> list[int]:
        """Return the indices of the recomputed layers in a model with `layers` layers."""
        setting = self.activation_checkpointing
        every = setting if isinstance(setting, int) else 1 if setting == "all" else layers + 1
        return list(range(every - 1, layers, every))


class LoggingConfig(Section):
    """Where metrics are logged. Log files are in the run's folder."""

    jsonl: bool = True
    """Write `metrics.jsonl` in the run's folder, with a line of JSON for each batch."""
    tensorboard: bool = True
    """Write TensorBoard's event files to the run's folder."""
    wandb: str | None = None
    """Project of Weights & Biases to log to (`uv pip install '.[loggers]'`); the API key and the team are those of
    `WANDB_API_KEY` and `WANDB_ENTITY`."""
    mlflow: str | None = None
    """Experiment of MLflow to log to (`uv pip install '.[loggers]'`); the server is that of `MLFLOW_TRACKING_URI`."""
    progress_bar: bool = True
    """Show Composer's progress bar on the terminal."""


class PretrainConfig(RunConfig):
    """`job: pretrain`: train a model with CLM and MLM phases on converted data."""

    job: Literal["pretrain"]  # pyright: ignore[reportIncompatibleVariableOverride]
    seed: Seed = 42
    """Random seed for initial weights, order of rows and masks. Default: EuroBERT's code."""
    tokenizer: Address
    """Folder, bucket prefix or hub id of the tokenizer with which the data was converted. May be left out with
    `data.folder`, whose `tokenizer/` is then used."""
    start_from: Address | None = None
    """Another run's folder, the bucket prefix it saves to, or one of its checkpoints. This run starts from the newest
    complete checkpoint there whose past is its own past, and ends with the same weights as if it had trained those batches
    itself. Not used once the run has checkpoints of its own."""
    max_duration: Duration
    """Length of the run, in batches, tokens, rows or epochs. The paper's runs have 42,000 batches."""
    global_batch_size: Positive
    """Number of rows in an optimizer step, over all ranks."""
    microbatch_size: Positive | Literal["auto"] = "auto"
    """Number of rows in one forward pass of a rank. `auto`: on GPUs, as many as fit, measured at the start and recorded in
    the run's folder; on CPUs, a rank's complete batch."""
    precision: Literal["fp32", "amp_bf16"] = "fp32"
    """`amp_bf16`: weights in fp32, matrix products in bf16 (the paper's runs). `fp32`: everything in fp32."""
    model: ModelConfig
    data: DataConfig
    objective: ObjectiveConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    evaluation: ValidationConfig = ValidationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallelism: ParallelismConfig = ParallelismConfig()
    compute: ComputeConfig = ComputeConfig()
    logging: LoggingConfig = LoggingConfig()

    _expand_folder = model_validator(mode="before")(expand_folder)

    @property
    def checkpoint_destination(self) -> str:
        """Folder or bucket prefix to which the run saves."""
        return self.checkpoint.folder or str(self.run_folder / "checkpoints")

    @property
    def local_checkpoints(self) -> Path:
        """Local folder of checkpoints: the destination, or the folder that uploads are made from."""
        destination = self.checkpoint_destination
        return self.run_folder / "checkpoints" if is_remote(destination) else Path(destination)

    @property
    def inputs(self) -> list[PhaseInputs]:
        """What each phase reads."""
        return phase_inputs(self.objective.phases, self.data, self.global_batch_size)

    @property
    def streams(self) -> dict[str, RowStream]:
        """The training streams of all phases by YAML key."""
        return {key: stream for each in sources(self.inputs) for key, stream in each.streams.items()}

    @property
    def splits(self) -> dict[str, RowStream]:
        """The training streams of all phases, and the validation split, by YAML key."""
        return {**self.data.splits, **self.streams}

    @property
    def row_lengths(self) -> dict[str, int]:
        """Number of tokens in a row of each of `splits`."""
        lengths = {key: each.data.sequence_length for each in self.inputs for key in each.streams}
        return {"data.validation": self.data.sequence_length, **lengths}

    @property
    def longest_row(self) -> int:
        """Number of tokens in the longest row of any phase."""
        return max(each.data.sequence_length for each in self.inputs)

    @property
    def batch_shapes(self) -> BatchShapes:
        """The sizes of the run's global batches."""
        inputs = self.inputs
        shapes = BatchShapes(((0, inputs[0].shape),))
        for span, own in zip(resolve_phases(self.objective.phases, self.max_duration), inputs, strict=True):
            if own.shape != shapes.parts[-1][1] and span.start.unit not in ("ep", "dur"):
                first = max(shapes.batches(span.start), shapes.parts[-1][0])
                shapes = BatchShapes((*shapes.parts, (first, own.shape)))
        return shapes

    def problems(self, ranks: int) -> KeyProblems:
        yield from model_problems(self.model, self.longest_row)
        if self.max_duration.unit == "dur" or not self.max_duration.value:
            yield ["max_duration"], "expected a positive length in batches, tokens, rows or epochs, such as 42000ba"
        else:
            yield from phase_problems(self.objective.phases, self.max_duration, self.batch_shapes)
            yield from schedule_problems(self.schedule, self.max_duration, self.batch_shapes)
        yield from self._batch_problems(ranks)
        yield from self._parallelism_problems(ranks)
        yield from self._time_problems()
        later = [phase.data for phase in self.objective.phases if phase.data is not None]
        yield from data_problems(self.data, self.global_batch_size, later)
        yield from input_problems(self.objective.phases, self.inputs, ranks)
        for key, time in flatten(self) if inputs_differ(self.inputs) else ():
            if isinstance(time, Duration) and time.unit == "ep":
                message = "expected batches, rows or tokens, because the phases' epochs have different lengths"
                yield [key, phase_key(len(self.inputs) - 1)], message

    def _batch_problems(self, ranks: int) -> KeyProblems:
        size, microbatch = self.global_batch_size, self.microbatch_size
        if size % ranks:
            yield ["global_batch_size"], f"expected a multiple of the number of ranks ({ranks})"
        elif isinstance(microbatch, int) and (size // ranks) % microbatch:
            rank_batch = f"{size} rows / {ranks} ranks = {size // ranks}"
            message = f"expected a divisor of a rank's batch ({rank_batch}), or auto, which fits any number of ranks"
            yield ["microbatch_size", "global_batch_size"], message
        if self.evaluation.batch_size is not None and self.evaluation.batch_size % ranks:
            yield ["evaluation.batch_size"], f"expected a multiple of the number of ranks ({ranks})"
        if self.data.validation is None:
            names, message = type(self.evaluation).model_fields, "has no effect without data.validation"
            yield from self.evaluation.require_defaults(names, "evaluation", ["data.validation"], message)

    def _parallelism_problems(self, ranks: int) -> KeyProblems:
        parallelism, architecture = self.parallelism, architecture_of(self.model)
        if parallelism.strategy == "ddp":
            message = "has no effect with parallelism.strategy: ddp"
            yield from parallelism.require_defaults(["shard_degree"], "parallelism", ["parallelism.strategy"], message)
        if isinstance(parallelism.shard_degree, int) and ranks % parallelism.shard_degree:
            yield ["parallelism.shard_degree"], f"expected a divisor of the number of ranks ({ranks})"
        if self.compute.attention not in ("auto", "varlen") and self.compute.varlen_kernels != "auto":
            message = f"has no effect with compute.attention: {self.compute.attention}"
            yield ["compute.varlen_kernels", "compute.attention"], message
        if self.compute.deterministic and self.compute.compile == MAX_AUTOTUNE:
            message = "expected compute.compile: auto or true, since kernels chosen by their time differ between runs"
            yield ["compute.deterministic", "compute.compile"], message
        if self.compute.residual == "bf16" and self.precision != "amp_bf16":
            message = f"expected precision: amp_bf16 with compute.residual: bf16; got {self.precision}"
            yield ["compute.residual", "precision"], message
        nth = self.compute.activation_checkpointing
        if architecture is not None and isinstance(nth, int) and nth > architecture.layers:
            yield ["compute.activation_checkpointing"], f"expected every Nth of {architecture.layers} layers; got {nth}"

    def _time_problems(self) -> KeyProblems:
        checkpoint, end = self.checkpoint, self.max_duration
        for key, interval in {"evaluation": self.evaluation.interval, "checkpoint": checkpoint.interval}.items():
            if interval is not None and not interval.resolve(end).value:
                yield [f"{key}.interval"], "expected a positive length"
            elif interval is not None and not interval.is_whole_of(end):
                message = f"expected whole epochs, or a length in another unit; got {interval} of {end}"
                yield [f"{key}.interval", "max_duration"], message
        for index, time in enumerate(checkpoint.keep_at):
            if not time.value or (end.unit != "dur" and not self.batch_shapes.not_before(end, time.resolve(end))):
                yield [f"checkpoint.keep_at.{index}", "max_duration"], f"expected a time within the run ({end})"
            elif not time.is_whole_of(end):
                yield [f"checkpoint.keep_at.{index}", "max_duration"], f"expected whole epochs; got {time} of {end}"
        keys = [key for key, _ in flatten(self)]
        for index, name in enumerate(checkpoint.resume_overrides):
            if name == "max_duration":
                message = "has no effect: a restart may always change max_duration; name the keys whose past changes"
                yield [f"checkpoint.resume_overrides.{index}"], message
            # Datasets are compared by the hash of their index, under a key in `.index` that the YAML doesn't have.
            if not any(f"{key}.".startswith(f"{name.removesuffix('.index')}.") for key in keys):
                yield [f"checkpoint.resume_overrides.{index}"], "expected a key or a section of this configuration"
