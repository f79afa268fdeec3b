"""On a GPU: embeddings and scores equal the CPU's, in bf16 approximately."""

import json
from pathlib import Path

import pytest
import torch

from biphasic.evaluation.embedder import EncoderEmbedder
from biphasic.evaluation.run import run
from biphasic.model.encoder import load_encoder
from helpers.mteb_mirror import config_of, rows, write_model, write_own

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize(("bf16", "tolerance"), [(False, 1e-3), (True, 5e-2)])
def test_embeddings(bf16: bool, tolerance: float, tmp_path: Path) -> None:
    encoder = load_encoder(str(write_model(tmp_path / "encoder")))
    texts = [document["text"] for document in rows(1, "d", ["test"])[0]]
    on_cpu = EncoderEmbedder(encoder, "a/b", "1").embed(texts, lambda _: None)
    encoder.backbone.to("cuda")
    on_gpu = EncoderEmbedder(encoder, "a/b", "1", bf16).embed(texts, lambda _: None)
    assert abs(on_gpu - on_cpu).max() < tolerance * abs(on_cpu).max()


def test_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = write_model(tmp_path / "encoder"), write_own(tmp_path / "mine")
    monkeypatch.setenv("WORLD_SIZE", "1")
    scores = {}
    for precision in ("fp32", "amp_bf16"):
        folder = run(config_of(model, tmp_path / precision, sets=[str(own)], precision=precision))
        [first, *_] = json.loads((folder / "scores.json").read_text())["records"]
        scores[precision] = first["scores"][0]["value"]
    assert scores["amp_bf16"] == pytest.approx(scores["fp32"], abs=0.05)
