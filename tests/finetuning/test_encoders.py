"""Other model families, in small folders of the hub's format, through all four families of tasks."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AlbertConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BigBirdConfig,
    ConvBertConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    FNetConfig,
    LongformerConfig,
    ModernBertConfig,
    MPNetConfig,
    NomicBertConfig,
    NystromformerConfig,
    RobertaConfig,
    SqueezeBertConfig,
    XLMRobertaConfig,
)

from biphasic.commands import main
from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import UserError
from biphasic.export.finetuned import export_finetuned
from biphasic.finetuning.run import run
from biphasic.finetuning.trial import run_trial
from biphasic.model import attention
from biphasic.model.architecture import Architecture
from biphasic.model.encoder import Encoder, load_encoder
from biphasic.model.heads import TokenHead
from biphasic.model.language_model import from_hf_config, llama_config
from biphasic.model.pooling import SentenceSettings, mean_pool
from biphasic.model.probe import switch_to_packed_attention
from biphasic.model.segments import Segments
from biphasic.model.text_tokenizer import TextTokenizer, load_text_tokenizer
from conftest import Write
from helpers.families import MAKERS, bert, bert_tokenizer, ettin, qwen3
from helpers.tiny import LENGTH, train
from helpers.tiny import config_of as pretraining
from helpers.toy_sets import config_of


@pytest.fixture(params=list(MAKERS))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return MAKERS[request.param](tmp_path / request.param)


UNTRAINED_LOSS = {"sst2": math.log(2), "conll2003": math.log(5), "squad": 2 * math.log(20), "msmarco": math.log(32)}
"""Losses of a uniform prediction: two labels; five labels; start and end among 20 tokens; a batch's 32 documents."""


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("bert", name) for name in ("sst2", "conll2003", "squad", "msmarco")),
        pytest.param("modernbert", "sst2", marks=pytest.mark.slow),
        ("modernbert", "squad"),
        *(("qwen3", name) for name in ("sst2", "msmarco")),
    ],
)
def test_all_four_families_of_tasks(family: str, name: str, toy: Path, tmp_path: Path) -> None:
    model = MAKERS[family](tmp_path / family)
    steps = "3ep" if name == "sst2" else "10ba"
    trial = run_trial(config_of(name, toy / "tasks", model, tmp_path, max_duration=steps, optimizer__lr=2e-3))
    [result] = trial.results
    assert result.test is not None
    assert trial.about["loss"] < UNTRAINED_LOSS[name] - 0.1
    if name == "sst2":
        assert result.test > 0.75


def test_a_checkpoint_of_pretraining(write_yaml: Write, toy: Path, tmp_path: Path) -> None:
    """It is loaded without an export, and no special tokens are put around texts."""
    changes = {"schedule": {}, "objective": {"phases": [{"name": "mlm"}]}}
    folder = train(pretraining(write_yaml(max_duration="2ba", **changes)))
    checkpoint = folder / "checkpoints" / "ba2-rank0.pt"
    for place in (folder, folder / "checkpoints"):
        with pytest.raises(
            UserError, match=re.escape(f"{place}: holds checkpoints; expected one of them, such as {checkpoint},")
        ):
            load_encoder(str(place))
    encoder = load_encoder(str(checkpoint))
    assert (encoder.text_tokenizer.prefix, encoder.text_tokenizer.suffix, encoder.text_tokenizer.max_length) == (
        (),
        (),
        LENGTH,
    )
    [result] = run_trial(config_of("sst2", toy / "tasks", checkpoint, tmp_path, max_duration="4ep")).results
    assert result.test is not None
    assert result.test > 0.75


