"""The ONNX graph of an export gives the packed encoder's results, for any length, batch and side of padding."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from transformers import LlamaConfig

from biphasic.commands import main
from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import UserError
from biphasic.export import onnx as module
from biphasic.export.onnx import GRAPH, WEIGHTS, export_onnx
from biphasic.model.backbone import load_language_model
from biphasic.model.encoder import Encoder, load_encoder
from biphasic.model.language_model import from_hf_config
from biphasic.model.segments import Segments
from conftest import Write
from helpers.decoders import saved_decoder
from helpers.exports import export_encoder
from helpers.tiny import LENGTH, WORDS, config_of, train


@pytest.fixture(scope="module")
def exported(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grouped-query attention, and weights large enough that an error shows."""
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=LENGTH, rms_norm_eps=1e-5, pad_token_id=None,
        initializer_range=0.2,
    )  # fmt: skip
    out = tmp_path_factory.mktemp("onnx") / "out"
    export_encoder(from_hf_config(config, seed=1).backbone, load_tokenizer(str(dataset / "tokenizer")), out, "card")
    return out


@pytest.fixture(scope="module")
def graph(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one traced graph that most tests share."""
    folder = tmp_path_factory.mktemp("graph") / "out"
    shutil.copytree(exported, folder)
    return export_onnx(folder)


def run(graph: Path, tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    hidden, embedding = session.run(None, {"input_ids": tokens.numpy(), "attention_mask": mask.numpy()})
    return torch.from_numpy(hidden), torch.from_numpy(embedding)


def batch(lengths: list[int], left: bool, width: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Padding has a token that would change the results."""
    generator = torch.Generator().manual_seed(len(lengths))
    width = width or max(lengths)
    tokens, mask = torch.full((len(lengths), width), 7), torch.zeros((len(lengths), width), dtype=torch.int64)
    for row, length in enumerate(lengths):
        at = slice(width - length, width) if left else slice(0, length)
        tokens[row, at] = torch.randint(4, WORDS, (length,), generator=generator)
        mask[row, at] = 1
    return tokens, mask


def packed_results(encoder: Encoder, tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kept = mask.bool()
    texts = [row[some].tolist() for row, some in zip(tokens, kept, strict=True)]
    with torch.no_grad():
        hidden = encoder.hidden(tokens[kept], Segments.of([len(text) for text in texts], tokens.device))
    return hidden, encoder.embed(texts)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(
    ("lengths", "width"),
    [([1], None), ([5], None), ([LENGTH], None), ([1, 1], None), ([3, 8], None), ([2, LENGTH, 11, 1, 6], None), ([4], 20)],
)  # fmt: skip
def test_every_shape_gives_the_packed_results(graph: Path, lengths: list[int], width: int | None, left: bool) -> None:
    tokens, mask = batch(lengths, left, width)
    hidden, embeddings = run(graph, tokens, mask)
    expected_hidden, expected = packed_results(load_encoder(str(graph.parents[1])), tokens, mask)
    assert embeddings.shape == (len(lengths), 32)
    assert hidden[~mask.bool()].abs().sum() == 0
    differences = (hidden[mask.bool()] - expected_hidden).abs().max(), (embeddings - expected).abs().max()
    assert max(map(float, differences)) < 1e-4


def test_names_axes_and_a_single_file(graph: Path) -> None:
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    assert {i.name: (i.type, i.shape) for i in session.get_inputs()} == {
        name: ("tensor(int64)", ["batch", "length"]) for name in ("input_ids", "attention_mask")
    }
    assert {o.name: (o.type, o.shape) for o in session.get_outputs()} == {
        "last_hidden_state": ("tensor(float)", ["batch", "length", 32]),
        "sentence_embedding": ("tensor(float)", ["batch", 32]),
    }
    onnx.checker.check_model(str(graph), full_check=True)
    assert [path.name for path in graph.parent.iterdir()] == [GRAPH]
    assert graph == graph.parents[1] / "onnx" / "model.onnx"
    assert not list(graph.parents[1].glob(".*"))
    assert b"site-packages" not in graph.read_bytes()  # the exporter can note which line made an operator


def test_an_empty_text_is_zeros(graph: Path) -> None:
    tokens, mask = batch([3, 0], False)
    hidden, embeddings = run(graph, tokens, mask)
    assert hidden[1].abs().sum() == embeddings[1].abs().sum() == 0
    assert embeddings[0].abs().sum() > 0


def test_large_weights_lie_beside_the_graph(
    exported: Path, graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(exported, folder)
    shutil.copytree(graph.parent, folder / "onnx")
    with monkeypatch.context() as patch:
        patch.setattr(module, "SINGLE_FILE_BYTES", 1000)
        written = export_onnx(folder)
    assert sorted(path.name for path in written.parent.iterdir()) == [GRAPH, WEIGHTS]
    assert written.stat().st_size < graph.stat().st_size - 90_000
    assert (written.parent / WEIGHTS).stat().st_size > 90_000
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in written.parent.iterdir())
    tokens, mask = batch([4, 9], True)
    for outside, inside in zip(run(written, tokens, mask), run(graph, tokens, mask), strict=True):
        assert torch.equal(outside, inside)
    # The next export, in a single file, removes both.
    without_tracing(monkeypatch, graph)
    export_onnx(folder)
    assert [path.name for path in written.parent.iterdir()] == [GRAPH]


def without_tracing(monkeypatch: pytest.MonkeyPatch, graph: Path) -> None:
    """Let an export write this graph, which tracing would give again."""
    monkeypatch.setattr(module, "_trace", lambda model, folder: shutil.copy(graph, folder / GRAPH))


@pytest.mark.slow
def test_half_precision_weights_are_computed_in_fp32(exported: Path, tmp_path: Path) -> None:
    backbone, tokenizer = load_encoder(str(exported)).backbone, load_encoder(str(exported)).tokenizer
    export_encoder(backbone, tokenizer, tmp_path / "out", "card", dtype=torch.bfloat16)
    tokens, mask = batch([4, 9], False)
    embeddings = run(export_onnx(tmp_path / "out"), tokens, mask)[1]
    expected = packed_results(load_encoder(str(tmp_path / "out")), tokens, mask)[1]
    assert embeddings.dtype == torch.float32
    torch.testing.assert_close(embeddings, expected, atol=1e-4, rtol=0)


def test_the_command_writes_the_graph(
    write_yaml: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = train(config_of(write_yaml(max_duration="8ba"))) / "checkpoints" / "ba8-rank0.pt"
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 0
    assert main(["onnx", str(tmp_path / "out")]) == 0
    assert "onnx/model.onnx: largest difference from the model" in capsys.readouterr().out
    graph = tmp_path / "out" / "onnx" / GRAPH
    first = shutil.copy(graph, tmp_path)
    shutil.rmtree(graph.parent)
    without_tracing(monkeypatch, Path(first))
    assert main(["onnx", str(tmp_path / "out")]) == 0
    assert graph.read_bytes() == Path(first).read_bytes()


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_embeddings_are_those_of_sentence_transformers(graph: Path) -> None:
    from sentence_transformers import SentenceTransformer

    texts = ["w5 w6 w7 w8", "w9"]
    model = SentenceTransformer(str(graph.parents[1]), device="cpu")
    features = model.tokenizer(texts, padding=True, return_tensors="pt")
    embeddings = run(graph, features["input_ids"], features["attention_mask"])[1]
    np.testing.assert_allclose(embeddings, model.encode(texts), atol=1e-5)


def test_an_edited_pooling_is_refused(exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(exported, folder)
    pooling = folder / "1_Pooling" / "config.json"
    before = pooling.read_text()
    edit(pooling, pooling_mode_mean_tokens=False, pooling_mode_cls_token=True)
    with pytest.raises(UserError, match="its pooling was edited"):
        export_onnx(folder)
    pooling.write_text(before)
    modules = json.loads((folder / "modules.json").read_text())
    normalize = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
    (folder / "modules.json").write_text(json.dumps([*modules, normalize]))
    with pytest.raises(UserError, match="its pooling was edited"):
        export_onnx(folder)
    assert not (folder / "onnx").exists()


def test_a_graph_with_other_results_is_not_kept(
    exported: Path, graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(exported, folder)
    without_tracing(monkeypatch, graph)
    earlier = export_onnx(folder).read_bytes()
    packed = module._packed
    for wrong, message in ((2e-3, r"by 2.0e-03, more than 0.001"), (float("nan"), "by nan")):

        def shifted(encoder: Encoder, head: None, text: torch.Tensor, wrong: float = wrong) -> tuple[torch.Tensor, ...]:
            hidden, pooled = packed(encoder, head, text)
            return hidden, pooled + wrong

        monkeypatch.setattr(module, "_packed", shifted)
        with pytest.raises(UserError, match=message):
            export_onnx(folder)
        assert (folder / "onnx" / GRAPH).read_bytes() == earlier
        assert not list(folder.glob(".*"))


@pytest.mark.parametrize("family", ["modernbert", "modernbert-decoder"])
def test_modernbert_s_local_layers(family: str, dataset: Path, tmp_path: Path) -> None:
    """Texts are longer than the window."""
    changes = {"num_hidden_layers": 3, "max_position_embeddings": LENGTH}
    saved_decoder(family, tmp_path / "model", **changes)
    model, out = load_language_model(str(tmp_path / "model")), tmp_path / "out"
    export_encoder(model.backbone, load_tokenizer(str(dataset / "tokenizer")), out)
    graph = export_onnx(out)
    lengths = [20, 3, 11]
    tokens, mask = batch(lengths, left=True)
    hidden, _ = run(graph, tokens, mask)
    texts = [row[kept.bool()] for row, kept in zip(tokens, mask, strict=True)]
    with torch.no_grad():
        expected = load_encoder(str(out)).hidden(torch.cat(texts), Segments.of(lengths, torch.device("cpu")))
    torch.testing.assert_close(hidden[mask.bool()], expected, atol=1e-4, rtol=1e-4)


def test_unusable_folders_are_refused(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"not an exported folder \(it has no biphasic\.json\)"):
        export_onnx(tmp_path)
    folder = tmp_path / "out"
    shutil.copytree(exported, folder)
    edit(folder / "config.json", model_type="qwen3")
    with pytest.raises(UserError, match="holds a qwen3 model"):
        export_onnx(folder)
    edit(folder / "config.json", model_type="eurobert")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model_quantized.onnx").touch()
    with pytest.raises(UserError, match=r"model_quantized\.onnx, which an export doesn't write"):
        export_onnx(folder)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else True)
    with pytest.raises(UserError, match=r"onnx: onnxruntime not installed: uv pip install '\.\[onnx\]'"):
        export_onnx(folder)
