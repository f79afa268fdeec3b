"""Schema of a fine-tuning YAML (`job: finetune`): keys, types, defaults and checks."""

from typing import Annotated, Any, Literal

from pydantic import Field

from biphasic.config.base import (
    Address,
    Count,
    KeyProblems,
    LocalPath,
    Name,
    Positive,
    RunConfig,
    Section,
    Seed,
    Share,
    distinct,
    template,
)
from biphasic.config.pretrain import LoggingConfig, OptimizerConfig
from biphasic.durations import Duration

NOT_IN_RESULT: dict[str, Any] = {
    **dict.fromkeys(("run_name", "output", "cache", "microbatch_tokens", "save_model", "logging", "model"), True),
    "task": {"data": True, "scored_on": True},
}
"""Keys of a fine-tuning that don't affect its result; and model and paths, whose content is compared instead."""


class EncoderConfig(Section):
    """The encoder to load."""

    path: Address
    """Path of an exported folder, a Biphasic checkpoint or a Hugging Face folder, or a hub id."""
    revision: str | None = None
    """Commit, tag or branch on the hub. Default: the newest commit."""
    trust_remote_code: bool = False
    """Whether to run Python files from a Hugging Face folder."""


class _TaskConfig(Section):
    name: Name
    """Name of the task in records and tables."""
    data: Address
    """Folder or bucket prefix of the dataset, written by `biphasic tasks`."""
    max_length: Annotated[int, Field(gt=0, lt=2**63)] | Share = 0.99
    """Maximum number of tokens in an example, or a share of the model's maximum (the paper: 99%, rounded). Longer texts are
    cut, of a pair the longer one first; long contexts of questions and texts with labelled words are read in windows."""
    end_of_text: bool = False
    """Whether the EOS token follows each text, as in pretraining and in the paper."""
    metrics: list[Any]
    """Metrics in tables, each with the learning rate that is best by it. The first counts in averages over tasks."""

    @property
    def family(self) -> str:
        """The kind of dataset that the task needs, and its group in tables."""
        kind: str = self.kind  # pyright: ignore[reportAttributeAccessIssue] - each kind of task has one
        return "question_answering" if kind == "answer_tokens" else kind

    def shown(self, name: str) -> list[tuple[str, str]]:
        """Return a test set's names in tables, with the metrics: `conll2003` for the first, `conll2003 f1` for another."""
        return [(f"{name} {metric}" if at else name, metric) for at, metric in enumerate(self.metrics)]

    @property
    def retrieval_sets(self) -> dict[str, str]:
        """Retrieval datasets to score on, by their names in tables."""
        return {}


class _ScoredConfig(_TaskConfig):
    validation: str | None = "validation"
    """Split whose score selects the learning rate. Null: no validation."""
    tests: dict[Name, str] | None = None
    """Test splits by their names in tables. Default: the split `test`, named after the task."""

    @property
    def scored(self) -> dict[str, str]:
        """Test splits by their names in tables, with the default applied."""
        return {self.name: "test"} if self.tests is None else dict(self.tests)


class _TextConfig(_ScoredConfig):
    text: Annotated[str, template("text", "text_pair", required="text")] = "{text}"
    """Template of the model's input. `{text}` and `{text_pair}` are columns of the dataset."""


class ClassificationConfig(_TextConfig):
    """Classify a text or a pair of texts: mean pooling, EuroBERT's two-layer head, cross-entropy."""

    kind: Literal["classification"]
    metrics: Annotated[list[Literal["accuracy", "f1", "matthews"]], Field(min_length=1), distinct] = ["accuracy"]
    """Metrics in tables; the first counts in averages over tasks. `f1` is the F1 of the second label; `matthews` is the
    Matthews correlation, 0 if only one label is predicted."""


class MultiLabelConfig(_TextConfig):
    """Find all labels of a text or a pair of texts: the head of `classification`, binary cross-entropy of each label."""

    kind: Literal["multi_label"]
    metrics: Annotated[list[Literal["micro_f1", "macro_f1", "average_precision"]], Field(min_length=1), distinct] = [
        "micro_f1",
        "macro_f1",
    ]
    """Metrics in tables; the first counts in averages over tasks. A label is predicted from the probability that gives the
    best micro F1 on the validation split. `average_precision` needs no threshold: its mean over labels (scikit-learn)."""


class RegressionConfig(_TextConfig):
    """Predict a number for a text or a pair of texts: the head of `classification` with one output, squared error."""

    kind: Literal["regression"]
    metrics: Annotated[list[Literal["spearman", "pearson"]], Field(min_length=1), distinct] = ["spearman", "pearson"]
    """Correlations in tables, 0 if all predictions are equal; the first counts in averages over tasks."""


