"""The code in a fine-tuned model's card, run as it is, predicts what the trainer predicts."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    LlamaConfig,
    ModernBertConfig,
    ModernBertForMaskedLM,
    MPNetConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    XLMRobertaConfig,
)

from biphasic.commands import main
from biphasic.data.tokenizer import load_tokenizer
from biphasic.evaluation.squad import squad_scores
from biphasic.export.finetuned import export_finetuned
from biphasic.finetuning.run import run
from biphasic.finetuning.task import FinetuneTask, TrainedModel
from biphasic.finetuning.trial import train_and_score
from biphasic.model.encoder import load_encoder
from biphasic.model.heads import TokenHead
from biphasic.model.language_model import from_hf_config
from biphasic.model.pooling import mean_pool
from biphasic.model.segments import Segments
from helpers import cls_tokenizers
from helpers.cls_tokenizers import SPECIAL
from helpers.exports import export_encoder
from helpers.toy_sets import config_of

SIZES: dict[str, Any] = {"vocab_size": 300, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48,
                         "max_position_embeddings": 64, "num_hidden_layers": 2}  # fmt: skip
EXAMPLES = {
    "classification": "A man plays the guitar.",
    "tokens": "Ada Lovelace lived in London .",
    "query": "how do plants make energy",
    "document": "Plants make energy from light.",
}
"""The texts in the cards' code."""


def byte_level_tokenizer(folder: Path, special_tokens: bool) -> None:
    """Write a byte-level tokenizer that splits w12 into w1 and 2."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "w"), *((space, str(number)) for space in ("w", "Ġw") for number in range(10))]
    tokens = [*SPECIAL, *alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if special_tokens:
        cls_tokenizers.save(tokenizer, folder)
        return
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    names = {"pad_token": "[PAD]", "eos_token": "[SEP]", "mask_token": "[MASK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def word_piece_tokenizer(folder: Path) -> None:
    """Write a tokenizer as BERT's: it splits w12 into w1 and ##2, and w1's into three words of its own."""
    pieces = [*"abcdefghijklmnopqrstuvwxyz0123456789.'-?!", *(f"w{number}" for number in range(10))]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *pieces, *(f"##{piece}" for piece in pieces)])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    cls_tokenizers.save(tokenizer, folder)


def write_model(family: str, folder: Path) -> Path:
    """Write an untrained model in the hub's format."""
    torch.manual_seed(0)
    folder.mkdir()
    grouped: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": None,
                               "eos_token_id": None}  # fmt: skip
    if family == "llama":
        byte_level_tokenizer(folder, special_tokens=False)
        backbone = from_hf_config(LlamaConfig(**grouped), 0).backbone
        tokenizer = load_tokenizer(str(folder))
        shutil.rmtree(folder)
        export_encoder(backbone, tokenizer, folder, "card")
    elif family == "qwen3":
        Qwen3ForCausalLM(Qwen3Config(**grouped, head_dim=8)).save_pretrained(folder)
        byte_level_tokenizer(folder, special_tokens=False)
    elif family == "bert":
        BertForMaskedLM(BertConfig(**SIZES)).save_pretrained(folder)
        word_piece_tokenizer(folder)
    else:
        config = ModernBertConfig(**SIZES, local_attention=16, pad_token_id=0, cls_token_id=2, sep_token_id=3,
                                  bos_token_id=2, eos_token_id=3, reference_compile=False)  # fmt: skip
        ModernBertForMaskedLM(config).save_pretrained(folder)
        byte_level_tokenizer(folder, special_tokens=True)
    return folder


