"""Compare exported folders with reference outputs, in an environment that has transformers and not biphasic.

    python check_export.py FOLDER REFERENCE.safetensors [FOLDER REFERENCE.safetensors ...]

A reference holds `input_ids` and `attention_mask` [batch, length] and what is expected for them, any of: `hidden` [batch,
length, width], `logits` [batch, length, vocabulary], `token` [batch, length, labels], `sequence` [batch, labels], and
`embeddings` [texts, width], sentence-transformers' for the `texts` of its metadata (a JSON list). Each is computed padded,
and text by text without padding. Prints the largest differences; exit status 1 when one is above its tolerance.
"""

from __future__ import annotations

import json
import sys

import torch
import transformers
from safetensors import safe_open
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

KINDS = {
    "hidden": (AutoModel, "last_hidden_state", 1e-5),
    "logits": (AutoModelForMaskedLM, "logits", 1e-4),
    "token": (AutoModelForTokenClassification, "logits", 1e-4),
    "sequence": (AutoModelForSequenceClassification, "logits", 1e-4),
}


@torch.no_grad()
def differences(folder: str, reference: str) -> dict[str, tuple[float, float]]:
    """What was compared, with the largest difference and its tolerance."""
    with safe_open(reference, "pt") as file:
        expected = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        texts = json.loads((file.metadata() or {}).get("texts", "[]"))
    tokens, mask = expected["input_ids"], expected["attention_mask"]
    kept = mask.bool()
    found: dict[str, tuple[float, float]] = {}
    for name, (auto, output, tolerance) in KINDS.items():
        if name not in expected:
            continue
        model = auto.from_pretrained(folder).eval()
        assert type(model).__module__.startswith("transformers."), type(model)
        padded = getattr(model(input_ids=tokens, attention_mask=mask), output)
        each = name != "sequence"
        keep = kept if each else slice(None)
        found[f"{name}, padded"] = (padded[keep] - expected[name][keep]).abs().max().item(), tolerance
        alone = [getattr(model(input_ids=row[part][None]), output)[0] for row, part in zip(tokens, kept, strict=True)]
        joined = torch.cat(alone) if each else torch.stack(alone)
        found[f"{name}, alone"] = (joined - expected[name][keep]).abs().max().item(), tolerance
    if "logits" in expected:
        # A classifier starts from the same folder.
        for auto in (AutoModelForSequenceClassification, AutoModelForTokenClassification):
            assert auto.from_pretrained(folder, num_labels=3).eval()(input_ids=tokens).logits.shape[-1] == 3
    if "embeddings" in expected:
        from sentence_transformers import SentenceTransformer

        embeddings = SentenceTransformer(folder, device="cpu").encode(texts, convert_to_tensor=True)
        found["embeddings"] = (embeddings - expected["embeddings"]).abs().max().item(), 1e-5
    return found


def main(*paths: str) -> int:
    """Exit status: 0 all within their tolerances."""
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    worst = 0
    for folder, reference in zip(paths[::2], paths[1::2], strict=True):
        for name, (difference, tolerance) in differences(folder, reference).items():
            print(f"{name}: {difference:.2e} (at most {tolerance:.0e})")
            worst |= not difference <= tolerance  # NaN is no agreement
    return worst


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