class TokensConfig(_ScoredConfig):
    """Label each word: cross-entropy."""

    kind: Literal["tokens"]
    labelled: Literal["first", "all"] = "first"
    """Which tokens of a word are trained on its label. A word's prediction is that of most of these tokens (of the
    earliest among equals). `all`: the paper."""
    metrics: Annotated[list[Literal["f1", "sentence_f1"]], Field(min_length=1), distinct] = ["f1"]
    """Metrics in tables; the first counts in averages over tasks. `f1`: F1 of
    entities. `sentence_f1` (the paper): macro F1 of the BIO labels of a sentence's words, averaged over sentences."""


class QuestionAnsweringConfig(_ScoredConfig):
    """Find the span of a context that answers a question: cross-entropy of its start and end, exact match and token F1."""

    kind: Literal["question_answering"]
    text: Annotated[str, template("question", "separator", required="question")] = "{question}{separator}"
    """Template of the text before the context. `{separator}` is the tokenizer's separator token, or else its EOS token."""
    stride: Count = 128
    """Number of tokens by which neighbouring windows of a long context overlap."""
    longest_answer: Positive = 30
    """Maximum length of an answer in tokens."""
    unanswerable: bool = False
    """Whether questions may have no answer (SQuAD v2). The no-answer threshold is then tuned on the validation split."""
    metrics: Annotated[list[Literal["f1", "exact_match", "character_f1"]], Field(min_length=1), distinct] = ["f1"]
    """Metrics in tables; the first counts in averages over tasks. `f1` is of words as spaces divide them (SQuAD's),
    `character_f1` of characters (JSQuAD's), for languages without spaces."""


class AnswerTokensConfig(_ScoredConfig):
    """Label each token as inside or outside the first answer to a question (the paper): cross-entropy, overlap of tokens.

    Long contexts are truncated. A question whose answer is not in the rest has no answer, for scores too.
    """

    kind: Literal["answer_tokens"]
    text: Annotated[str, template("question", required="question")] = "Question: {question}\nContext: "
    """Template of the text before the context."""
    metrics: Annotated[list[Literal["token_f1", "f1", "exact_match", "character_f1"]], Field(min_length=1), distinct] = [
        "token_f1"
    ]
    """Metrics in tables; the first counts in averages over tasks. `token_f1` (the paper): F1 of the positions inside the
    answer; the others are those of `question_answering`, of the longest run of tokens inside."""


class RetrievalConfig(_TaskConfig):
    """Train on pairs of a query and its relevant document: mean pooling, by default InfoNCE over the batch's documents.

    The defaults are the paper's: in-batch negatives, temperature 0.05, and the prompts `Query: ` and `Document: `.
    """

    kind: Literal["retrieval"]
    query_prompt: str = "Query: "
    """Text before each query."""
    document_prompt: str = "Document: "
    """Text before each document."""
    loss: Literal["info_nce", "kl"] = "info_nce"
    """`info_nce`: queries find their documents among those of the batch. `kl`: the query's document and its hard
    negatives get the distribution of a teacher's scores, from the column `scores`."""
    temperature: Annotated[float, Field(gt=0)] = 0.05
    """Cosine similarities are divided by it, in every loss."""
    dimensions: Annotated[list[Positive], Field(min_length=1)] | None = None
    """Matryoshka: the loss is the sum of those of embeddings truncated to each of these dimensions, the largest first, and
    each is scored. Null: only the model's width."""
    hard_negatives: Count = 0
    """Maximum number of hard negatives in the batch for each query, sampled each epoch from the column `negatives`."""
    mask_positives: bool = False
    """Whether a query's other relevant documents, which the training pairs name, are no negatives for it. False: only equal
    documents are not, because the paper's library (sentence-transformers 3.4.1) masks none."""
    scored_on: dict[Name, Address] | None = None
    """Retrieval datasets to score on, by their names in tables, with `validation` and `test` qrels, in memory.
    Default: the task's own set; `{}`: none."""
    end_of_text: bool = False
    """Whether the EOS token follows each training text, as in the paper, which scores texts without it."""
    metrics: Annotated[list[Literal["ndcg_at_10", "ndcg_of_ten"]], Field(min_length=1), distinct] = ["ndcg_at_10"]
    """Metrics in tables; the first counts in averages over tasks. `ndcg_at_10`:
    mteb's. `ndcg_of_ten` (the paper): relevance is yes or no, and the ideal is the best order of the ten retrieved."""

    @property
    def retrieval_sets(self) -> dict[str, str]:
        """Retrieval datasets to score on: `scored_on`, or the task's own set."""
        return {self.name: self.data} if self.scored_on is None else dict(self.scored_on)

    def scored_as(self, name: str) -> dict[str, int | None]:
        """Return a set's names in tables with the dimension of the embeddings: `nq`, `nq d256`. None is the width."""
        first, *others = self.dimensions or [None]
        return {name: first, **{f"{name} d{dimension}": dimension for dimension in others}}