@dataclass
class Finetuned:
    """A fine-tuned model: its exported folder, and the trainer's own model and task."""

    folder: Path
    model: TrainedModel
    task: FinetuneTask

    @property
    def card(self) -> ModelCard:
        return ModelCard((self.folder / "README.md").read_text())

    def run_code(self, **texts: str) -> dict[str, Any]:
        """Run the card's Python code with this folder and these texts instead of its own; return its variables."""
        [code] = re.findall(r"```python\n(.*?)```", self.card.text, re.S)
        title = re.search(r"^# (.+)$", self.card.text, re.M)
        assert title is not None
        assert f'"{title[1]}"' in code
        code = code.replace(f'"{title[1]}"', repr(str(self.folder)))
        for name, text in texts.items():
            assert json.dumps(EXAMPLES[name]) in code
            code = code.replace(json.dumps(EXAMPLES[name]), repr(text))
        variables: dict[str, Any] = {}
        exec(code, variables)
        return variables

    def logits(self) -> list[np.ndarray]:
        """Return the trainer's logits for each text of the test split."""
        examples: Any = self.task.examples("test")  # pyright: ignore[reportAttributeAccessIssue]

        def forward(hidden: torch.Tensor, segments: Any, indices: list[int]) -> list[np.ndarray]:
            if self.task.family in ("classification", "regression"):
                return list(self.model.head(mean_pool(hidden, segments)).numpy())
            return np.split(self.model.head(hidden).numpy(), np.cumsum(segments.lengths)[:-1])

        return self.model.predict(examples["texts"], forward, "")


def finetune(name: str, family: str, data: Path, folder: Path, **changes: Any) -> Finetuned:
    model = write_model(family, folder / family)
    config = config_of(name, data, model, folder, save_model=True, **{"max_duration": "40ba", **changes})
    run_folder = run(config)
    _, model, task, _ = train_and_score(config)  # the same once more: trials are reproducible
    return Finetuned(run_folder / "model", model, task)


