"""From texts to tokens and targets: byte-level tokens, unusual words, long contexts."""

import string
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from biphasic.config.finetune import ClassificationConfig, QuestionAnsweringConfig, TokensConfig
from biphasic.data.seeds import derive_seed
from biphasic.data.tokenizer import load_tokenizer
from biphasic.downstream.array_cache import Ragged, cached
from biphasic.downstream.writer import SCHEMAS
from biphasic.finetuning.batches import GlobalBatches, epoch_order
from biphasic.finetuning.classification import Classification, TokenClassification, word_of_each_token
from biphasic.finetuning.question_answering import QuestionAnswering, Span, best_answer, best_span
from biphasic.finetuning.task import resolve_max_length
from biphasic.model.losses import IGNORE
from biphasic.model.pooling import SentenceSettings
from biphasic.model.text_tokenizer import TextTokenizer
from biphasic.storage import json_bytes

WORDS = [
    "Ångström",
    "naïve",
    "don't",
    "U.S.",
    ")",
    "(",
    "—",
    "東京",
    "New",
    "York",
    "e-mail",
    "🙂",
    "1,000",
    "it",
    "of",
    "the",
]


@pytest.fixture(scope="module")
def text_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """Return a byte-level BPE, as Llama's and ModernBERT's: a space belongs to the word after it."""
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<eos>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([" ".join(WORDS)] * 50 + [string.ascii_letters], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    return TextTokenizer(load_tokenizer(str(folder)), 512)


def write(folder: Path, kind: str, rows: list[dict[str, Any]], names: list[str] | None = None) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([{"id": str(at), **row} for at, row in enumerate(rows)], SCHEMAS[kind])
    for split in ("train", "validation", "test"):
        pq.write_table(table, folder / f"{split}.parquet")
    (folder / "task.json").write_bytes(json_bytes({"kind": kind, "label_names": names, "rows": {}}))
    return str(folder)


def random_sentences(count: int, seed: int) -> list[list[str]]:
    generator = np.random.default_rng(seed)
    return [[WORDS[at] for at in generator.integers(len(WORDS), size=generator.integers(1, 25))] for _ in range(count)]


def test_each_word_has_a_first_token(text_tokenizer: TextTokenizer) -> None:
    for words in random_sentences(200, 0):
        [(ids, offsets)] = text_tokenizer.tokenizer.encode_with_offsets([" ".join(words)])
        begun = word_of_each_token(words, offsets)
        assert [word for word in begun if word >= 0] == list(range(len(words)))
        # The tokens from a word's first one to the next word's are the word.
        starts = [at for at, word in enumerate(begun) if word >= 0]
        for word, (start, end) in enumerate(zip(starts, [*starts[1:], len(ids)], strict=True)):
            assert text_tokenizer.tokenizer.tokenizer.decode(ids[start:end]).strip() == words[word]


def test_words_without_a_token() -> None:
    # The normalizer removed the second word, and a token of spaces precedes the third.
    assert word_of_each_token(["ab", "\u200b", "c"], [(0, 1), (1, 2), (4, 5), (5, 6)]) == [0, -1, -1, 2]
    assert word_of_each_token(["ab"], []) == []
    assert word_of_each_token(["ab", "cd"], [(0, 5)]) == [0]


def test_gold_labels_score_one_also_in_windows(text_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    sentences = random_sentences(60, 1)
    generator = np.random.default_rng(2)
    rows = [{"tokens": words, "labels": [int(x) for x in generator.integers(0, 2, len(words))]} for words in sentences]
    config = TokensConfig(kind="tokens", name="t", data=write(tmp_path / "t", "tokens", rows, ["O", "B-X"]))

    def scores(config: TokensConfig) -> dict[str, float]:
        task = TokenClassification(config, text_tokenizer, str(tmp_path / "cache"))
        examples, columns = task.examples("test"), task.data.read("test", "tokens")
        labels, words = examples["labels"], examples["words"]
        count = len(labels)
        begun = [words[at] >= 0 for at in range(count)]
        # The gold labels, with any label at other tokens.
        predictions = [(np.maximum(labels[at], 0), np.ones(len(labels[at]))) for at in range(count)]
        assert all(((labels[at] == IGNORE) == (words[at] < 0)).all() for at in range(count))
        assert task.count_targets(examples, range(count)) == sum(of.sum() for of in begun)
        answers = task.answers(columns, examples, predictions)
        assert not any(score is None for row in answers["score"] for score in row)
        assert sum(of.sum() for of in begun) == sum(map(len, sentences))  # each word in one window
        cut = task.cut["test"]
        several = int((np.bincount(examples["about"].flat) > 1).sum())  # texts in several windows
        assert (cut.cut, cut.tokens) == (0, 0) and (several > 20) == (config.max_length == 10)
        assert all(len(text) <= task.max_length for text in (examples["texts"][at] for at in range(count)))
        # Of a text that has several, every window is full.
        of_rows = [examples["about"][at][0] for at in range(count)]
        several = [at for at in range(count) if of_rows.count(of_rows[at]) > 1]
        assert all(len(examples["texts"][at]) == task.max_length for at in several)
        return task.metrics(task.gold(columns), answers, examples)

    everything = {"f1": 1.0, "precision": 1.0, "recall": 1.0, "sentence_f1": 1.0}
    assert scores(config) == everything
    assert scores(config.model_copy(update={"max_length": 10})) == everything


def questions(count: int, seed: int, longest: int) -> list[dict[str, Any]]:
    generator, rows = np.random.default_rng(seed), []
    for _ in range(count):
        words = [WORDS[at] for at in generator.integers(len(WORDS), size=generator.integers(1, longest))]
        first = int(generator.integers(len(words)))
        last = min(first + int(generator.integers(3)), len(words) - 1)
        start = len(" ".join(words[:first])) + (first > 0)
        text = " ".join(words[first : last + 1])
        answers = {"text": [text, "other"], "answer_start": [start, 0]} if generator.integers(5) else \
                  {"text": [], "answer_start": []}  # fmt: skip
        rows.append({"question": "which the?", "context": " ".join(words), "answers": answers})
    return rows


@pytest.mark.parametrize(("longest", "stride"), [(0.99, 128), (60, 20), (40, 0), (30, 100)])
def test_every_answer_can_be_found(text_tokenizer: TextTokenizer, tmp_path: Path, longest: float, stride: int) -> None:
    """Windows cover the context, and logits at the targets give the answers."""
    rows = questions(80, 3, 120)
    data = write(tmp_path / "q", "question_answering", rows)
    config = QuestionAnsweringConfig(kind="question_answering", name="q", data=data, max_length=longest, stride=stride)
    task = QuestionAnswering(config, text_tokenizer, str(tmp_path / "cache"))
    examples = task.examples("test")
    texts, most = examples["texts"], task.max_length
    assert max(texts.lengths) <= most
    windows: dict[int, list[tuple[Span, float]]] = {}
    covered: dict[int, set[int]] = {}
    for at in range(len(texts)):
        row, begins = examples["about"][at]
        start, end = examples["labels"][at]
        own = examples["offsets"][at].reshape(-1, 2)
        assert len(texts[at][begins:]) == len(own)
        logits = np.zeros((len(own), 2))
        if start:
            logits[start - begins, 0], logits[end - begins, 1] = 9, 9
        windows.setdefault(row, []).append((best_span(logits, own, 60), 0.0 if start else 9.0))
        covered.setdefault(row, set()).update(range(own[0][0], own[-1][1]) if len(own) else ())
    complete = 0
    for number, row in enumerate(rows):
        assert covered[number] == set(range(len(row["context"])))
        text, score, no_answer = best_answer(row["context"], windows[number])
        if not row["answers"]["text"]:
            assert no_answer > 0
            continue
        if score == 18:
            complete += 1
            assert text.strip() == row["answers"]["text"][0]
    answered = sum(bool(row["answers"]["text"]) for row in rows)
    # Windows without overlap cut some answers, which are no window's target.
    assert complete == answered if stride >= 20 else 0.5 * answered < complete < answered


def test_each_window_begins_with_the_question(text_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    data = write(tmp_path / "q", "question_answering", questions(5, 4, 100))
    config = QuestionAnsweringConfig(
        kind="question_answering", name="q", data=data, max_length=40, text="Q: {question}{separator}"
    )
    task = QuestionAnswering(config, text_tokenizer, str(tmp_path / "cache"))
    texts = task.examples("train")["texts"]
    [before] = text_tokenizer.tokenizer.encode(["Q: which the?"])
    assert len(texts) > 5
    for at in range(len(texts)):
        assert texts[at][: len(before) + 1].tolist() == [*before, text_tokenizer.tokenizer.eos_id]


def test_a_long_question_takes_half_of_the_window(text_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    rows = [{"question": "which " * 200, "context": "it of the", "answers": {"text": ["of"], "answer_start": [3]}}]
    data = write(tmp_path / "q", "question_answering", rows)
    config = QuestionAnsweringConfig(kind="question_answering", name="q", data=data, max_length=30)
    examples = QuestionAnswering(config, text_tokenizer, str(tmp_path / "cache")).examples("train")
    assert len(examples["texts"]) == 1
    assert examples["about"][0][1] == 15
    empty = [{"question": "", "context": "", "answers": {"text": [], "answer_start": []}}]
    config = config.model_copy(update={"data": write(tmp_path / "e", "question_answering", empty), "text": "{question}"})
    task = QuestionAnswering(config, text_tokenizer, str(tmp_path / "cache"))
    examples, columns = task.examples("train"), task.data.read("train", "question_answering")
    assert examples["texts"][0].tolist() == [text_tokenizer.tokenizer.eos_id]
    nothing = best_span(np.empty((0, 2)), np.empty((0, 2)), 30)
    answers = task.answers(columns, examples, [(nothing, 0.0)])
    assert task.metrics(task.gold(columns), answers, examples)["exact_match"] == 1.0


def test_every_token_has_its_words_label(text_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    """`labelled: all`, against words counted by the spaces before each token."""
    sentences = random_sentences(50, seed=3)
    rows = [{"tokens": words, "labels": list(range(len(words)))} for words in sentences]
    data = write(tmp_path / "t", "tokens", rows, ["O", *(f"B-{number}" for number in range(1, 25))])
    config = TokensConfig(kind="tokens", name="t", data=data, labelled="all", end_of_text=True)
    examples = TokenClassification(config, text_tokenizer, str(tmp_path / "cache")).examples("test")
    later = 0
    for row, words in enumerate(sentences):
        text, labels = " ".join(words), examples["labels"][row].tolist()
        [(ids, offsets)] = text_tokenizer.tokenize_with_offsets([text])
        before = [text[:start].count(" ") + text[start:].startswith(" ") for start, _ in offsets]
        expected = [number if text[start:].strip() else IGNORE for number, (start, _) in zip(before, offsets, strict=True)]
        assert labels == [*expected, IGNORE]
        assert examples["texts"][row].tolist() == [*ids, text_tokenizer.tokenizer.eos_id]
        later += len(expected) - len(set(expected))
    assert later > 50


def test_a_space_alone_has_the_next_words_label() -> None:
    """As in the paper's library. Llama 3's tokenizer separates the space before a number."""
    offsets = [(0, 2), (2, 3), (3, 6), (6, 7), (7, 8)]  # "in 1996 x": in, a space, 199, 6, and a space
    assert word_of_each_token(["in", "1996", "x"], offsets, all_tokens=True) == [0, 1, 1, 1, 2]
    assert word_of_each_token(["in", "1996", "x"], offsets) == [0, -1, 1, -1, -1]


def test_template(text_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    rows = [{"text": "it {of}", "text_pair": "the", "label": 0}, {"text": "New", "text_pair": "York", "label": 1}]
    data = write(tmp_path / "c", "classification", rows, ["a", "b"])
    config = ClassificationConfig(
        kind="classification", name="c", data=data, text="Premise: {text}\nHypothesis: {text_pair}"
    )
    examples = Classification(config, text_tokenizer, str(tmp_path / "cache")).examples("test")
    texts = [text_tokenizer.tokenizer.tokenizer.decode(examples["texts"][at].tolist()) for at in range(2)]
    assert texts == ["Premise: it {of}\nHypothesis: the", "Premise: New\nHypothesis: York"]


def test_accuracy_and_f1(text_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    """F1 of the second label, only where there are two labels; the Matthews correlation, by hand, for any number."""
    rows = [{"text": "it", "text_pair": None, "label": label} for label in (1, 1, 0, 0)]
    for names, labels, expected in (
        (["no", "yes"], [1, 0, 1, 0], {"accuracy": 0.5, "f1": 0.5, "matthews": 0.0}),
        (["no", "yes"], [0, 0, 0, 0], {"accuracy": 0.5, "f1": 0.0, "matthews": 0.0}),
        (
            ["no", "yes", "maybe"],
            [1, 1, 0, 2],
            {"accuracy": 0.75, "matthews": pytest.approx((3 * 4 - 6) / ((16 - 6) * (16 - 8)) ** 0.5)},
        ),
    ):
        data = write(tmp_path / f"{len(names)}", "classification", rows, names)
        config = ClassificationConfig(kind="classification", name="c", data=data)
        task = Classification(config, text_tokenizer, str(tmp_path / "cache"))
        columns = task.data.read("test", "classification")
        examples = task.examples("test")
        answers = task.answers(columns, examples, [(label, 0.5) for label in labels])
        assert task.metrics(task.gold(columns), answers, examples) == expected


def test_max_length_is_a_number_or_a_share_of_the_model_s() -> None:
    assert resolve_max_length(0.99, 2048) == 2028
    assert resolve_max_length(0.99, 512) == 507
    assert resolve_max_length(4096, 512) == 512
    assert resolve_max_length(64, 512) == 64


def test_epoch_orders_are_permutations_that_differ() -> None:
    orders = [epoch_order(50, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert epoch_order(50, 0, 0) == orders[0]


def test_arrays_are_made_once(tmp_path: Path) -> None:
    rows, made = Ragged.of([[1, 2], [], [3]]), []

    def make() -> dict[str, Ragged]:
        made.append(1)
        return {"rows": rows, "none": Ragged.of([])}

    for _ in range(2):
        arrays = cached(str(tmp_path), {"a": 1}, make)
        read = arrays["rows"]
        assert [read[at].tolist() for at in range(len(read))] == [[1, 2], [], [3]]
        assert read.lengths.tolist() == [2, 0, 1]
        assert len(arrays["none"]) == 0
    cached(str(tmp_path), {"a": 2}, make)
    assert len(made) == 2

    def fail() -> dict[str, Ragged]:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cached(str(tmp_path), {"a": 3}, fail)
    cached(str(tmp_path), {"a": 3}, make)
    # Partial arrays of a killed process are not used.
    folder = next(path for path in (tmp_path / "arrays").iterdir() if path.is_dir())
    partial = folder.with_name(f".unfinished-{folder.name}")
    folder.rename(partial)
    (partial / "rows.ends.npy").unlink()
    keys = {"a": 1}, {"a": 2}, {"a": 3}
    assert all(len(cached(str(tmp_path), key, make)["rows"]) == 3 for key in keys)


def test_cached_arrays_depend_on_the_tokenizer(text_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    rows = [{"text": text, "text_pair": None, "label": 0} for text in ("it of", "IT", "")]
    config = ClassificationConfig(kind="classification", name="c", data=write(tmp_path / "c", "classification", rows, ["a"]))
    vocabulary = {"<eos>": 0, "it": 7, "of": 8}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(tmp_path / "words")
    other = load_tokenizer(str(tmp_path / "words"))
    readers = [
        text_tokenizer,
        TextTokenizer(other, 512),
        TextTokenizer(other, 512, prefix=(8,)),
        TextTokenizer(other, 512, suffix=(8,)),
        TextTokenizer(replace(other, eos_id=7), 512),  # the hash doesn't see it
        TextTokenizer(other.lowercasing(), 512, SentenceSettings(lowercase=True)),
    ]
    made = [Classification(config, one, str(tmp_path / "cache")).training_examples()["texts"] for one in readers]
    texts = [[tokens[at].tolist() for at in range(3)] for tokens in made]
    assert texts[1:4] == [[[7, 8], [0], [0]], [[8, 7, 8], [8, 0], [8]], [[7, 8, 8], [0, 8], [8]]]
    assert texts[4:] == [[[7, 8], [0], [7]], [[7, 8], [7], [0]]]
    separated = replace(other, settings={**other.settings, "sep_token": "of"})
    assert TextTokenizer(separated, 512).fingerprint != TextTokenizer(other, 512).fingerprint
    assert texts[0] != texts[1]


def test_seed_decides_the_order_and_the_head(toy: Path, tmp_path: Path) -> None:
    from biphasic.model.encoder import load_encoder
    from biphasic.model.heads import TextHead, initialize_head
    from helpers.toy_sets import config_of

    def first(seed: int, epoch: int) -> list[int]:
        config = config_of("sst2", toy / "tasks", toy / "start", tmp_path, seed=seed, batch_size=16)
        task = Classification(config.task, load_encoder(str(toy / "start")).text_tokenizer, config.cache)
        batches = list(GlobalBatches(task, task.training_examples(), config, 51))  # an epoch has 50
        return batches[50 * epoch]["row_ids"].tolist()

    assert first(0, 0) == first(0, 0) == epoch_order(800, 0, 0)[:16]
    assert len({tuple(first(seed, epoch)) for seed, epoch in ((0, 0), (1, 0), (0, 1))}) == 3
    heads = [TextHead(8, 3) for _ in range(3)]
    for head, seed in zip(heads, (0, 0, 1), strict=True):
        initialize_head(head, 0.02, derive_seed("head", seed))
    assert torch.equal(heads[0].dense.weight, heads[1].dense.weight)
    assert not torch.equal(heads[0].dense.weight, heads[2].dense.weight)
    assert 0.01 < float(heads[0].dense.weight.detach().std()) < 0.04
    assert not heads[0].classifier.bias.any()


def test_dropout_depends_on_the_batch_alone(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers drawn before, or between batches, change nothing."""
    from transformers import BertConfig, BertForMaskedLM

    from biphasic.finetuning.trial import run_trial
    from helpers.toy_sets import config_of

    torch.manual_seed(0)
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
                        max_position_embeddings=64, hidden_dropout_prob=0.3)  # fmt: skip
    BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    load_tokenizer(str(toy / "tokenizer")).save(tmp_path / "bert")
    losses = []
    for seed in (0, 0, 1):
        torch.manual_seed(int(np.random.default_rng().integers(1 << 30)))
        trial = config_of("sst2", toy / "tasks", tmp_path / "bert", tmp_path, max_duration="5ba", seed=seed)
        losses.append(run_trial(trial).about["loss"])
    assert losses[0] == losses[1] != losses[2]

    count_targets = Classification.count_targets

    def draw_and_count(self: Classification, examples: Any, indices: Any) -> int:
        torch.rand(3)
        return count_targets(self, examples, indices)

    monkeypatch.setattr(Classification, "count_targets", draw_and_count)
    trial = config_of("sst2", toy / "tasks", tmp_path / "bert", tmp_path, max_duration="5ba")
    assert run_trial(trial).about["loss"] == losses[0]


def test_questions_without_an_answer_are_warned_of() -> None:
    task: Any = SimpleNamespace(threshold=None, config=SimpleNamespace(name="q"))
    with pytest.warns(UserWarning, match="q: 1 of 2 questions have no answer, but get one without task.unanswerable"):
        scores = QuestionAnswering.metrics(task, [["a"], []], {"predicted": ["a", "b"]}, {})
    assert scores["exact_match"] == 0.5