def test_hidden_states_equal_the_model_s(model: Path) -> None:
    """One text at a time and many at once give the same; attention is bidirectional and within a text."""
    encoder = load_encoder(str(model))
    encoder.backbone.eval()
    texts = [[2, *range(5, 5 + length), 3] for length in (1, 30, 2, 2, 55, 7, 31, 1)]
    segments = Segments.of([len(text) for text in texts], torch.device("cpu"))
    with torch.inference_mode():
        together = encoder.hidden(torch.tensor([token for text in texts for token in text]), segments)
        at = 0
        for text in texts:
            alone = encoder.hidden(torch.tensor(text), Segments.of([len(text)], torch.device("cpu")))
            torch.testing.assert_close(together[at : at + len(text)], alone, atol=2e-6, rtol=1e-4)
            changed = encoder.hidden(torch.tensor([*text[:-1], 9]), Segments.of([len(text)], torch.device("cpu")))
            assert (changed[0] - alone[0]).abs().max() > 1e-5
            at += len(text)
        if not encoder.is_own_family:
            return
        reference: Any = AutoModel.from_pretrained(model).eval()
        text = torch.tensor([texts[1]])
        torch.testing.assert_close(
            reference(input_ids=text, attention_mask=torch.ones_like(text)).last_hidden_state[0],
            encoder.hidden(text[0], Segments.of([text.shape[1]], torch.device("cpu"))), atol=1e-5, rtol=1e-4,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("config_class", "is_packed"),
    [
        (AlbertConfig, True),
        (BertConfig, True),
        (DistilBertConfig, True),
        (ElectraConfig, True),
        (ModernBertConfig, True),
        (NomicBertConfig, True),
        (XLMRobertaConfig, True),
        (DebertaV2Config, False),  # its attention goes another way
        (MPNetConfig, False),
        (SqueezeBertConfig, False),  # it calls its pooler always
    ],
)
def test_families_are_packed_and_equal_their_own_padded_batches(
    config_class: type[Any], is_packed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    config = config_class(
        vocab_size=65, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3,
        local_attention=16, embedding_size=32,
    )  # fmt: skip
    own = AutoModel.from_config(config, **({"add_pooling_layer": False} if config_class is XLMRobertaConfig else {})).eval()
    own.save_pretrained(tmp_path / "model")
    bert_tokenizer(tmp_path / "model")
    encoder = load_encoder(str(tmp_path / "model"))
    encoder.backbone.eval()
    assert encoder.is_packed == is_packed and "padding" not in caplog.text
    texts = [[2, *range(5, 5 + length), 3] for length in (1, 30, 2, 58, 7)]
    longest = max(map(len, texts))
    padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    with torch.inference_mode():
        expected = own(input_ids=padded, attention_mask=mask).last_hidden_state[mask.bool()]
        segments = Segments.of([len(text) for text in texts], torch.device("cpu"))
        hidden = encoder.hidden(padded[mask.bool()], segments)
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)
    # A tokenizer without a limit: as many tokens as there are positions for.
    path = tmp_path / "model" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": int(1e30)}))
    length = load_text_tokenizer(str(tmp_path / "model")).max_length
    assert length == 64 - {XLMRobertaConfig: 1, MPNetConfig: 2}.get(config_class, 0)
    encoder.hidden(torch.full((length,), 5), Segments.of([length], torch.device("cpu")))


