"""Pooling and sentence-transformers' settings, against sentence-transformers itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling as ReferencePooling
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, LlamaConfig

from biphasic.config.evaluate import PoolingMode
from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import UserError
from biphasic.model.encoder import load_encoder
from biphasic.model.language_model import from_hf_config
from biphasic.model.pooling import Pooling, SentenceSettings, read_sentence_settings
from biphasic.model.segments import Segments
from helpers import cls_tokenizers
from helpers.cls_tokenizers import SPECIAL
from helpers.exports import export_encoder
from helpers.tiny import WORDS, write_tokenizer

MODES: tuple[PoolingMode, ...] = get_args(PoolingMode)
pytestmark = pytest.mark.usefixtures("hub_is_offline")

LONGEST = 40
TEXTS = [
    "w1 w2 w3",
    "w9",
    "",
    "W1 w2 W3",
    " ".join(f"w{at}" for at in range(1, 59)),
    "w5 w5 unknown w7 w8 w9 w10",
    "w2 w1 w3",
]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny encoder of BERT's family, whose words are in lower case but for W3."""
    folder = tmp_path_factory.mktemp("bert")
    words = [*SPECIAL, "query:", "document:", "about:", *(f"w{at}" for at in range(1, 59)), "W3"]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    cls_tokenizers.save(tokenizer, folder, LONGEST)
    torch.manual_seed(0)
    config = BertConfig(vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=48, max_position_embeddings=64, initializer_range=0.5)  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return folder


