"""Everything a pretraining YAML may say: each key once, with its type, its limits and its default.

The classes mirror the YAML. A `job:` at the top of a file picks the class; see `biphasic.config.load`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from biphasic.config.base import Count, Positive, Section, Share, Size
from biphasic.config.durations import Duration


class ModelConfig(Section):
    """The network. One of three: a `preset`, explicit dimensions, or `init_from` an existing model."""

    preset: Literal["210m", "610m", "1b"] | None = None
    """One of the paper's sizes."""
    init_from: str | None = None
    """A Biphasic checkpoint, an exported folder, or any Hugging Face decoder's folder: architecture and weights."""
    vocab_size: Positive | None = None
    """Rows of the embedding. Default: the preset's 128,256. Required with explicit dimensions."""
    hidden_size: Positive | None = None
    intermediate_size: Positive | None = None
    num_layers: Positive | None = None
    num_heads: Positive | None = None
    num_kv_heads: Positive | None = None
    """Default: `num_heads` (no grouped queries)."""
    head_dim: Positive | None = None
    """Default: `hidden_size / num_heads`."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    """Base of the rotary positions. The paper's models: 10,000."""
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    initializer_range: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of every weight matrix and embedding at the start."""
    tie_embeddings: bool = False
    """One matrix for embedding and head. The paper's models don't."""
    max_position_embeddings: Positive | None = None
    """Written to the export. Default: the training sequence length."""
    trust_remote_code: bool = False
    """Let a Hugging Face folder run its own Python files."""


class StreamConfig(Section):
    """One split of a converted dataset."""

    local: str
    """Folder of the shards, or the cache of `remote`. Each split and stream needs its own."""
    remote: str | None = None
    """`s3://…`, `gs://…`, `oci://…`: where the shards lie, when they don't lie in `local`."""


class MixedStreamConfig(StreamConfig):
    """One dataset of a mix."""

    proportion: Annotated[float, Field(gt=0, le=1)]
    """Its share of the rows; those of a mix add up to 1."""


StreamName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


class DataConfig(Section):
    """Where the rows come from, and in which order. Either `train` or `mix`."""

    sequence_length: Positive
    """Tokens in a row, as converted."""
    train: StreamConfig | None = None
    """One converted dataset."""
    mix: Annotated[dict[StreamName, MixedStreamConfig], Field(min_length=1)] | None = None
    """Several, by name; each row of a batch is drawn from them in their proportions."""
    epoch_rows: Positive | None = None
    """Rows of an epoch of the mix. Default: as many as its datasets have together."""
    validation: StreamConfig | None = None
    shuffle: bool = True
    shuffle_seed: Count | None = None
    """Default: the run's seed."""
    shuffle_algo: Literal["py1e", "py1b", "py1br", "py1s", "py2s", "naive"] = "py1e"
    shuffle_block_size: Positive = 1 << 18
    """Rows that are shuffled together."""
    num_canonical_nodes: Positive = 64
    """Fixed, so that the order of rows does not depend on the number of nodes."""
    predownload: Positive | None = None
    """Rows that each loader process fetches ahead of training. Default: Streaming's, eight batches of a rank."""
    cache_limit: str | None = None
    """Largest local cache on a node, e.g. `200gb`, of the training data, and as much again of the validation data; the
    shards that were not read for longest are dropped. Default: keep all."""
    download_retry: Positive = 5
    """Attempts to fetch a shard."""
    download_timeout: Positive = 120
    """Seconds."""
    num_workers: Count = 2
    """Loader processes a rank."""
    check_hashes: bool = True
    """Compare each downloaded or unpacked shard with the hash that the conversion recorded."""

    @property
    def streams(self) -> dict[str, StreamConfig]:
        """What is trained on, by its key in the YAML, in a mix's case sorted by name: the order decides the rows' ids."""
        if self.mix is not None:
            return {f"data.mix.{name}": self.mix[name] for name in sorted(self.mix)}
        return {} if self.train is None else {"data.train": self.train}


class RampConfig(Section):
    """A masking ratio that goes linearly from `start` to `end` over its phase."""

    start: Share
    end: Share


