"""The ONNX graph of an export is the packed encoder, for every length, batch and side of padding."""

from __future__ import annotations

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

from biphasic.config.errors import UserError
from biphasic.data.tokenizer import load_tokenizer
from biphasic.export import __main__ as command
from biphasic.export import onnx as module
from biphasic.export.onnx import GRAPH, WEIGHTS, export_onnx
from biphasic.export.write import export_encoder
from biphasic.model.encoder import Encoder, load_encoder
from biphasic.model.fresh import from_hf_config
from biphasic.model.segments import Segments
from conftest import Write
from tiny import LENGTH, WORDS, config_of, train


@pytest.fixture(scope="module")
def exported(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grouped-query attention, and weights large enough that a wrong path shows."""
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
    folder = tmp_path_factory.mktemp("graph") / "out"
    shutil.copytree(exported, folder)
    return export_onnx(folder)


def run(graph: Path, tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    hidden, embedding = session.run(None, {"input_ids": tokens.numpy(), "attention_mask": mask.numpy()})
    return torch.from_numpy(hidden), torch.from_numpy(embedding)


def batch(lengths: list[int], left: bool, longest: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Padding holds a token of its own, so that it would show."""
    generator = torch.Generator().manual_seed(len(lengths))
    wide = longest or max(lengths)
    tokens, mask = torch.full((len(lengths), wide), 7), torch.zeros((len(lengths), wide), dtype=torch.int64)
    for row, length in enumerate(lengths):
        at = slice(wide - length, wide) if left else slice(0, length)
        tokens[row, at] = torch.randint(4, WORDS, (length,), generator=generator)
        mask[row, at] = 1
    return tokens, mask


def ours(encoder: Encoder, tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kept = mask.bool()
    texts = [row[some].tolist() for row, some in zip(tokens, kept, strict=True)]
    with torch.no_grad():
        hidden = encoder.hidden(tokens[kept], Segments.of([len(text) for text in texts], tokens.device))
    return hidden, encoder.embed(texts)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(
    ("lengths", "wide"),
    [([1], None), ([5], None), ([LENGTH], None), ([1, 1], None), ([3, 8], None), ([2, LENGTH, 11, 1, 6], None), ([4], 20)],
)  # fmt: skip
def test_every_shape_gives_our_embeddings(graph: Path, lengths: list[int], wide: int | None, left: bool) -> None:
    tokens, mask = batch(lengths, left, wide)
    hidden, embeddings = run(graph, tokens, mask)
    expected_hidden, expected = ours(load_encoder(str(graph.parents[1])), tokens, mask)
    assert embeddings.shape == (len(lengths), 32)
    assert hidden[~mask.bool()].abs().sum() == 0
    differences = (hidden[mask.bool()] - expected_hidden).abs().max(), (embeddings - expected).abs().max()
    assert max(map(float, differences)) < 1e-4


def test_names_axes_and_one_file(graph: Path) -> None:
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


def test_a_text_without_a_token_is_zeros(graph: Path) -> None:
    tokens, mask = batch([3, 0], False)
    hidden, embeddings = run(graph, tokens, mask)
    assert hidden[1].abs().sum() == embeddings[1].abs().sum() == 0
    assert embeddings[0].abs().sum() > 0


def test_weights_beside_the_graph(exported: Path, graph: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(exported, folder)
    found = export_onnx(folder, external=True)
    assert sorted(path.name for path in found.parent.iterdir()) == [GRAPH, WEIGHTS]
    assert found.stat().st_size < graph.stat().st_size - 90_000
    assert (found.parent / WEIGHTS).stat().st_size > 90_000
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in found.parent.iterdir())
    tokens, mask = batch([4, 9], True)
    for one, other in zip(run(found, tokens, mask), run(graph, tokens, mask), strict=True):
        assert torch.equal(one, other)
    # Another time, in one file: nothing of the first is left.
    export_onnx(folder)
    assert [path.name for path in found.parent.iterdir()] == [GRAPH]


def test_what_is_too_large_for_a_file_lies_beside_it(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(exported, folder)
    monkeypatch.setattr(module, "_IN_ONE_FILE", 1000)
    assert (export_onnx(folder).parent / WEIGHTS).is_file()


def test_half_precision_weights_are_computed_in_full(exported: Path, tmp_path: Path) -> None:
    backbone, tokenizer = load_encoder(str(exported)).backbone, load_encoder(str(exported)).tokenizer
    export_encoder(backbone, tokenizer, tmp_path / "out", "card", dtype=torch.bfloat16)
    tokens, mask = batch([4, 9], False)
    found = run(export_onnx(tmp_path / "out"), tokens, mask)[1]
    expected = ours(load_encoder(str(tmp_path / "out")), tokens, mask)[1]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_from_a_checkpoint_and_from_a_folder(
    write_yaml: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = train(config_of(write_yaml(max_duration="8ba"))) / "checkpoints" / "ba8-rank0.pt"
    assert command.main([str(checkpoint), str(tmp_path / "out"), "--onnx"]) == 0
    assert "onnx/model.onnx: largest difference from the model" in capsys.readouterr().out
    graph = tmp_path / "out" / "onnx" / GRAPH
    first = graph.read_bytes()
    shutil.rmtree(graph.parent)
    assert command.main([str(tmp_path / "out"), "--onnx"]) == 0
    assert graph.read_bytes() == first


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("mode", ["cls", "lasttoken", "max"])
def test_the_folder_s_own_pooling(exported: Path, tmp_path: Path, mode: str, legacy: bool) -> None:
    from sentence_transformers import SentenceTransformer

    folder = tmp_path / "out"
    shutil.copytree(exported, folder)
    pooling = folder / "1_Pooling" / "config.json"
    flag = {"cls": "pooling_mode_cls_token", "max": "pooling_mode_max_tokens"}.get(mode, f"pooling_mode_{mode}")
    if legacy:
        edit(pooling, pooling_mode_mean_tokens=False, **{flag: True})
    else:
        pooling.write_text(json.dumps({"embedding_dimension": 32, "pooling_mode": mode}))
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"})
    (folder / "2_Normalize").mkdir()
    (folder / "modules.json").write_text(json.dumps(modules))
    graph = export_onnx(folder)
    texts = ["w5 w6 w7 w8", "w9"]
    theirs = SentenceTransformer(str(folder), device="cpu")
    features = theirs.tokenizer(texts, padding=True, return_tensors="pt")
    found = run(graph, features["input_ids"], features["attention_mask"])[1]
    np.testing.assert_allclose(found, theirs.encode(texts), atol=1e-5)
    np.testing.assert_allclose(found.norm(dim=1), [1, 1], atol=1e-5)
    # On the left it is the same, and a text without a token is zeros by any pooling.
    tokens, mask = features["input_ids"], features["attention_mask"]
    turned = torch.stack([row.roll(int((some == 0).sum())) for row, some in zip(tokens, mask, strict=True)])
    np.testing.assert_allclose(run(graph, turned, mask.flip(1))[1], found, atol=1e-5)
    nothing = run(graph, tokens, mask * torch.tensor([[1], [0]]))[1]
    assert torch.equal(nothing[1], torch.zeros(32))


def test_poolings_that_the_graph_lacks_are_refused(exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(exported, folder)
    pooling = folder / "1_Pooling" / "config.json"
    before = pooling.read_text()
    for changes, says in (
        ({"pooling_mode_max_tokens": True}, "max and mean"),
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
    ):
        edit(pooling, **changes)
        with pytest.raises(UserError, match=says):
            export_onnx(folder)
        pooling.write_text(before)
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UserError, match="Transformer, Pooling, Dense"):
        export_onnx(folder)
    assert not (folder / "onnx").exists()


def test_a_graph_with_other_numbers_is_not_kept(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(exported, folder)
    earlier = export_onnx(folder).read_bytes()

    class Shifted(module.PaddedEncoder):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden, pooled = super().forward(input_ids, attention_mask)
            return hidden, pooled + 2e-3

    class Undefined(module.PaddedEncoder):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden, pooled = super().forward(input_ids, attention_mask)
            return hidden, pooled * float("nan")

    for wrong, says in ((Shifted, r"2.0e-03 from the model's, more than 0.001"), (Undefined, "nan from the model's")):
        monkeypatch.setattr(module, "PaddedEncoder", wrong)
        with pytest.raises(UserError, match=says):
            export_onnx(folder)
        assert (folder / "onnx" / GRAPH).read_bytes() == earlier
        assert not list(folder.glob(".*"))


def test_what_can_not_be_written_as_onnx(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(UserError, match=r"model_quantized\.onnx, which was not written here"):
        export_onnx(folder)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else True)
    with pytest.raises(UserError, match=r"--onnx: onnxruntime not installed: uv pip install '\.\[onnx\]'"):
        export_onnx(folder)