@pytest.mark.parametrize("config_class", [ConvBertConfig, FNetConfig, NystromformerConfig])
def test_a_family_whose_hidden_states_depend_on_padding_is_named(
    config_class: type[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    config = config_class(
        vocab_size=65, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, embedding_size=16,
        max_position_embeddings=64, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    bert_tokenizer(tmp_path / "model")
    encoder = load_encoder(str(tmp_path / "model"))
    assert not encoder.is_packed
    assert "a text's hidden states depend on padding, and so on the other texts of its batch" in caplog.text
    text, cpu = torch.tensor([2, 7, 8, 3]), torch.device("cpu")
    encoder.backbone.eval()
    alone = encoder.hidden(text, Segments.of([4], cpu))
    together = encoder.hidden(torch.cat([text, torch.arange(5, 35)]), Segments.of([4, 30], cpu))[:4]
    assert (alone - together).abs().max() > 1e-3 * alone.abs().max()


def test_bigbird_s_attention_is_full_and_its_export_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With block_sparse attention, transformers computes long texts otherwise after it has seen a short one."""
    torch.manual_seed(0)
    config = BigBirdConfig(
        vocab_size=65, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, block_size=4,
        num_random_blocks=1, max_position_embeddings=64, pad_token_id=0, initializer_range=0.5,
    )  # fmt: skip
    sparse = AutoModel.from_config(config).eval()
    sparse.save_pretrained(tmp_path / "model")
    bert_tokenizer(tmp_path / "model")
    encoder = load_encoder(str(tmp_path / "model"))
    assert "block_sparse attention is computed as full attention" in caplog.text
    encoder.backbone.eval()
    export_finetuned(encoder, torch.nn.Identity(), None, tmp_path / "out", lambda **_: "", prompts={}, max_length=62)
    exported = AutoModel.from_pretrained(tmp_path / "out").eval()
    text = torch.arange(2, 62)
    with torch.inference_mode():
        hidden = encoder.hidden(text, Segments.of([60], torch.device("cpu")))
        torch.testing.assert_close(exported(text[None]).last_hidden_state[0], hidden, atol=1e-5, rtol=1e-5)
        assert (sparse(text[None]).last_hidden_state[0] - hidden).abs().max() > 0.01


@pytest.mark.parametrize("config_class", [RobertaConfig, XLMRobertaConfig, MPNetConfig])
def test_padding_tokens_within_texts_have_the_positions_of_their_family(config_class: type[Any], tmp_path: Path) -> None:
    """RoBERTa's family doesn't count them. Where EOS is the padding, each text ends with one."""
    torch.manual_seed(0)
    config = config_class(
        vocab_size=65, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, pad_token_id=3, initializer_range=0.2,
    )  # fmt: skip
    own = AutoModel.from_config(config).eval()
    own.save_pretrained(tmp_path / "model")
    bert_tokenizer(tmp_path / "model")
    encoder = load_encoder(str(tmp_path / "model"))
    assert encoder.is_packed == (config_class is not MPNetConfig)
    encoder.backbone.eval()
    texts = [[2, 7, 8, 9, 3], [2, 5, 3, 6, 3], [3, 3, 4], [2, 7, 3]]
    segments = Segments.of([len(text) for text in texts], torch.device("cpu"))
    with torch.inference_mode():
        hidden = encoder.hidden(torch.tensor([token for text in texts for token in text]), segments)
        expected = [own(torch.tensor([text])).last_hidden_state[0] for text in texts]
    torch.testing.assert_close(hidden, torch.cat(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("config_class", "labels", "name"),
    [
        (LongformerConfig, None, "LongformerModel"),  # its class for questions would give some tokens global attention
        (LongformerConfig, ["O", "B-PER"], "LongformerForTokenClassification"),
        (BertConfig, None, "BertForQuestionAnswering"),  # packed here
    ],
)
def test_a_class_with_a_head_is_written_only_if_it_computes_the_head(
    config_class: type[Any], labels: list[str] | None, name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = config_class(
        vocab_size=65, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, pad_token_id=0,
        max_position_embeddings=64, attention_window=[8, 8], sep_token_id=3, initializer_range=0.2,
    )  # fmt: skip
    AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    bert_tokenizer(tmp_path / "model")
    encoder, cards = load_encoder(str(tmp_path / "model")), []
    card, out, head = lambda **known: cards.append(known["has_head_class"]) or "", tmp_path / "out", TokenHead(32, 2)
    export_finetuned(encoder, head, labels, out, card, prompts={}, max_length=62)
    assert json.loads((out / "config.json").read_text())["architectures"] == [name]
    assert cards == [name != "LongformerModel"]


def test_attention_of_another_meaning_is_not_replaced() -> None:
    """A sliding window that is off by one shows in the comparison, and the model keeps its own attention."""
    attention.register()
    config = ModernBertConfig(
        vocab_size=65, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, local_attention=16,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = AutoModel.from_config(config).eval()
    assert switch_to_packed_attention(model)
    model.set_attn_implementation("sdpa")
    model.layers[1].attn.sliding_window -= 1
    assert not switch_to_packed_attention(model)
    assert model.config._attn_implementation == "sdpa"


def test_special_tokens_of_a_model_are_used(tmp_path: Path) -> None:
    text_tokenizer = load_encoder(str(bert(tmp_path / "bert"))).text_tokenizer
    assert (text_tokenizer.prefix, text_tokenizer.suffix) == ((2,), (3,))
    assert text_tokenizer.max_length == 62  # the tokenizer's, below the 64 positions
    assert [ids for ids, _ in text_tokenizer.tokenize_and_count(["w0 w1", ""], 62)] == [[2, 5, 6, 3], [2, 3]]
    assert [ids for ids, _ in text_tokenizer.tokenize_and_count(["w0 w1 w2 w3"], 4)] == [[2, 5, 6, 3]]
    assert text_tokenizer.tokenizer.separator_id == 3


def test_a_window_without_room_for_a_context_is_refused(tmp_path: Path, toy: Path) -> None:
    model = bert(tmp_path / "bert")
    with pytest.raises(UserError, match="leave no room for the context after the question"):
        run_trial(config_of("squad", toy / "tasks", model, tmp_path, task__max_length=2))


def test_a_fine_tuned_model_loads_again(tmp_path: Path, toy: Path) -> None:
    from sentence_transformers import SentenceTransformer

    config = config_of("msmarco", toy / "tasks", bert(tmp_path / "bert"), tmp_path, max_duration="5ba", save_model=True)
    folder = run(config) / "model"
    encoder = load_encoder(str(folder))
    encoder.backbone.eval()
    prompts = encoder.text_tokenizer.settings.prompts
    assert prompts == {"query": "w0 ", "document": ""}
    ids = encoder.tokenize([prompts["query"] + "w3 w4"])
    reference = SentenceTransformer(str(folder), device="cpu").encode(["w3 w4"], prompt_name="query")
    torch.testing.assert_close(encoder.embed(ids), torch.tensor(reference), atol=1e-5, rtol=1e-4)


def test_every_weight_has_a_gradient(model: Path) -> None:
    """A weight without one (the pooler of some families) breaks training on several ranks."""
    encoder = load_encoder(str(model))
    segments = Segments.of([4, 3], torch.device("cpu"))
    encoder.hidden(torch.tensor([2, 5, 6, 3, 2, 7, 3]), segments).pow(2).sum().backward()
    assert all(weight.grad is not None for weight in encoder.backbone.parameters())


def test_an_exported_model_tokenizes_as_in_training(toy: Path, tmp_path: Path) -> None:
    """Special tokens are in the exported tokenizer exactly if they were used in training; texts are lowercased as there."""
    bert_tokenizer(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    torch.manual_seed(0)
    size = Architecture(65, 32, 48, 1, 4, 4, 8, False)
    backbone = from_hf_config(llama_config(size, 64), seed=0).backbone
    for around in (((), ()), ((2,), (3,))):
        lowercase = bool(around[0])
        text_tokenizer = TextTokenizer(tokenizer, 64, SentenceSettings(lowercase=lowercase), *around)
        out = tmp_path / f"out{len(around[0])}"
        export_finetuned(
            Encoder(backbone, text_tokenizer),
            torch.nn.Identity(),
            None,
            out,
            lambda **_: "card",
            prompts={},
            max_length=64,
        )
        assert AutoTokenizer.from_pretrained(out)("w0")["input_ids"] == [*around[0], 5, *around[1]]
        again = load_encoder(str(out)).text_tokenizer
        assert (again.prefix, again.suffix, again.settings.lowercase) == (*around, lowercase)


def test_another_decoder_family_is_written_with_its_code(tmp_path: Path, toy: Path) -> None:
    """The fine-tuned model loads here without the code, and in transformers only with it."""
    model = qwen3(tmp_path / "qwen3")
    config = config_of("sst2", toy / "tasks", model, tmp_path, save_model=True, max_duration="3ep", optimizer__lr=2e-3)
    folder = run(config) / "model"
    assert "trust_remote_code=True" in (folder / "README.md").read_text()
    encoder = load_encoder(str(folder))
    assert encoder.is_packed
    encoder.backbone.eval()
    text = torch.tensor(encoder.tokenize(["w1 w3 w4 w5"]))
    reference = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.inference_mode():
        hidden = encoder.hidden(text[0], Segments.of([text.shape[1]], torch.device("cpu")))
        torch.testing.assert_close(reference.model(text).last_hidden_state[0], hidden, atol=1e-4, rtol=1e-4)
    assert reference.config.id2label[1] == "positive"
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        AutoModel.from_pretrained(folder, trust_remote_code=False)


@pytest.mark.parametrize("name", ["sst2", "msmarco"])
def test_modernbert_s_decoder_is_written_as_modernbert(name: str, tmp_path: Path, toy: Path) -> None:
    """transformers has no class with the heads; Biphasic reads them from the folder."""
    model = ettin(tmp_path / "ettin")
    config = config_of(name, toy / "tasks", model, tmp_path, save_model=True, max_duration="20ba", optimizer__lr=2e-3)
    folder = run(config) / "model"
    assert ("biphasic predict" in (folder / "README.md").read_text()) == (name == "sst2")
    encoder = load_encoder(str(folder))
    assert encoder.is_packed and encoder.is_own_family
    assert (encoder.text_tokenizer.prefix, encoder.text_tokenizer.suffix) == ((2,), (3,))
    encoder.backbone.eval()
    reference = AutoModel.from_pretrained(folder).eval()
    assert type(reference).__name__ == "ModernBertModel"
    text = torch.tensor(encoder.tokenize([" ".join(f"w{i}" for i in range(40))]))
    with torch.inference_mode():
        hidden = encoder.hidden(text[0], Segments.of([text.shape[1]], torch.device("cpu")))
        torch.testing.assert_close(reference(text).last_hidden_state[0], hidden, atol=1e-5, rtol=1e-5)
    if name == "sst2":
        assert reference.config.id2label[1] == "positive"
        lines, answers = tmp_path / "texts.jsonl", tmp_path / "predictions.jsonl"
        lines.write_text('{"text": "w1 w3 w4 w5"}\n')
        assert main(["predict", str(folder), str(lines), "--out", str(answers)]) == 0
        assert json.loads(answers.read_text())["predicted"] in ("positive", "negative")


def test_mean_pooling_includes_special_tokens(tmp_path: Path) -> None:
    """As in sentence-transformers."""
    encoder = load_encoder(str(bert(tmp_path / "bert")))
    encoder.backbone.eval()
    [ids] = encoder.tokenize(["w1 w2 w3"])
    segments = Segments.of([len(ids)], torch.device("cpu"))
    with torch.inference_mode():
        hidden = encoder.hidden(torch.tensor(ids), segments)
    torch.testing.assert_close(mean_pool(hidden, segments)[0], hidden.mean(0))