TaskConfig = Annotated[
    ClassificationConfig
    | MultiLabelConfig
    | RegressionConfig
    | TokensConfig
    | QuestionAnsweringConfig
    | AnswerTokensConfig
    | RetrievalConfig,
    Field(discriminator="kind"),
]


class FinetuneConfig(RunConfig):
    """`job: finetune`: fine-tune an encoder on a task and score it."""

    job: Literal["finetune"]  # pyright: ignore[reportIncompatibleVariableOverride]
    cache: LocalPath = "runs/cache"
    """Local folder for tokenized data and downloads from buckets, shared by all runs."""
    seed: Seed = 0
    """Random seed for the head's initial weights, the order of examples, and dropout."""
    model: EncoderConfig
    """The encoder to fine-tune."""
    task: TaskConfig
    """What it is fine-tuned and scored on."""
    max_duration: Duration = Duration(1000, "ba")
    """The run ends here or after one epoch, whichever comes first (the paper's protocol). `ep` allows several epochs."""
    batch_size: Positive = 32
    """Number of examples in an optimizer step, over all ranks."""
    microbatch_tokens: Positive = 16384
    """Approximate maximum number of tokens in a forward pass of a rank, which affects only memory. Training for retrieval
    computes longer batches in such parts twice, because the loss needs all of them at once."""
    precision: Literal["fp32", "amp_bf16"] = "fp32"
    """`amp_bf16`: weights in fp32, matrix products in bf16. `fp32`: everything in fp32."""
    warmup: Duration = Duration(0.1, "dur")
    """Length of the linear warmup, which must be shorter than the training. After it, the learning rate decays linearly to
    0."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=5e-5)
    """The optimizer. Give `lr` beside any other of its keys."""
    save_model: bool = True
    """Whether to write the fine-tuned model to `<output>/<run_name>/model`."""
    logging: LoggingConfig = LoggingConfig(tensorboard=False)
    """Where metrics are logged."""

    def problems(self, ranks: int) -> KeyProblems:
        end, warmup = self.max_duration, self.warmup
        if end.unit in ("dur", "tok") or not end.value:
            yield ["max_duration"], "expected a positive length in batches, rows or epochs"
        elif warmup.unit not in ("dur", end.unit):
            yield ["warmup", "max_duration"], f"expected dur or the unit of max_duration ({end})"
        elif warmup.resolve(end).value >= end.value and not (warmup.unit == "dur" and warmup.value < 1):
            yield ["warmup", "max_duration"], f"expected less than max_duration ({end})"
        if self.batch_size % ranks:
            yield ["batch_size"], f"expected a multiple of the number of ranks ({ranks})"
        if "lr" not in self.optimizer.model_fields_set and "optimizer" in self.model_fields_set:
            yield ["optimizer.lr"], "is missing: give the learning rate beside the other optimizer keys"
        task = self.task
        if isinstance(task, QuestionAnsweringConfig):
            if task.text.count("{separator}") > 1:
                yield ["task.text"], "expected at most one {separator}; the context follows it"
            if task.unanswerable and task.validation is None:
                yield ["task.validation", "task.unanswerable"], "is null, but the no-answer threshold is found on it"
        if isinstance(task, RetrievalConfig):
            if task.loss == "kl" and not task.hard_negatives:
                message = "expected at least 1: kl compares a query's document with its hard negatives"
                yield ["task.hard_negatives", "task.loss"], message
            if task.loss == "kl" and task.mask_positives:
                message = "has no effect with kl, which compares a query's own documents"
                yield ["task.mask_positives", "task.loss"], message
            if task.dimensions and task.dimensions != sorted(set(task.dimensions), reverse=True):
                yield ["task.dimensions"], "expected strictly decreasing numbers, such as [768, 256, 64]"
            if self.batch_size < 2 and not task.hard_negatives:
                yield ["batch_size"], "expected at least 2 pairs: with one there are no in-batch negatives"
        scored = task.retrieval_sets if isinstance(task, RetrievalConfig) else task.scored
        if not scored and not self.save_model:
            yield ["save_model"], "is false and nothing is scored: the run would have no result"
