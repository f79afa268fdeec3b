"""Fine-tuning to predict the label of a text, of a pair of texts, or of each word, or a number for a text or a pair."""

import itertools
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from biphasic.downstream.array_cache import Ragged
from biphasic.errors import UserError
from biphasic.finetuning.task import Columns, Examples, PredictionTask, TaskBatch
from biphasic.finetuning.truncation import format_and_cut, windows
from biphasic.model.heads import TextHead, TokenHead
from biphasic.model.losses import IGNORE
from biphasic.model.pooling import mean_pool
from biphasic.model.segments import Segments

_OVERLAP = 128
"""Number of tokens that neighboring windows of a long text share."""


class Classification(PredictionTask):
    """Trains with cross-entropy on mean-pooled tokens; scores accuracy, Matthews correlation and F1 (of two labels)."""

    family = "classification"
    label_type: type[np.number] = np.int64

    def build_head(self, width: int) -> nn.Module:
        if "f1" in self.config.metrics and len(self.data.label_names) != 2:
            raise UserError(f"task.metrics: f1 needs two labels; {self.config.data} has {len(self.data.label_names)}")
        return TextHead(width, len(self.label_names or []))

    def check_data(self) -> list[str]:
        nulls = {table: folder.null_count(table, "text_pair") for folder, table in self.tables()}
        pairs, is_read = self.data.row_count("train") - nulls["train"], "{text_pair}" in self.config.text
        if is_read and any(nulls.values()):
            raise UserError(f"task.text: uses {{text_pair}}, but {self.config.data} has single texts")
        problem = f"{self.config.text!r} leaves out the text_pair of {pairs:,} training examples in {self.config.data}"
        return [f"task.text: {problem}: '{{text}} {{text_pair}}' reads both"] if pairs and not is_read else []

    def tokenize(self, columns: Columns, title: str) -> Examples:
        pairs = zip(columns["text"], columns["text_pair"], strict=True)
        rows = [{"text": text, "text_pair": pair} for text, pair in pairs]
        texts, lost = format_and_cut(self.text_tokenizer, self.config.text, rows, self.max_length, title)
        return {"texts": texts, "lost": lost, "labels": Ragged.of(self.targets(columns), self.label_type)}

    def targets(self, columns: Columns) -> list[list[Any]]:
        return [[label] for label in columns["label"]]

    def loss(self, head: nn.Module, hidden: Tensor, segments: Segments, batch: TaskBatch) -> Tensor:
        return F.cross_entropy(head(mean_pool(hidden, segments)).float(), batch["labels"], reduction="sum")

    def predict(
        self, head: nn.Module, examples: Examples, hidden: Tensor, segments: Segments, indices: list[int]
    ) -> list[Any]:
        best = head(mean_pool(hidden, segments)).float().softmax(-1).max(-1)
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    def answers(self, columns: Columns, examples: Examples, predictions: list[Any]) -> Columns:
        labels, scores = zip(*predictions, strict=True)
        return {"predicted": [self.data.label_names[label] for label in labels], "score": list(scores)}

    def gold(self, columns: Columns) -> list[Any]:
        return [self.data.label_names[label] for label in columns["label"]]

    def metrics(self, gold: list[Any], answers: Columns, examples: Examples) -> dict[str, float]:
        from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

        names, predicted = self.data.label_names, answers["predicted"]
        matthews = float(matthews_corrcoef(gold, predicted))
        scores = {"accuracy": float(accuracy_score(gold, predicted)), "matthews": matthews}
        if len(names) == 2:
            scores["f1"] = float(f1_score(gold, predicted, pos_label=names[1], zero_division=0))  # pyright: ignore[reportArgumentType]
        return scores


