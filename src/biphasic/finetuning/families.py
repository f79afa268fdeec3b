"""The kinds of task, by the YAML's `task.kind`."""

from __future__ import annotations

from biphasic.finetuning.classification import Classification
from biphasic.finetuning.question_answering import QuestionAnswering
from biphasic.finetuning.retrieval import Retrieval
from biphasic.finetuning.task import Task
from biphasic.finetuning.tokens import Tokens

FAMILIES: dict[str, type[Task]] = {
    family.family: family for family in (Classification, Tokens, QuestionAnswering, Retrieval)
}
