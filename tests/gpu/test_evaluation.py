"""On a GPU: embeddings are the CPU's, in bf16 nearly, and an evaluation finds the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from biphasic.evaluation.embedder import EncoderEmbedder
from biphasic.evaluation.run import run
from biphasic.model.encoder import load_encoder
from mteb_mirror import config_of, rows, write_model, write_own

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize(("half", "tolerance"), [(False, 1e-3), (True, 5e-2)])
def test_embeddings(half: bool, tolerance: float, tmp_path: Path) -> None:
    encoder = load_encoder(str(write_model(tmp_path / "encoder")))
    texts = [document["text"] for document in rows(1, "d", ["test"])[0]]
    here = EncoderEmbedder(encoder, "a/b", "1").embed(texts, lambda _: None)
    encoder.backbone.to("cuda")
    there = EncoderEmbedder(encoder, "a/b", "1", half).embed(texts, lambda _: None)
    assert abs(there - here).max() < tolerance * abs(here).max()


def test_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = write_model(tmp_path / "encoder"), write_own(tmp_path / "mine")
    monkeypatch.setenv("WORLD_SIZE", "1")
    found = {}
    for precision in ("fp32", "amp_bf16"):
        folder = run(config_of(model, tmp_path / precision, sets=[str(own)], precision=precision))
        [first, *_] = json.loads((folder / "scores.json").read_text())["records"]
        found[precision] = first["scores"][0]["value"]
    assert found["amp_bf16"] == pytest.approx(found["fp32"], abs=0.05)