class Regression(Classification):
    """Trains with the squared error of a number on mean-pooled tokens; scores its correlation with the correct numbers."""

    family = "regression"
    problem_type = "regression"
    label_type = np.float32

    @property
    def label_names(self) -> list[str]:
        """The name of the head's one output. transformers treats a model with one label as a regression."""
        return ["score"]

    def loss(self, head: nn.Module, hidden: Tensor, segments: Segments, batch: TaskBatch) -> Tensor:
        return F.mse_loss(self._numbers(head, hidden, segments), batch["labels"], reduction="sum")

    def predict(
        self, head: nn.Module, examples: Examples, hidden: Tensor, segments: Segments, indices: list[int]
    ) -> list[Any]:
        return self._numbers(head, hidden, segments).tolist()

    def _numbers(self, head: nn.Module, hidden: Tensor, segments: Segments) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):  # bf16 has steps of 1/32 above 4
            return head(mean_pool(hidden, segments).float())[:, 0].float()

    def answers(self, columns: Columns, examples: Examples, predictions: list[Any]) -> Columns:
        return {"predicted": predictions}

    def gold(self, columns: Columns) -> list[Any]:
        return columns["label"]

    def metrics(self, gold: list[Any], answers: Columns, examples: Examples) -> dict[str, float]:
        """Return `pearson` and `spearman`, both 0 with a warning if all predictions or all correct numbers are equal.

        SciPy gives NaN there, which tables would treat as a missing score. NaN predictions still give NaN.
        """
        from scipy.stats import pearsonr, spearmanr

        predicted = answers["predicted"]
        if len(set(gold)) < 2 or len(set(predicted)) < 2:
            warnings.warn(f"{self.config.name}: all numbers are equal: their correlation counts as 0", stacklevel=2)
            return {"pearson": 0.0, "spearman": 0.0}
        functions: dict[str, Any] = {"pearson": pearsonr, "spearman": spearmanr}
        return {name: float(function(gold, predicted).statistic) for name, function in functions.items()}


class MultiLabel(Classification):
    """Trains with the mean over labels of binary cross-entropy, as transformers; scores F1 and average precision.

    A label is predicted if its probability is at least a threshold, which is chosen on the validation split by micro F1.
    """

    family = "multi_label"
    problem_type = "multi_label_classification"
    label_type = np.float32

    def targets(self, columns: Columns) -> list[list[Any]]:
        """Return 1 for each label of a text and 0 for the others."""
        from sklearn.preprocessing import MultiLabelBinarizer

        numbers: Any = list(range(len(self.data.label_names)))
        return MultiLabelBinarizer(classes=numbers).fit_transform(columns["labels"]).tolist()  # pyright: ignore

    def loss(self, head: nn.Module, hidden: Tensor, segments: Segments, batch: TaskBatch) -> Tensor:
        logits = head(mean_pool(hidden, segments)).float()
        targets = batch["labels"].view_as(logits)
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1).sum()

    def predict(
        self, head: nn.Module, examples: Examples, hidden: Tensor, segments: Segments, indices: list[int]
    ) -> list[Any]:
        return head(mean_pool(hidden, segments)).float().sigmoid().tolist()

    def answers(self, columns: Columns, examples: Examples, predictions: list[Any]) -> Columns:
        """Return the labels of each text; `score` has the probability of every label."""
        if self.threshold is None:
            self.threshold = 0.5
            if self.config.validation is not None:
                self.threshold = best_threshold(np.array(self.targets(columns)), np.array(predictions))
        chosen = np.array(predictions) >= self.threshold
        return {"predicted": [self._names(np.flatnonzero(row)) for row in chosen], "score": predictions}

    def gold(self, columns: Columns) -> list[Any]:
        return [self._names(labels) for labels in columns["labels"]]

    def _names(self, numbers: Iterable[int]) -> list[str]:
        return [self.data.label_names[number] for number in numbers]

    def metrics(self, gold: list[Any], answers: Columns, examples: Examples) -> dict[str, float]:
        """Return `micro_f1`, `macro_f1`, `average_precision` and the `threshold`.

        `average_precision` is the mean over the labels that occur; one that doesn't counts as 0 in `macro_f1` if it was
        predicted, as in scikit-learn.
        """
        from sklearn.metrics import average_precision_score, f1_score
        from sklearn.preprocessing import MultiLabelBinarizer

        assert self.threshold is not None, "`answers` chooses it"
        binarizer: Any = MultiLabelBinarizer(classes=self.data.label_names)
        correct, predicted = binarizer.fit_transform(gold), binarizer.fit_transform(answers["predicted"])
        # scikit-learn takes the column of a single label for two classes, of which 1 is the label.
        options: Any = {"labels": [1] if correct.shape[1] == 1 else None, "zero_division": 0}
        f1 = [f1_score(correct, predicted, average=name, **options) for name in ("micro", "macro")]
        occurs = correct.any(0)
        probabilities = np.array(answers["score"])
        precision = average_precision_score(correct[:, occurs], probabilities[:, occurs]) if occurs.any() else 0.0
        scores: Any = {"micro_f1": f1[0], "macro_f1": f1[1], "average_precision": precision}
        return {**{name: float(score) for name, score in scores.items()}, "threshold": self.threshold}


