"""Checks of fine-tunings."""

from __future__ import annotations

from string import Formatter

from biphasic.config.base import Found
from biphasic.config.finetune import (
    ClassificationConfig,
    FinetuneConfig,
    QuestionAnsweringConfig,
    RetrievalConfig,
)


def finetune_problems(config: FinetuneConfig, ranks: int) -> Found:
    """What can't be in a fine-tuning of `ranks` processes."""
    yield from _lengths(config)
    if config.batch_size % ranks:
        yield ["batch_size"], f"expected a multiple of the number of ranks ({ranks}); got {config.batch_size}"
    if "lr" not in config.optimizer.model_fields_set and "optimizer" in config.model_fields_set:
        yield ["optimizer.lr"], "is missing: give the learning rate beside the other optimizer keys"
    if "head" in config.optimizer.no_decay:
        yield ["optimizer.no_decay"], "expected norm or embedding; head is the language-model head's, which isn't here"
    task = config.task
    if isinstance(task, ClassificationConfig):
        yield from _template(task.text, {"text", "text_pair"}, "text")
    if isinstance(task, QuestionAnsweringConfig):
        yield from _template(task.text, {"question", "separator"}, "question")
        if task.text.count("{separator}") > 1:
            yield ["task.text"], "expected at most one {separator}; the context follows it"
        if task.unanswerable and task.validation is None:
            yield ["task.validation", "task.unanswerable"], "is null, but the no-answer threshold is found on it"
    if isinstance(task, RetrievalConfig):
        alone = config.batch_size // ranks < 2 and not task.gather_negatives and not task.hard_negatives
        if alone and not config.batch_size % ranks:
            yield ["batch_size"], "expected at least 2 pairs a rank: with one there are no in-batch negatives"
    scored = task.scored_on if isinstance(task, RetrievalConfig) else task.scored
    if not scored and not config.save_model:
        yield ["save_model"], "is false and nothing is scored: nothing would come out"


def _lengths(config: FinetuneConfig) -> Found:
    whole, warmup = config.max_duration, config.warmup
    if whole.unit in ("dur", "tok") or not whole.value:
        yield ["max_duration"], f"expected a positive length in batches, rows or epochs; got {whole}"
    elif warmup.unit not in ("dur", whole.unit):
        yield ["warmup", "max_duration"], f"expected dur or the unit of max_duration ({whole}); got {warmup}"
    elif warmup.of(whole).value >= whole.value and not (warmup.unit == "dur" and warmup.value < 1):
        yield ["warmup", "max_duration"], f"expected less than max_duration ({whole}); got {warmup}"


def _template(text: str, known: set[str], needed: str) -> Found:
    """A text with the set's columns in braces."""
    try:
        fields = {name for _, name, _, _ in Formatter().parse(text) if name is not None}
    except ValueError as error:
        yield ["task.text"], f"is no template ({error}); a brace itself is written twice"
        return
    names = ", ".join(f"{{{name}}}" for name in sorted(known))
    if fields - known or needed not in fields:
        yield ["task.text"], f"expected a text with {{{needed}}}, and of fields only {names}; got {text!r}"
