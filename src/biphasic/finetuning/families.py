"""The classes of downstream task families, by the `task.kind` of a fine-tuning YAML."""

from __future__ import annotations

from biphasic.finetuning.classification import Classification, TokenClassification
from biphasic.finetuning.question_answering import QuestionAnswering
from biphasic.finetuning.retrieval import Retrieval
from biphasic.finetuning.task import FinetuneTask

FAMILIES: dict[str, type[FinetuneTask]] = {
    family.family: family for family in (Classification, TokenClassification, QuestionAnswering, Retrieval)
}
