"""Pooling and sentence-transformers' settings, against sentence-transformers itself."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from sentence_transformers.sentence_transformer.modules import Dense, Dropout, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling as ReferencePooling
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, LlamaConfig

from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import UserError
from biphasic.evaluation.embedder import EncoderEmbedder
from biphasic.evaluation.retriever import Retriever
from biphasic.evaluation.scoring import score
from biphasic.evaluation.sets import retrieval_task
from biphasic.model.architecture import PoolingMode
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


def rewrite(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text().replace(old, new, 1))


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
    assert load_encoder(str(bert)).pooling == Pooling("mean")


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


@pytest.mark.parametrize("width", [1, 8, 32, 50])
def test_embeddings_are_truncated(bert: Path, tmp_path: Path, width: int) -> None:
    """To `truncate_dim` values, after the normalization, which isn't repeated; unless a dimension is asked for."""
    modules = [ReferencePooling(32, "mean"), Dropout(0.5), Normalize()]
    folder = written(bert, tmp_path / "model", *modules, truncate_dim=width)
    encoder = load_encoder(str(folder))
    embedder = EncoderEmbedder(encoder, "a/b", "")
    assert (embedder.width, embedder.settings.get("dimension")) == (min(width, 32), width if width < 32 else None)
    assert close(embedder.embed(TEXTS, lambda _: None), reference(folder))
    chosen = EncoderEmbedder(encoder, "a/b", "", dimension=5)
    assert close(chosen.embed(TEXTS, lambda _: None), reference(folder, truncate_dim=5))


def test_a_truncated_model_s_scores_and_embeddings(bert: Path, tmp_path: Path) -> None:
    """NDCG@10 equals that of sentence-transformers and mteb, and the embeddings are as long as theirs."""
    folder = written(bert, tmp_path / "model", ReferencePooling(32, "mean"), truncate_dim=3)
    documents = {f"d{at}": f"w{at} w{at + 1} w{at % 7 + 20}" for at in range(1, 50)}
    queries = {f"q{at}": f"w{at + 1} w{at}" for at in range(1, 50)}
    qrels = {f"q{at}": {f"d{at}": 1} for at in range(1, 50)}

    def ndcg(system: Any) -> float:
        return score(system, retrieval_task("Set", documents, queries, {"test": qrels}))[0][0].value

    expected = ndcg(SentenceTransformer(str(folder), device="cpu"))
    assert ndcg(Retriever(EncoderEmbedder(load_encoder(str(folder)), "a/b", "1"))) == pytest.approx(expected, abs=1e-4)
    change(folder / ABOUT, truncate_dim=None)
    assert ndcg(Retriever(EncoderEmbedder(load_encoder(str(folder)), "a/b", "2"))) != pytest.approx(expected, abs=1e-3)
    change(folder / ABOUT, truncate_dim=3)
    embedder = EncoderEmbedder(load_encoder(str(folder)), "a/b", "3")
    assert close(embedder.embed(TEXTS, lambda done: None), reference(folder))


def test_a_router_is_refused_by_name(bert: Path, tmp_path: Path) -> None:
    """Also one of whose routes Biphasic could load."""
    route = [Transformer(str(bert)), ReferencePooling(32, "mean")]
    router: Any = Router({"query": route, "document": route})
    SentenceTransformer(modules=[router], device="cpu").save_pretrained(str(tmp_path))
    with pytest.raises(UserError, match=r"has Router.*give the folder of one route's Transformer"):
        load_encoder(str(tmp_path))
    assert load_encoder(str(tmp_path / "query_0_Transformer")).width == 32


def test_settings_by_the_name_of_an_old_version(averaged: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(averaged, tmp_path / "model")
    (folder / "sentence_bert_config.json").unlink()
    change(folder / "sentence_xlm-roberta_config.json", max_seq_length=5, do_lower_case=True)
    assert read_sentence_settings(str(folder)).max_length == 5
    assert close(embeddings(folder), reference(folder))


POOLING, ABOUT, TRANSFORMER = (
    "1_Pooling/config.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
)
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
            json.dumps({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True, "pooling_mode_lasttoken": False})
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
        lambda folder: rewrite(folder / "modules.json", '"path": ""', '"path": "0_Transformer"'),
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
# fmt: off
REFUSED |= {
    "a class of its own": (
        lambda folder: rewrite(folder / "modules.json", "sentence_transformers.base", "custom_st"),
        r"modules\.json has custom_st\.modules\.transformer\.Transformer, Pooling; supported"),
    "no value": (lambda folder: change(folder / ABOUT, truncate_dim=0), r"has truncate_dim 0; expected a number from 1"),
    "another task": (
        lambda folder: change(folder / TRANSFORMER, transformer_task="fill-mask"),
        r'sentence_bert_config\.json sets transformer_task to "fill-mask", which .* expected "feature-extraction"'),
    "another output": (
        lambda folder: change(folder / TRANSFORMER, modality_config={"text": {"method": "get_text_features"}}),
        r"sets modality_config to .*get_text_features"),
    "a length for queries": (
        lambda folder: change(folder / TRANSFORMER, query_length=4),
        r"sets query_length to 4, which isn't supported; expected null"),
    "arguments of the tokenizer": (
        lambda folder: change(folder / TRANSFORMER, tokenizer_args={"padding_side": "left"}),
        r'sets tokenizer_args to {"padding_side": "left"}'),
}
# fmt: on


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


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Dense(32, 8), r"its modules\.json has Transformer, Pooling, Dense; supported are"),
        (Normalize("token_embeddings"), r"2_Normalize/config\.json isn't supported; expected sentence_embedding"),
    ],
)
def test_a_layer_on_top_is_refused(bert: Path, tmp_path: Path, module: Any, message: str) -> None:
    folder = written(bert, tmp_path / "model", ReferencePooling(32, "mean"), module)
    with pytest.raises(UserError, match=message):
        read_sentence_settings(str(folder))


def test_arguments_that_change_no_embedding(averaged: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(averaged, tmp_path / "model")
    change(folder / TRANSFORMER, model_args={"add_pooling_layer": False}, processing_kwargs={})
    assert close(embeddings(folder), reference(folder))


def test_prompts_left_out_of_the_pooling_without_any(bert: Path, tmp_path: Path) -> None:
    """There is nothing to leave out."""
    folder = written(bert, tmp_path / "model", ReferencePooling(32, "mean", include_prompt=False), prompts={"query": ""})
    assert read_sentence_settings(str(folder)).pooling == Pooling("mean")
    shutil.rmtree(folder / "1_Pooling")
    with pytest.raises(UserError, match="which is missing"):
        read_sentence_settings(str(folder))
