"""Everything a fine-tuning YAML may say."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from biphasic.config.base import Count, Positive, Section
from biphasic.config.durations import Duration
from biphasic.config.schema import LoggingConfig, OptimizerConfig


class EncoderConfig(Section):
    """The encoder to start from."""

    path: str
    """An exported folder, a Biphasic checkpoint, or a hub id."""
    trust_remote_code: bool = False


class RetrievalTask(Section):
    """Pairs of a query and the document that answers it; the other documents of the batch are the negatives.

    The paper's setting: mean pooling, InfoNCE over in-batch negatives at temperature 0.05, `Query: ` and `Document: `
    before the texts.
    """

    name: Literal["retrieval"]
    train: Annotated[list[str], Field(min_length=1)]
    """Parquet or JSONL files of pairs."""
    query_column: str = "query"
    document_column: str = "positive"
    query_prompt: str = "Query: "
    document_prompt: str = "Document: "
    max_length: Positive = 2028
    """Tokens of a text, its prompt included; longer texts are cut. The paper's: 99% of 2,048."""
    temperature: Annotated[float, Field(gt=0)] = 0.05
    gather_negatives: bool = True
    """Take the other ranks' documents as negatives too."""


class FinetuneConfig(Section):
    """`job: finetune`: an encoder and a task in, a fine-tuned encoder out."""

    job: Literal["finetune"]
    run_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    output: str = "runs"
    """The run writes to `<output>/<run_name>`; the fine-tuned encoder to `<output>/<run_name>/model`."""
    seed: Count = 0
    model: EncoderConfig
    task: RetrievalTask
    max_duration: Duration = Duration(1000, "ba")
    """Ends the run, or one epoch over the data, whichever comes first (the paper's protocol)."""
    batch_size: Positive = 32
    """Pairs in an optimizer step, all ranks together."""
    precision: Literal["fp32", "amp_bf16"] = "fp32"
    warmup: Duration = Duration(0.1, "dur")
    """Linear warmup; the rest of the run decays linearly to 0."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=5e-5)
    logging: LoggingConfig = LoggingConfig(tensorboard=False)
