"""What transformers 5 and its sentence-transformers make of exported folders: `make test-interop`."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from biphasic.config.architecture import PRESETS, Architecture
from biphasic.data.tokenizer import Tokenizer, load_tokenizer
from biphasic.export import weights
from biphasic.export.finetuned import export_finetuned
from biphasic.export.write import export_encoder, export_language_model
from biphasic.model.encoder import Encoder, Reader
from biphasic.model.fresh import from_hf_config, llama_config
from biphasic.model.heads import TextHead, TokenHead
from biphasic.model.language_model import LanguageModel
from biphasic.model.packed import mean_pool
from biphasic.model.segments import Segments
from decoders import FAMILIES, TEXTS, decoder, packed, padded
from tiny import LENGTH, WORDS

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(
        "BIPHASIC_TRANSFORMERS5_PYTHON" not in os.environ,
        reason="BIPHASIC_TRANSFORMERS5_PYTHON names no interpreter with transformers >= 5 and sentence-transformers",
    ),
]
SENTENCES = ["w5 w6 w7", "w9", "w10 w11 w12 w13 w14 w15"]
HEADS: dict[str, Callable[..., Any]] = {"sequence": TextHead, "token": TokenHead}
SCRIPT = Path(__file__).with_name("check_export.py")


def scaled_down(name: str, tied: bool = False) -> LanguageModel:
    """A preset's shape with an eighth of its widths: as many heads, grouped alike."""
    full = PRESETS[name]
    size = Architecture(
        WORDS, hidden=full.hidden // 8, ffn=full.ffn // 8, layers=3, heads=full.heads, kv_heads=full.kv_heads,
        head_dim=full.head_dim // 8, tied=tied,
    )  # fmt: skip
    # Large enough that a wrong path shows, small enough that scores don't amplify rounding.
    return from_hf_config(llama_config(size, LENGTH, initializer_range=size.hidden**-0.5), seed=1)


class Folders:
    """Exports, each with its reference."""

    def __init__(self, root: Path, tokenizer: Tokenizer):
        self.root, self.tokenizer = root, tokenizer
        self.names: list[str] = []

    def add(self, name: str, model: LanguageModel) -> None:
        """As a pretrained model, a bare encoder with sentences' embeddings, and fine-tuned with either head."""
        hidden = packed(model.backbone)
        logits = hidden @ model.lm_head.weight.T
        if model.softcap is not None:
            logits = model.softcap * torch.tanh(logits / model.softcap)
        ids = self.tokenizer.encode(SENTENCES)
        embeddings = mean_pool(packed(model.backbone, ids), Segments.of([len(i) for i in ids], torch.device("cpu")))
        export_language_model(model, self.tokenizer, self.root / name, "card", dtype=torch.float32)
        self.refer(name, hidden=hidden, logits=logits, embeddings=embeddings)
        export_encoder(model.backbone, self.tokenizer, self.root / f"{name}-bare", "card")
        self.refer(f"{name}-bare", hidden=hidden, embeddings=embeddings)
        encoder = Encoder(model.backbone, Reader(self.tokenizer, LENGTH))
        segments = Segments.of([len(text) for text in TEXTS], torch.device("cpu"))
        for kind, make in HEADS.items():
            torch.manual_seed(0)
            head = make(hidden.shape[1], 3)
            out = self.root / f"{name}-{kind}"
            export_finetuned(encoder, head, ["a", "b", "c"], out, "card", prompts={}, max_length=LENGTH)
            said = head(mean_pool(hidden, segments) if kind == "sequence" else hidden)
            self.refer(f"{name}-{kind}", **{kind: said})

    def refer(self, name: str, **expected: torch.Tensor) -> None:
        """Write what is expected; hidden states and logits are those of all tokens, and get their places in the batch."""
        tokens, mask = padded()
        content = {"input_ids": tokens, "attention_mask": mask}
        for kind, values in expected.items():
            if kind in ("hidden", "logits", "token"):
                place = torch.zeros(*tokens.shape, values.shape[-1])
                place[mask.bool()] = values.detach()
                values = place
            content[kind] = values.detach().contiguous()
        save_file(content, self.root / f"{name}.safetensors", metadata={"texts": json.dumps(SENTENCES)})
        self.names.append(name)

    def check(self) -> str:
        """What the script says of all."""
        arguments = [str(self.root / f"{name}{end}") for name in self.names for end in ("", ".safetensors")]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(self.root / "modules")}
        run = subprocess.run(
            [os.environ["BIPHASIC_TRANSFORMERS5_PYTHON"], str(SCRIPT), *arguments],
            capture_output=True,
            text=True,
            env=environment,
        )
        print(run.stdout)
        beyond = [line for line in run.stdout.splitlines() if line.endswith("BEYOND")]
        assert run.returncode == 0 and not beyond, "\n".join([*beyond, run.stderr[-2000:]])
        return run.stdout


@pytest.fixture
def folders(tmp_path: Path, dataset: Path) -> Folders:
    return Folders(tmp_path, load_tokenizer(str(dataset / "tokenizer")))


def compared(said: str, name: str) -> set[str]:
    """Which kinds of output were."""
    return set(re.findall(rf"^\S*/{re.escape(name)}: (\w+)", said, re.MULTILINE))


def test_the_presets_shapes_load_natively(folders: Folders) -> None:
    for name in PRESETS:
        folders.add(name, scaled_down(name))
    folders.add("tied", scaled_down("610m", tied=True))
    said = folders.check()
    for name in (*PRESETS, "tied"):
        assert compared(said, name) == {"hidden", "logits", "embeddings"}
        assert compared(said, f"{name}-bare") == {"hidden", "embeddings"}
        for kind in HEADS:
            assert compared(said, f"{name}-{kind}") == {kind}


def test_other_families_load_with_their_code(folders: Folders) -> None:
    for family in FAMILIES:
        folders.add(family, decoder(family))
    said = folders.check()
    for family in FAMILIES:
        assert compared(said, family) == {"hidden", "logits", "embeddings"}
        for kind in HEADS:
            assert compared(said, f"{family}-{kind}") == {kind}


def test_shards_and_poolings(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export in several files, and the classifiers that transformers 4.57 trains from one."""
    monkeypatch.setattr(weights, "SHARD_BYTES", 100_000)
    folders.add("sharded", scaled_down("610m"))
    folders.add("sharded-qwen3", decoder("qwen3"))
    for name in ("sharded", "sharded-qwen3"):
        assert len(list((folders.root / name).glob("model-*-of-*.safetensors"))) > 1, name
    tokens, mask = padded()
    for kind, auto, pooling in (
        ("sequence", AutoModelForSequenceClassification, "late"),
        ("sequence", AutoModelForSequenceClassification, "mean"),
        ("sequence", AutoModelForSequenceClassification, "bos"),
        ("token", AutoModelForTokenClassification, "mean"),
    ):
        torch.manual_seed(0)
        classifier = auto.from_pretrained(folders.root / "sharded", num_labels=3, classifier_pooling=pooling).eval()
        name = f"{kind}-{pooling}"
        classifier.save_pretrained(folders.root / name)
        with torch.no_grad():
            logits = classifier(input_ids=tokens, attention_mask=mask).logits
        folders.refer(name, **{kind: logits if kind == "sequence" else logits[mask.bool()]})
    said = folders.check()
    assert compared(said, "sequence-bos") == {"sequence"}
    assert compared(said, "sharded") == {"hidden", "logits", "embeddings"}
