"""An export has the files that text-embeddings-inference (TEI) reads.

Read in November 2026, in TEI's own source of July 2026 (version 1.9.3): which files its router opens and how it parses them
(`router/src/lib.rs`), which it fetches (`core/src/download.rs`, `backends/src/lib.rs`), and what its ONNX backend reads and
feeds (`backends/ort/src/lib.rs`). In short:

- `config.json`: `architectures` (a name that ends in Classification makes it a classifier, which needs `id2label` and
  `label2id`), `model_type`, `max_position_embeddings`; token ids that are single numbers; `auto_map`, if any, of words.
- `tokenizer.json`, with the special tokens that are put around a text.
- `1_Pooling/config.json` in its older form: flags, `pooling_mode_cls_token` and `pooling_mode_mean_tokens` among them.
- `sentence_bert_config.json`: `max_seq_length`, a number, if the file is there.
- `config_sentence_transformers.json`: `prompts` of words only, if any.
- `modules.json`: modules whose names begin with `sentence_transformers.models.`; a Dense one would have to have a folder.
- `model.safetensors`, or the index of its parts.
- For ONNX `onnx/model.onnx`, with weights beside it in a file whose name begins the same; inputs by name, padding on the
  side that `tokenizer_config.json` says, right by default; `sentence_embedding` is taken as it is.

TEI itself doesn't run here.
"""

import json
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from tokenizers import Tokenizer as Tokens
from transformers import LlamaConfig

from biphasic.data.tokenizer import Tokenizer, load_tokenizer
from biphasic.export.finetuned import export_finetuned
from biphasic.export.onnx import export_onnx
from biphasic.model.encoder import load_encoder
from biphasic.model.heads import TextHead
from biphasic.model.language_model import from_hf_config
from helpers.exports import export_language_model
from helpers.tiny import LENGTH, WORDS


@pytest.fixture(scope="module")
def tokenizer(dataset: Path) -> Tokenizer:
    return load_tokenizer(str(dataset / "tokenizer"))


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of a pretrained model."""
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=LENGTH, pad_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    out = tmp_path_factory.mktemp("tei") / "out"
    export_language_model(from_hf_config(config, seed=1), tokenizer, out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("biphasic.export.onnx.SINGLE_FILE_BYTES", 0)
        export_onnx(out)
    return out


@pytest.fixture(scope="module")
def classifier(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of a fine-tuned model, with a head and prompts."""
    out = tmp_path_factory.mktemp("classifier") / "out"
    prompts = {"query": "query: ", "document": ""}
    names = ["no", "yes"]
    export_finetuned(
        load_encoder(str(folder)), TextHead(32, 2), names, out, lambda **_: "card", prompts=prompts, max_length=20
    )
    return out


def read(file: Path) -> Any:
    return json.loads(file.read_text())


def test_config(folder: Path, classifier: Path) -> None:
    for out in (folder, classifier):
        config = read(out / "config.json")
        assert config["model_type"] == "eurobert"
        assert config["max_position_embeddings"] == LENGTH
        for name in ("pad_token_id", "eos_token_id", "hidden_size", "num_hidden_layers", "num_key_value_heads"):
            assert type(config[name]) is int and config[name] >= 0, name
        assert all(isinstance(value, str) for value in config.get("auto_map", {}).values())
    assert not [name for name in read(folder / "config.json")["architectures"] if name.endswith("Classification")]
    config = read(classifier / "config.json")
    assert config["architectures"] == ["EuroBertForSequenceClassification"]
    assert (config["id2label"], config["label2id"]) == ({"0": "no", "1": "yes"}, {"no": 0, "yes": 1})


def test_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    loaded = Tokens.from_file(str(folder / "tokenizer.json"))
    assert loaded.encode("w5 w6 w7", add_special_tokens=True).ids == tokenizer.encode(["w5 w6 w7"])[0]
    assert read(folder / "tokenizer_config.json").get("padding_side", "right") in ("left", "right")


def test_pooling_length_and_prompts(folder: Path, classifier: Path) -> None:
    for out, longest, prompts in ((folder, LENGTH, {}), (classifier, 20, {"query": "query: ", "document": ""})):
        pooling = read(out / "1_Pooling" / "config.json")
        assert (pooling["pooling_mode_cls_token"], pooling["pooling_mode_mean_tokens"]) == (False, True)
        assert type(pooling.get("pooling_mode_lasttoken", False)) is bool
        assert read(out / "sentence_bert_config.json")["max_seq_length"] == longest
        assert read(out / "config_sentence_transformers.json")["prompts"] == prompts


def test_modules_and_weights(folder: Path, classifier: Path) -> None:
    kinds = [f"sentence_transformers.models.{kind}" for kind in ("Transformer", "Pooling")]
    for out in (folder, classifier):
        modules = read(out / "modules.json")
        assert [module["type"] for module in modules] == kinds
        assert all({"idx", "name", "path", "type"} == set(module) for module in modules)
        index = out / "model.safetensors.index.json"
        parts = set(read(index)["weight_map"].values()) if index.exists() else {"model.safetensors"}
        assert all((out / part).is_file() for part in parts)


def test_onnx_with_tei_s_inputs(folder: Path, tokenizer: Tokenizer) -> None:
    """Several texts padded with the configuration's token, one text under a mask of ones."""
    names = sorted(path.name for path in (folder / "onnx").iterdir())
    assert names == ["model.onnx", "model.onnx_data"]
    assert not (folder / "model.onnx").exists()  # it would be taken first
    session = onnxruntime.InferenceSession(str(folder / "onnx" / "model.onnx"), providers=["CPUExecutionProvider"])
    assert {graph_input.name for graph_input in session.get_inputs()} == {"input_ids", "attention_mask"}
    texts = tokenizer.encode(["w5 w6 w7 w8 w9", "w10 w11", "w12"])
    longest, pad = max(map(len, texts)), read(folder / "config.json")["pad_token_id"]
    expected = load_encoder(str(folder)).embed(texts)
    rows = [text + [pad] * (longest - len(text)) for text in texts]
    mask = [[1] * len(text) + [0] * (longest - len(text)) for text in texts]
    for tokens, kept, embeddings in ((rows, mask, expected), (texts[:1], [[1] * len(texts[0])], expected[:1])):
        fed = {"input_ids": torch.tensor(tokens).numpy(), "attention_mask": torch.tensor(kept).numpy()}
        output = torch.from_numpy(session.run(["sentence_embedding"], fed)[0])
        assert output.dtype == torch.float32
        torch.testing.assert_close(output, embeddings, atol=1e-5, rtol=1e-5)