class ReplacementConfig(Section):
    """What a selected token becomes; the three shares add up to 1. Default: always the mask token (EuroBERT's code)."""

    mask: Annotated[float, Field(ge=0, le=1)] = 1.0
    random: Annotated[float, Field(ge=0, le=1)] = 0.0
    keep: Annotated[float, Field(ge=0, le=1)] = 0.0


class CLMPhase(Section):
    """Causal language modeling: each token predicts the next one of its segment."""

    name: Literal["clm"]
    until: Duration | None = None
    """When the phase ends, counted from the start of the run. Only the last phase leaves it open."""
    reset_optimizer: bool = False
    """Start the optimizer's state anew when this phase begins."""


class MLMPhase(Section):
    """Masked language modeling: masked tokens are predicted from both sides."""

    name: Literal["mlm"]
    until: Duration | None = None
    """When the phase ends, counted from the start of the run. Only the last phase leaves it open."""
    masking_ratio: Share | RampConfig = 0.4
    """Share of tokens that are selected, each independently. The paper compares 0.2, 0.3, 0.4 and 0.5."""
    replacement: ReplacementConfig = ReplacementConfig()
    target: Literal["same", "next"] = "same"
    """`same`: a masked token is predicted at its own position. `next`: at the one before it, as CLM does, so that the
    head's offset stays when the objective changes (masked next-token prediction)."""
    reset_optimizer: bool = False
    """Start the optimizer's state anew when this phase begins."""


Phase = Annotated[CLMPhase | MLMPhase, Field(discriminator="name")]


class ObjectiveConfig(Section):
    """What is predicted, when."""

    phases: Annotated[list[Phase], Field(min_length=1)]


class EvaluationConfig(Section):
    """Validation during training: CLM loss and MLM loss at fixed masks, whatever the phase."""

    interval: Duration | None = None
    """How often. Default: only at the end."""
    batches: Positive | None = None
    """How many batches of the validation split. Default: all."""
    batch_size: Positive | None = None
    """Rows in a batch, all ranks together. Default: the training batch."""
    masking_ratio: Share = 0.4


class OptimizerConfig(Section):
    """AdamW. The defaults are EuroBERT's, which the paper's appendix repeats: weight decay on every parameter."""

    lr: Annotated[float, Field(gt=0)] = 5e-4
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    eps: Annotated[float, Field(gt=0)] = 1e-5
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    no_decay: list[Literal["norm", "embedding", "head"]] = []
    """Groups of parameters that are not decayed."""
    skip_nonfinite: Count = 0
    """Batches of a run that may be left out for a loss or a gradient that is NaN or infinite. One more ends the run, with
    the weights as they were before it."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest norm of the gradient. Null: no clipping."""


class ScheduleConfig(Section):
    """Warmup, stable, decay: the learning rate rises from 0, stays, and falls at the end."""

    warmup: Duration = Duration(0, "ba")
    decay: Duration = Duration(0, "ba")
    """Length of the fall, which ends with the run. 0ba: a trunk, which branches can leave at any checkpoint."""
    decay_shape: Literal["linear", "1-sqrt", "cosine"] = "linear"
    final_lr: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Where the decay ends, as a share of the learning rate."""
    decay_from: str | None = None
    """A trunk's checkpoint from which this run starts: weights, optimizer, position in the data. The checkpoint must lie
    exactly where this schedule's decay begins."""


class CheckpointConfig(Section):
    """What is saved, and how a run finds its way back."""

    folder: str | None = None
    """Local folder, or a bucket's prefix: `s3://…`, `gs://…`, `az://…`, `oci://…`. Default: `checkpoints` in the run's
    folder, where the newest one lies in a bucket's case too."""
    interval: Duration = Duration(1000, "ba")
    keep: Annotated[int, Field(ge=-1)] = -1
    """How many complete checkpoints stay. -1: all. Older ones go once a newer one is complete, but those at a switch, at
    the start of the decay and at `keep_at` stay."""
    keep_at: list[Duration] = []
    """More moments, such as `18000ba`, at which the run saves and whose checkpoints stay: for branches."""
    autoresume: bool = True
    """Go on from the newest checkpoint of this run, if there is one."""
    disk_limit: Size | None = None
    """Bytes of checkpoints, e.g. `500gb`, that may wait on a machine's disk while the bucket can't be reached. A run that
    needs more stops. Default: what the disk has."""
    patience: Count = 900
    """Seconds that the end of a run waits for a bucket that can't be reached."""
    allow: list[str] = []
    """Keys, or sections, that decide the weights and may nevertheless differ from the checkpoint's when the run goes on."""


