"""Compare an exported folder with reference outputs, in an environment that has transformers and not biphasic.

    python check_export.py FOLDER REFERENCE.safetensors

The reference holds `input_ids` and `attention_mask` [batch, length], and `hidden` [batch, length, width], `logits` [batch,
length, vocabulary] and `embeddings` [batch, width] (mean pooled). Prints the largest difference of each; exit status 1
when one is above its tolerance.
"""

from __future__ import annotations

import sys

import torch
import transformers
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

TOLERANCES = {"hidden": 1e-5, "logits": 1e-4, "embeddings": 1e-5}


def main(folder: str, reference: str) -> int:
    expected = load_file(reference)
    inputs = {name: expected[name] for name in ("input_ids", "attention_mask")}
    kept = expected["attention_mask"].bool()
    found: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        model = AutoModel.from_pretrained(folder).eval()
        found["hidden"] = model(**inputs).last_hidden_state
        found["logits"] = AutoModelForMaskedLM.from_pretrained(folder).eval()(**inputs).logits
        for auto in (AutoModelForSequenceClassification, AutoModelForTokenClassification):
            auto.from_pretrained(folder, num_labels=3).eval()(**inputs)
    weights = kept[..., None].float()
    found["embeddings"] = (found["hidden"] * weights).sum(1) / weights.sum(1)
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(folder, device="cpu")
    texts = encoder.encode(["a text", "another, which is longer"], convert_to_tensor=True)
    assert texts.shape == (2, found["hidden"].shape[-1])
    print(f"transformers {transformers.__version__}, {type(model).__module__}.{type(model).__name__}")
    worst = 0
    for name, tolerance in TOLERANCES.items():
        keep = kept if name != "embeddings" else slice(None)
        difference = (found[name][keep] - expected[name][keep]).abs().max().item()
        print(f"{name}: {difference:.2e} (at most {tolerance:.0e})")
        worst |= difference > tolerance
    return worst


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