def softmax(logits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(logits).softmax(-1).numpy()


@pytest.fixture(scope="module")
def sets(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the toy sets, with pairs of texts, and with words of several pieces and punctuation."""
    folder = tmp_path_factory.mktemp("sets") / "tasks"
    shutil.copytree(toy / "tasks", folder)
    for split in ("train", "validation", "test"):
        for name, column, change in (
            ("sst2", "text_pair", lambda row: " ".join(reversed(row["text"].split()))),
            (
                "conll2003",
                "tokens",
                lambda row: [f"{word}'s" if at % 3 else word for at, word in enumerate(row["tokens"])],
            ),
        ):
            file = folder / name / f"{split}.parquet"
            table = pq.read_table(file)
            rows = [{**row, column: change(row)} for row in table.to_pylist()]
            pq.write_table(type(table).from_pylist(rows, table.schema), file)
    return folder


def predict(model: Path, lines: str, folder: Path) -> list[dict[str, Any]]:
    """Return what `biphasic predict` writes for the lines."""
    (folder / "texts.jsonl").write_text(lines)
    assert main(["predict", str(model), str(folder / "texts.jsonl"), "--out", str(folder / "out.jsonl")]) == 0
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("template", ["{text}", "P: {text}\nH: {text_pair}"])
def test_a_classifier(family: str, template: str, sets: Path, tmp_path: Path) -> None:
    # Of a pair that is too long the longer text is cut first, which no pipeline does: here all fit.
    length = 400 if "text_pair" in template else 40
    tuned = finetune("sst2", family, sets, tmp_path, task__text=template, task__max_length=length)
    assert tuned.card.data.pipeline_tag == "text-classification"
    assert tuned.card.data.library_name == "transformers"
    assert "negative, positive" in tuned.card.text
    assert f"{tuned.task.max_length} tokens" in tuned.card.text
    assert ("the longer text first" in tuned.card.text) == ("text_pair" in template)
    rows = pq.read_table(sets / "sst2" / "test.parquet").to_pylist()
    by_length = sorted(range(len(rows)), key=lambda row: len(template.format(**rows[row])))
    # The longest single text is cut.
    for row in by_length[:1] if "text_pair" in template else (by_length[0], by_length[-1]):
        variables = tuned.run_code(classification=rows[row]["text"])
        classify = variables["classify"]
        text = template.format(**rows[row])
        if "text_pair" not in template:
            assert variables["text"] == text
        else:
            # The code's own pair, as it is, gives what `biphasic predict` gives for its two texts.
            own = {"text": EXAMPLES["classification"], "text_pair": "Somebody makes music."}
            variables = tuned.run_code()
            assert variables["text"] == template.format(**own)
            [predicted] = predict(tuned.folder, json.dumps(own), tmp_path)
            [result] = variables["classify"](variables["text"], truncation=True)
            assert predicted["predicted"] == result["label"]
            assert predicted["score"] == pytest.approx(result["score"], abs=1e-5)
            with pytest.raises(IndexError):  # a tokenizer's pair has other tokens
                variables["classify"](own)
        [result] = classify(text, truncation=True)
        scores = softmax(tuned.logits()[row])
        assert result["label"] == ["negative", "positive"][scores.argmax()]
        assert result["score"] == pytest.approx(scores.max(), abs=1e-5)


def test_a_regression(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The card's pipeline and `biphasic predict` give the trainer's numbers."""
    template = "Sentence 1: {text}\nSentence 2: {text_pair}"
    tuned = finetune("stsb", "llama", sets, tmp_path, task__text=template)
    assert tuned.card.data.pipeline_tag == "text-classification"
    rows = pq.read_table(sets / "stsb" / "test.parquet").to_pylist()[:5]
    expected = [float(number[0]) for number in tuned.logits()[:5]]
    assert max(expected) > 1.5  # a sigmoid would show
    variables = tuned.run_code(classification=rows[0]["text"])
    assert variables["classify"].model.config.problem_type == "regression"
    assert variables["classify"].model.config.num_labels == 1
    results = variables["classify"]([template.format(**row) for row in rows])
    assert [result["label"] for result in results] == ["score"] * 5
    assert [result["score"] for result in results] == pytest.approx(expected, abs=1e-4)
    monkeypatch.chdir(tmp_path)
    Path("new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["predict", str(tuned.folder), "new.jsonl"]) == 0
    predicted = [json.loads(line) for line in Path("new-predictions.jsonl").read_text().splitlines()]
    assert [row["id"] for row in predicted] == [row["id"] for row in rows]
    assert [row["predicted"] for row in predicted] == pytest.approx(expected, abs=1e-4)
    for line, message in (
        ('{"text": "w1"}', "has no column 'text_pair' (it has: text)"),
        ('{"text": "w1", "text_pair": null}', "row 1 has no text_pair"),
    ):
        Path("new.jsonl").write_text(line)
        assert main(["predict", str(tuned.folder), "new.jsonl"]) == 2
        assert message in capsys.readouterr().err


def word_labels(tuned: Finetuned, row: int, words: int) -> list[str]:
    """Return the trainer's label for each word of a text."""
    examples: Any = tuned.task.examples("test")  # pyright: ignore[reportAttributeAccessIssue]
    begun = examples["words"][row]
    labels = ["O"] * words
    for word, scores in zip(begun, tuned.logits()[row], strict=True):
        if word >= 0:
            labels[word] = tuned.task.data.label_names[scores.argmax()]
    return labels


def entities(words: list[str], labels: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the type and text of each entity of BIO labels."""
    kind, inside = "O", []
    for word, label in [*zip(words, labels, strict=True), ("", "O")]:
        if label == f"I-{kind}":
            inside.append(word)
            continue
        if kind != "O":
            yield kind, " ".join(inside)
        kind, inside = label[2:] or "O", [word]


@pytest.mark.parametrize("family", ["llama", "qwen3", "bert"])
def test_a_token_classifier(family: str, sets: Path, tmp_path: Path) -> None:
    """The label of each word is its first token's, also if a word has several tokens or punctuation."""
    # Longer texts are read in windows, which no pipeline does: here all fit.
    tuned = finetune("conll2003", family, sets, tmp_path, max_duration="3ep", task__max_length=400)
    assert tuned.card.data.pipeline_tag == "token-classification"
    assert tuned.card.data.library_name == "transformers"
    rows = pq.read_table(sets / "conll2003" / "test.parquet")["tokens"].to_pylist()
    longest, seen = sorted(range(len(rows)), key=lambda row: -len(" ".join(rows[row])))[:6], set()
    for row in longest:
        words, text = rows[row], " ".join(rows[row])
        labels = word_labels(tuned, row, len(words))
        seen |= set(labels)
        variables = tuned.run_code(tokens=text)
        if "entities" in variables:
            groups = variables["entities"]
            found = [(group["entity_group"], text[group["start"] : group["end"]].strip()) for group in groups]
            expected = list(entities(words, labels))
            assert [kind for kind, _ in found] == [kind for kind, _ in expected]
            assert [text for _, text in found] == [text for _, text in expected]
        else:
            found = variables["words"]
            assert found == list(zip(words, labels, strict=True))[: len(found)]
            assert set(labels[len(found) :]) <= {"O"}
            assert len(found) > 1
    assert len(seen) > 2, seen  # else anything would be equal


@pytest.mark.parametrize("family", ["llama", "bert", "qwen3"])
def test_an_embedding_model(family: str, sets: Path, tmp_path: Path) -> None:
    prompts = {"task__query_prompt": "w0 ", "task__document_prompt": "w3: "}
    tuned = finetune("msmarco", family, sets, tmp_path, max_duration="5ba", task__max_length=24, **prompts)
    assert tuned.card.data.pipeline_tag == "sentence-similarity"
    assert tuned.card.data.library_name == "sentence-transformers"
    assert '`"w3: "`' in tuned.card.text
    text = " ".join(f"w{number}" for number in range(5, 20))
    variables = tuned.run_code(query=text, document=text)
    encoder = tuned.model.encoder
    for name, prompt in (("queries", "w0 "), ("documents", "w3: ")):
        ids = [ids for ids, _ in encoder.text_tokenizer.tokenize_and_count([prompt + text], 24)]
        expected = encoder.embed(ids)
        torch.testing.assert_close(torch.as_tensor(variables[name])[:1].cpu(), expected, atol=1e-5, rtol=1e-4)


def test_a_model_cuts_texts_as_it_was_scored(sets: Path, tmp_path: Path) -> None:
    """A share of the model's maximum, the default, is of training alone."""
    tuned = finetune("msmarco", "llama", sets, tmp_path, max_duration="2ba", task__max_length=0.5)
    most = tuned.task.text_tokenizer.max_length
    assert (tuned.task.max_length, tuned.task.scored_length) == (most // 2, most)
    assert f"after {most:,} tokens" in tuned.card.text
    assert json.loads((tuned.folder / "sentence_bert_config.json").read_text())["max_seq_length"] == most
    [cut] = {cut.max_length for name, cut in tuned.task.cut.items() if "corpus" in name or "queries" in name}
    assert cut == most


@pytest.mark.parametrize(
    ("name", "family", "tag", "line"),
    [
        ("squad", "llama", "question-answering", '{"question": "…", "context": "…"}'),
        ("squad", "bert", "question-answering", '{"question": "…", "context": "…"}'),
        ("sst2", "bert", "text-classification", '{"text": "…"}'),
        ("sst2 pairs", "bert", "text-classification", '{"text": "…", "text_pair": "…"}'),
        ("conll2003", "modernbert", "token-classification", '{"tokens": ["…", "…"]}'),
    ],
)
def test_a_model_that_transformers_can_not_run(
    name: str, family: str, tag: str, line: str, sets: Path, tmp_path: Path
) -> None:
    """No code that would drop the trained head: the card names `biphasic predict`, and a line that it takes."""
    name, *pairs = name.split()
    pair_text = {"task__text": "A: {text} B: {text_pair}"} if pairs else {}
    tuned = finetune(name, family, sets, tmp_path, max_duration="2ba", **pair_text)
    assert f"`{line}`" in tuned.card.text
    assert len(predict(tuned.folder, line, tmp_path)) == 1
    assert tuned.card.data.pipeline_tag == tag
    assert "```python" not in tuned.card.text
    assert "biphasic predict MODEL" in tuned.card.text
    assert (tuned.folder / "head.safetensors").is_file()
    if name != "squad":
        config = json.loads((tuned.folder / "config.json").read_text())
        names = tuned.task.data.label_names
        assert config["id2label"] == {str(number): label for number, label in enumerate(names)}


@pytest.mark.parametrize(
    "config_class",
    [BertConfig, DebertaV2Config, DistilBertConfig, ElectraConfig, ModernBertConfig, MPNetConfig, XLMRobertaConfig],
)
def test_heads_of_encoder_families(config_class: type[Any], tmp_path: Path) -> None:
    """Where transformers has a class with a linear head, the export loads as that class, with the trainer's logits."""
    torch.manual_seed(0)
    config = config_class(**SIZES, pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3,
                          local_attention=16)  # fmt: skip
    AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    word_piece_tokenizer(tmp_path / "model")
    encoder = load_encoder(str(tmp_path / "model"))
    encoder.backbone.eval()
    tokens = torch.tensor([2, *range(5, 25), 3])
    for auto, names, labels in (
        (AutoModelForTokenClassification, ["O", "B-X", "I-X"], 3),
        (AutoModelForQuestionAnswering, None, 2),
    ):
        head = TokenHead(encoder.width, labels)
        out = tmp_path / auto.__name__
        card = Mock(return_value="card")
        export_finetuned(encoder, head, names, out, card, prompts={}, max_length=30)
        is_class = card.call_args.kwargs["has_head_class"]
        assert is_class == (config_class is not ModernBertConfig)
        with torch.inference_mode():
            expected = head(encoder.hidden(tokens, Segments.of([len(tokens)], torch.device("cpu"))))
            if is_class:
                model, about = auto.from_pretrained(out, output_loading_info=True)
                assert not about["missing_keys"] and not about["unexpected_keys"]
                output = model.eval()(tokens[None], attention_mask=torch.ones_like(tokens)[None])
                logits = torch.stack([output.start_logits, output.end_logits], -1) if names is None else output.logits
                torch.testing.assert_close(logits[0], expected, atol=1e-5, rtol=1e-4)
            again = load_encoder(str(out))
            hidden = again.backbone.eval() and again.hidden(tokens, Segments.of([len(tokens)], torch.device("cpu")))
            torch.testing.assert_close(head(hidden), expected)
        saved = load_file(out / "head.safetensors")
        torch.testing.assert_close(saved, dict(head.state_dict()))
        assert AutoTokenizer.from_pretrained(out).model_max_length == 30


def test_the_command_of_a_question_answering_card(sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers have the score that the trainer's own have."""
    tuned = finetune("squad", "llama", sets, tmp_path, max_duration="60ba")
    [line] = re.findall(r"^biphasic predict .*$", tuned.card.text, re.M)
    table = pq.read_table(sets / "squad" / "test.parquet").to_pylist()
    questions = [json.dumps({name: row[name] for name in ("question", "context")}) for row in table]
    monkeypatch.chdir(tmp_path)
    Path("questions.jsonl").write_text("\n".join(questions) + "\n")
    assert main(line.replace("MODEL", str(tuned.folder)).split()[1:]) == 0
    answers = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    golds = [list(row["answers"]["text"]) for row in table]
    record = json.loads((tuned.folder.parent / "record.json").read_text())
    assert squad_scores(golds, [answer["predicted"] for answer in answers])["f1"] == record["results"][0]["test"]