def best_threshold(correct: np.ndarray, probabilities: np.ndarray) -> float:
    """Return the threshold from 0.01 to 0.99 with the best micro F1; of equal ones, the nearest to 0.5.

    `correct` is 0 or 1; both are [texts, labels].
    """
    scores = {}
    for percent in range(1, 100):
        predicted = probabilities >= percent / 100
        scores[percent] = 2 * (predicted & (correct > 0)).sum() / max(predicted.sum() + (correct > 0).sum(), 1)
    return max(scores, key=lambda percent: (scores[percent], -abs(percent - 50))) / 100


class TokenClassification(PredictionTask):
    """Trains with cross-entropy at the first token of each word, or at all; scores BIO labels.

    Words are joined by spaces and tokenized like any other text, as in pretraining. A text beyond the maximum length is read
    in overlapping windows, and each word in the window with more context around it. A word without a token of its own is
    predicted as O.
    """

    family = "tokens"
    inputs = ["tokens"]

    def build_head(self, width: int) -> nn.Module:
        names = self.data.label_names
        if "O" not in names or any(name != "O" and name[:2] not in ("B-", "I-") for name in names):
            problem = f"its labels are not BIO ({', '.join(names[:12])}), which seqeval scores"
            raise UserError(f"{self.config.data}: {problem}: prepare it again with `biphasic tasks`")
        return TokenHead(width, len(names))

    def tokenize(self, columns: Columns, title: str) -> Examples:
        """Return the windows of texts, and for each token its label and the index of the word that it labels, or -1.

        `about` has the row of each window.
        """
        texts, words, labels, about = [], [], [], []
        before, after = len(self.text_tokenizer.prefix), len(self.text_tokenizer.suffix)
        if (size := self.max_length - before - after) < 1:
            raise UserError(f"task.max_length: {self.max_length} tokens leave no room for the text")
        encodings = self.text_tokenizer.tokenize_with_offsets([" ".join(words) for words in columns["tokens"]], title)
        for row, (ids, offsets) in enumerate(encodings):
            numbers = columns["labels"][row]
            word_of = np.array(word_of_each_token(columns["tokens"][row], offsets, self.config.labelled == "all"))
            # The last window is moved back until it is full.
            ranges = [(max(min(first, len(ids) - size), 0), last) for first, last in windows(len(ids), size, _OVERLAP)]
            # A token that two windows have is labelled in the one with more tokens beside it.
            middles = [(start + end) // 2 for (_, end), (start, _) in itertools.pairwise(ranges)]
            for (first, last), own, until in zip(ranges, [0, *middles], [*middles, len(ids)], strict=True):
                text = self.text_tokenizer.with_special_tokens(ids[first:last], self.max_length)
                labelled = np.full(len(text), -1)
                labelled[before + own - first : before + until - first] = word_of[own:until]
                texts.append(np.array(text, np.int32))
                words.append(labelled)
                labels.append([IGNORE if word < 0 else numbers[word] for word in labelled])
                about.append([row])
        parts = {"texts": texts, "words": words, "about": about, "lost": [[0, 0]] * len(columns["tokens"])}
        return {**{name: Ragged.of(rows) for name, rows in parts.items()}, "labels": Ragged.of(labels, np.int64)}

    def count_targets(self, examples: Examples, indices: Sequence[int]) -> int:
        return int((examples["labels"].concatenate(indices)[0] != IGNORE).sum())

    def loss(self, head: nn.Module, hidden: Tensor, segments: Segments, batch: TaskBatch) -> Tensor:
        return F.cross_entropy(head(hidden).float(), batch["labels"], ignore_index=IGNORE, reduction="sum")

    def predict(
        self, head: nn.Module, examples: Examples, hidden: Tensor, segments: Segments, indices: list[int]
    ) -> list[Any]:
        best = head(hidden).float().softmax(-1).max(-1)
        columns = (best.indices.int().cpu().numpy(), best.values.cpu().numpy())
        return list(zip(*(np.split(column, np.cumsum(segments.lengths)[:-1]) for column in columns), strict=True))

    def answers(self, columns: Columns, examples: Examples, predictions: list[Any]) -> Columns:
        """Return the labels of each text's words.

        `score` has the probability of the first token with that label, or null for a word without a token.
        """
        names = self.data.label_names
        predicted, scores = [], []
        votes_of = [[dict[int, list[float]]() for _ in words] for words in columns["tokens"]]
        for window, (labels, probabilities) in enumerate(predictions):
            [row], words = examples["about"][window], examples["words"][window].tolist()
            for word, label, probability in zip(words, labels.tolist(), probabilities.tolist(), strict=True):
                if word >= 0:
                    votes_of[row][word].setdefault(label, []).append(probability)
        for votes in votes_of:
            # `max` returns the first of equal maxima, which is the label of the earliest token.
            best = [max(vote, key=lambda label: len(vote[label]), default=None) for vote in votes]
            predicted.append(["O" if label is None else names[label] for label in best])
            scores.append([None if label is None else vote[label][0] for label, vote in zip(best, votes, strict=True)])
        return {"predicted": predicted, "score": scores}

    def gold(self, columns: Columns) -> list[Any]:
        names = self.data.label_names
        return [[names[number] for number in numbers] for numbers in columns["labels"]]

    def metrics(self, gold: list[Any], answers: Columns, examples: Examples) -> dict[str, float]:
        return {**entity_scores(gold, answers["predicted"]), "sentence_f1": sentence_f1(gold, answers["predicted"])}


def entity_scores(gold: list[list[str]], predicted: list[list[str]]) -> dict[str, float]:
    """Return micro-averaged `f1`, `precision` and `recall` of entities over all sentences; 0 if there are no entities.

    Both arguments have the BIO labels of each sentence's words. This is seqeval's default mode, as in conlleval and
    run_ner: an entity is correct if its type, first and last word are correct, and an inside label that follows no word
    of its own type begins an entity.
    """
    from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

    scores = precision_recall_fscore_support(gold, predicted, average="micro", zero_division=0)  # pyright: ignore[reportArgumentType]
    precision, recall, f1 = (float(score) for score in scores[:3])  # pyright: ignore[reportArgumentType]
    return {"f1": f1, "precision": precision, "recall": recall}


def sentence_f1(gold: list[list[str]], predicted: list[list[str]]) -> float:
    """Return the macro F1 of the labels that a sentence has in either argument, averaged over sentences.

    This is the paper's score (its evaluation library, EncodEval): scikit-learn's macro F1 over the labels of a
    sentence's words, O included, so that a sentence without entities counts 1 if none is predicted.
    """
    scores = []
    for labels in zip(gold, predicted, strict=True):
        right = Counter(first for first, second in zip(*labels, strict=True) if first == second)
        counts = Counter(labels[0]) + Counter(labels[1])
        scores.append(fmean(2 * right[label] / count for label, count in counts.items()))
    return fmean(scores)


def word_of_each_token(words: Sequence[str], offsets: Sequence[tuple[int, int]], all_tokens: bool = False) -> list[int]:
    """Return, for each token of the words joined by spaces, the index of the word that the token begins, or -1.

    With `all_tokens`, a word's later tokens have its index too, and a token of spaces that of the next word, as in the paper
    (EncodEval). `offsets` has each token's first character and the one after its last; a token may include the space before
    a word.
    """
    text = " ".join(words)
    word_of_character = [number for number, word in enumerate(words) for _ in range(len(word) + 1)]
    begun, last = [], -1
    for start, end in offsets:
        # A token that consists of spaces begins no word; Llama 3's tokenizer makes one before each number.
        stop = len(text) if all_tokens and start < end else end
        word = next((word_of_character[at] for at in range(start, stop) if not text[at].isspace()), -1)
        begun.append(word if all_tokens or word > last else -1)
        last = max(last, word)
    return begun