class ParallelismConfig(Section):
    """How ranks share the model. Nothing here says how many there are."""

    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """`ddp`: each rank holds everything. `fsdp`: weights, gradients and optimizer state are split, by decoder layer.
    `auto`: ddp while the states take at most half of a GPU's memory."""
    shard_degree: Positive | Literal["all", "node"] = "all"
    """Ranks that hold the model once among them. `node`: a machine's ranks, with a copy on every machine (HSDP)."""
    reshard_after_forward: bool = True
    """False keeps a layer's gathered weights from forward to backward: less traffic, more memory."""


class ComputeConfig(Section):
    """What computes. Every choice gives the same numbers, within rounding; see docs/throughput.md."""

    attention: Literal["auto", "varlen", "flash2", "flex", "sdpa"] = "auto"
    """`varlen`: PyTorch's kernels for segments. `flash2`: the package flash-attn. `flex`: FlexAttention. `sdpa`: PyTorch's
    dense attention, one segment at a time. `auto`: the first of these that is installed and fits; on CPUs `sdpa`."""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile, each decoder layer by itself, and the loss. `auto`: on GPUs."""
    activation_checkpointing: Literal["none", "all"] | Positive | list[Count] = "none"
    """Layers that are computed again in the backward pass, which saves their memory: `all`, every Nth (`2`), or a list,
    counted from 0 (`[0, 1, 5]`)."""

    def recomputed(self, layers: int) -> list[int]:
        """The layers, of so many, that are computed again, counted from 0."""
        asked = self.activation_checkpointing
        if isinstance(asked, list):
            return asked
        if isinstance(asked, int):
            return list(range(asked - 1, layers, asked))
        return list(range(layers)) if asked == "all" else []


class WandBConfig(Section):
    """Weights & Biases (`uv pip install '.[loggers]'`); the key comes from the environment."""

    project: str
    entity: str | None = None
    group: str | None = None
    tags: list[str] = []


class MLflowConfig(Section):
    """MLflow (`uv pip install '.[loggers]'`); credentials come from the environment."""

    experiment: str
    tracking_uri: str | None = None


class LoggingConfig(Section):
    """Where numbers go. The folders lie in the run's output."""

    jsonl: bool = True
    """`<output>/metrics.jsonl`: a line of JSON for each batch."""
    tensorboard: bool = True
    wandb: WandBConfig | None = None
    mlflow: MLflowConfig | None = None
    loss_spike: Annotated[float, Field(gt=1)] | None = 1.5
    """A batch whose loss is this many times the running median is logged, with its rows' ids. Null: none."""
    progress_bar: bool = True
    console_interval: Duration | None = None
    """Also print the metrics as lines, this often."""


class PretrainConfig(Section):
    """`job: pretrain`: rows in, an encoder out."""

    job: Literal["pretrain"]
    run_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    output: str = "runs"
    """The run writes to `<output>/<run_name>`."""
    seed: Count = 42
    tokenizer: str
    """Folder or hub id of the tokenizer that the data was converted with."""
    max_duration: Duration
    global_batch_size: Positive
    """Rows in an optimizer step, all ranks together."""
    microbatch_size: Positive | Literal["auto"] = "auto"
    """Rows in one forward pass of a rank. `auto`: as many as fit the GPU, measured at the start and remembered in the run's
    folder; on CPUs a rank's whole batch."""
    precision: Literal["fp32", "amp_bf16"] = "fp32"
    model: ModelConfig
    data: DataConfig
    objective: ObjectiveConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallelism: ParallelismConfig = ParallelismConfig()
    compute: ComputeConfig = ComputeConfig()
    logging: LoggingConfig = LoggingConfig()
