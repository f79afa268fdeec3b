"""Everything a fine-tuning YAML may say."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from biphasic.config.base import Count, Positive, Section, Share
from biphasic.config.durations import Duration
from biphasic.config.schema import LoggingConfig, OptimizerConfig

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class EncoderConfig(Section):
    """The encoder to start from."""

    path: str
    """An exported folder, a Biphasic checkpoint, a folder of Hugging Face's format, or a hub id."""
    revision: str | None = None
    """Of a hub id: commit, tag or branch. Default: the newest, which is looked up."""
    trust_remote_code: bool = False
    """Let a Hugging Face folder run its own Python files."""


class _TaskConfig(Section):
    """What all kinds of task share."""

    name: Name
    """In records and tables."""
    data: str
    """The set's folder or bucket prefix, as `data_prep/tasks.py` makes it."""
    max_length: Positive | Share = 0.99
    """Tokens of an example; longer ones are cut. A share is of the model's own maximum. The paper's: 99%, rounded."""


class _ScoredConfig(_TaskConfig):
    """A task that is scored on splits of its own set."""

    validation: str | None = "validation"
    """The split by whose score rates are chosen. Null: none."""
    tests: dict[Name, str] | None = None
    """Name in tables: split. Default: the task's name, `test`."""

    @property
    def scored(self) -> dict[str, str]:
        """Test splits by name."""
        return {self.name: "test"} if self.tests is None else dict(self.tests)


class ClassificationConfig(_ScoredConfig):
    """A label for a text or a pair of texts: mean-pooled tokens, EuroBERT's two-layer head, cross-entropy."""

    kind: Literal["classification"]
    text: str = "{text}"
    """What the model reads; `{text}` and `{text_pair}` are the set's columns."""
    metric: Literal["accuracy", "f1"] = "accuracy"
    """By which rates are chosen. `f1` is of the second label."""


class TokensConfig(_ScoredConfig):
    """A label for each word, at its first token: cross-entropy, entity-level F1."""

    kind: Literal["tokens"]


class QuestionAnsweringConfig(_ScoredConfig):
    """The span of a context that answers a question: start and end by cross-entropy, exact match and token F1."""

    kind: Literal["question_answering"]
    text: str = "{question}{separator}"
    """What comes before the context. `{separator}`: the tokenizer's separator, or else its end of text."""
    stride: Count = 128
    """Tokens that neighbouring windows of a long context have in common."""
    longest_answer: Positive = 30
    """Tokens."""
    unanswerable: bool = False
    """Whether a question may have no answer (SQuAD v2): the threshold is then found on validation."""


class RetrievalConfig(_TaskConfig):
    """Pairs of a query and the document that answers it: mean pooling, InfoNCE over the batch's other documents.

    The paper's setting: in-batch negatives at temperature 0.05, `Query: ` and `Document: ` before the texts.
    """

    kind: Literal["retrieval"]
    query_prompt: str = "Query: "
    document_prompt: str = "Document: "
    temperature: Annotated[float, Field(gt=0)] = 0.05
    gather_negatives: bool = True
    """Take the other ranks' documents as negatives too."""
    hard_negatives: Count = 0
    """Of the set's `negatives`, so many a query are added to the batch's documents; another choice in each epoch."""
    scored_on: dict[Name, str] = {}
    """Name in tables: folder of a retrieval set. NDCG@10 on its qrels `validation` and `test`, in memory."""


TaskConfig = Annotated[
    ClassificationConfig | TokensConfig | QuestionAnsweringConfig | RetrievalConfig, Field(discriminator="kind")
]


class FinetuneConfig(Section):
    """`job: finetune`: an encoder and a task in, scores and a fine-tuned encoder out."""

    job: Literal["finetune"]
    run_name: Name
    output: str = "runs"
    """The run writes to `<output>/<run_name>`; the fine-tuned model to `<output>/<run_name>/model`."""
    cache: str = "runs/cache"
    """Folder of this machine for tokenized data and what is brought from buckets; all runs share it."""
    seed: Count = 0
    """Decides the head's first weights, the order of examples, and dropout."""
    model: EncoderConfig
    task: TaskConfig
    max_duration: Duration = Duration(1000, "ba")
    """Ends the run, or one epoch over the data, whichever comes first (the paper's protocol). More than one epoch is only
    had by `ep`."""
    batch_size: Positive = 32
    """Examples in an optimizer step, all ranks together."""
    microbatch_tokens: Positive = 16384
    """Tokens in a forward pass of a rank, about: memory, and nothing else. In-batch negatives need the batch whole."""
    precision: Literal["fp32", "amp_bf16"] = "fp32"
    warmup: Duration = Duration(0.1, "dur")
    """Linear warmup; the rest of the run decays linearly to 0."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=5e-5)
    save_model: bool = True
    """Write the fine-tuned model."""
    logging: LoggingConfig = LoggingConfig(tensorboard=False)