def written(bert: Path, folder: Path, *after: Any, **settings: Any) -> Path:
    """As sentence-transformers writes it: the encoder, and what comes after it."""
    model = SentenceTransformer(modules=[Transformer(str(bert)), *after], device="cpu", **settings)
    model.save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def averaged(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With mean pooling; to be copied."""
    return written(bert, tmp_path_factory.mktemp("averaged") / "model", ReferencePooling(32, "mean"))


def change(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **changes}))


def embeddings(folder: Path, texts: Sequence[str] = TEXTS, prompt: str = "") -> np.ndarray:
    encoder = load_encoder(str(folder))
    encoder.backbone.eval()
    return encoder.embed(encoder.tokenize([prompt + text for text in texts])).numpy()


def reference(folder: Path, **settings: Any) -> np.ndarray:
    model = SentenceTransformer(str(folder), device="cpu")
    return np.asarray(model.encode(TEXTS, batch_size=4, convert_to_numpy=True, **settings))


def close(result: np.ndarray, expected: np.ndarray) -> bool:
    return result.shape == expected.shape and float(np.abs(result - expected).max()) < 1e-5


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_each_mode_equals_sentence_transformers(mode: PoolingMode, normalize: bool) -> None:
    """On packed texts, against a padded batch with random values at padding."""
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 1, 9, 2, 1, 9]
    hidden = torch.randn(sum(lengths), 16, generator=generator) - 1  # maxima below 0, too
    padded = 100 * torch.randn(len(lengths), max(lengths), 16, generator=generator)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    padded[mask] = hidden
    features: dict[str, Any] = {"token_embeddings": padded, "attention_mask": mask.long()}
    expected = ReferencePooling(16, mode)(features)
    expected = (Normalize()(expected) if normalize else expected)["sentence_embedding"]
    segments = Segments.of(lengths, torch.device("cpu"))
    pooled = Pooling(mode, normalize)(hidden, segments)
    torch.testing.assert_close(pooled, expected, atol=1e-6, rtol=1e-6)
    assert (pooled.norm(dim=1) - 1).abs().max() < 1e-5 or not normalize
    half = Pooling(mode, normalize)(hidden.bfloat16(), segments)
    assert half.dtype == torch.float32
    exact = Pooling(mode, normalize)(hidden.bfloat16().float(), segments)
    torch.testing.assert_close(half, exact, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_folders_of_sentence_transformers(bert: Path, tmp_path: Path, mode: PoolingMode, normalize: bool) -> None:
    folder = written(bert, tmp_path / "model", ReferencePooling(32, mode), *([Normalize()] if normalize else []))
    settings = read_sentence_settings(str(folder))
    assert settings.pooling == Pooling(mode, normalize)
    assert (settings.default_prompt, settings.lowercase, settings.similarity) == (None, False, "cosine")
    assert not any(settings.prompts.values())
    assert close(embeddings(folder), reference(folder))


@pytest.mark.parametrize("mode", MODES)
def test_folders_from_before_version_6(averaged: Path, tmp_path: Path, mode: PoolingMode) -> None:
    """With a flag for each mode, and the old names of modules."""
    folder = shutil.copytree(averaged, tmp_path / "model")
    names = {"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "lasttoken": "lasttoken"}
    content = {f"pooling_mode_{name}": one == mode for one, name in names.items()}
    content |= {"pooling_mode_weightedmean_tokens": False, "word_embedding_dimension": 32}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(content))
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    (folder / "2_Normalize").mkdir()
    (folder / "modules.json").write_text(
        json.dumps([{"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
                    for at, (path, kind) in enumerate(kinds)])
    )  # fmt: skip
    assert read_sentence_settings(str(folder)).pooling == Pooling(mode, True)
    assert close(embeddings(folder), reference(folder))


def test_an_export_s_settings(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=None,
    )  # fmt: skip
    prompts = {"query": "w1 w2 ", "document": "w3 "}
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    out = tmp_path / "out"
    export_encoder(from_hf_config(config, 0).backbone, tokenizer, out, "card", prompts=prompts, max_length=12)
    settings = read_sentence_settings(str(out))
    assert settings == SentenceSettings(prompts=prompts, max_length=12, pooling=Pooling("mean"))
    assert load_encoder(str(out)).pooling == Pooling("mean")


def test_a_folder_without_settings_has_the_defaults(bert: Path) -> None:
    assert read_sentence_settings(str(bert)) == SentenceSettings()
    encoder = load_encoder(str(bert))
    assert encoder.pooling == Pooling("mean")
    encoder.pooling = Pooling("cls")


def test_lower_case(averaged: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(averaged, tmp_path / "model")
    as_written = embeddings(folder)
    change(folder / "sentence_bert_config.json", do_lower_case=True)
    assert read_sentence_settings(str(folder)).lowercase
    lowered = embeddings(folder)
    assert close(lowered, reference(folder))
    assert close(lowered[[3]], as_written[[0]]) and not close(as_written[[3]], as_written[[0]])
    assert close(embeddings(folder, prompt="QUERY: "), reference(folder, prompt="QUERY: "))


@pytest.mark.parametrize("mode", ["mean", "lasttoken"])
def test_texts_are_cut_at_the_maximum_length(bert: Path, tmp_path: Path, mode: PoolingMode) -> None:
    """The prompt counts, and special tokens are kept."""
    folder = written(bert, tmp_path / "model", ReferencePooling(32, mode))
    whole = embeddings(folder)
    assert close(whole, reference(folder))
    change(folder / "sentence_bert_config.json", max_seq_length=6)
    assert read_sentence_settings(str(folder)).max_length == 6 == load_encoder(str(folder)).text_tokenizer.max_length
    for prompt in ("", "query: ", "about: about: about: about: about: "):
        assert close(embeddings(folder, prompt=prompt), reference(folder, prompt=prompt))
    cut = embeddings(folder)
    differ = [at for at in range(len(TEXTS)) if not close(cut[[at]], whole[[at]])]
    assert differ == [4, 5]


def test_prompts(bert: Path, tmp_path: Path) -> None:
    prompts = {"query": "query: ", "document": "document: ", "any": "about: "}
    folder = written(bert, tmp_path / "model", ReferencePooling(32, "cls"), prompts=prompts, default_prompt_name="any")
    settings = read_sentence_settings(str(folder))
    assert (settings.prompts, settings.default_prompt) == (prompts, "any")
    encoder = load_encoder(str(folder))
    for name in prompts:
        assert close(
            embeddings(folder, prompt=encoder.text_tokenizer.settings.prompts[name]),
            reference(folder, prompt_name=name),
        )
    assert close(embeddings(folder, prompt="about: "), reference(folder))  # the default one
    assert not close(embeddings(folder), reference(folder))


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_similarity(bert: Path, tmp_path: Path, similarity: str) -> None:
    folder = written(bert, tmp_path / "model", ReferencePooling(32, "mean"), similarity_fn_name=similarity)
    assert read_sentence_settings(str(folder)).similarity == similarity


POOLING, ABOUT = "1_Pooling/config.json", "config_sentence_transformers.json"
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no pooling file": (
        lambda folder: (folder / POOLING).unlink(),
        r"names 1_Pooling/config\.json, which is missing: copy the complete folder",
    ),
    "two modes": (
        lambda folder: change(folder / POOLING, pooling_mode=["cls", "mean"]),
        r"pools by cls and mean; expected one of mean,",
    ),
    "two modes by their old names": (
        lambda folder: (folder / POOLING).write_text(
            json.dumps(
                {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True, "pooling_mode_lasttoken": False}
            )
        ),
        r"1_Pooling/config\.json pools by cls and max; expected",
    ),
    "unknown mode": (
        lambda folder: change(folder / POOLING, pooling_mode="weightedmean"),
        r"pools by weightedmean; expected one of mean",
    ),
    "no mode": (lambda folder: (folder / POOLING).write_text("{}"), r"pools by nothing; expected one of mean"),
    "prompts that aren't pooled": (
        lambda folder: (
            change(folder / POOLING, include_prompt=False),
            change(folder / ABOUT, prompts={"query": "q: "}),
        ),
        r"1_Pooling/config\.json leaves prompts out of the pooling",
    ),
    "another similarity": (
        lambda folder: change(folder / ABOUT, similarity_fn_name="euclidean"),
        r"compares embeddings by euclidean; only",
    ),
    "default prompt that isn't there": (
        lambda folder: change(folder / ABOUT, default_prompt_name="web"),
        r"names 'web' as its default prompt, but has none",
    ),
    "encoder in another folder": (
        lambda folder: (folder / "modules.json").write_text(
            (folder / "modules.json").read_text().replace('"path": ""', '"path": "0_Transformer"')
        ),
        r"modules\.json has Transformer, Pooling; supported are a Transformer in the folder itself",
    ),
    "damaged modules": (lambda folder: (folder / "modules.json").write_text("[{"), r"modules\.json can't be read \("),
    "damaged pooling": (lambda folder: (folder / POOLING).write_text(""), r"1_Pooling/config\.json can't be read \("),
    "damaged settings": (
        lambda folder: (folder / ABOUT).write_bytes(b"\xff{}"),
        r"_transformers\.json can't be read \(",
    ),
    "a list for settings": (lambda folder: (folder / ABOUT).write_text("[1]"), r"_transformers\.json can't be read \("),
    "an object for modules": (
        lambda folder: (folder / "modules.json").write_text("{}"),
        r"modules\.json can't be read \(",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_and_damaged_settings_are_refused(averaged: Path, tmp_path: Path, case: str) -> None:
    """In one line, also by `load_encoder`."""
    damage, message = REFUSED[case]
    folder = shutil.copytree(averaged, tmp_path / "model")
    read_sentence_settings(str(folder))
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        read_sentence_settings(str(folder))
    assert str(caught.value).startswith(f"model {folder}: ") and "\n" not in str(caught.value)
    with pytest.raises(UserError, match=message):
        load_encoder(str(folder))


def test_a_layer_on_top_is_refused(bert: Path, tmp_path: Path) -> None:
    folder = written(bert, tmp_path / "model", ReferencePooling(32, "mean"), Dense(32, 8))
    with pytest.raises(UserError, match=r"its modules\.json has Transformer, Pooling, Dense; supported are"):
        read_sentence_settings(str(folder))


def test_prompts_left_out_of_the_pooling_without_any(bert: Path, tmp_path: Path) -> None:
    """There is nothing to leave out."""
    folder = written(
        bert, tmp_path / "model", ReferencePooling(32, "mean", include_prompt=False), prompts={"query": ""}
    )
    assert read_sentence_settings(str(folder)).pooling == Pooling("mean")
    shutil.rmtree(folder / "1_Pooling")
    with pytest.raises(UserError, match="which is missing"):
        read_sentence_settings(str(folder))
