"""Compare exported folders with reference outputs, in an environment that has transformers and not biphasic.

    python check_export.py FOLDER REFERENCE.safetensors [FOLDER REFERENCE.safetensors ...]

A reference holds `input_ids` and `attention_mask` [batch, length] and what is expected for them, any of: `hidden` [batch,
length, width], `logits` [batch, length, vocabulary], `token` [batch, length, labels], `sequence` [batch, labels], and
`embeddings` [texts, width], sentence-transformers' for the `texts` of its metadata (a JSON list). Each is computed padded
on the right and on the left, and text by text without padding, in each kind of attention that the format takes.

A folder of EuroBERT's format has to load with transformers' own classes and no code; one of another family with the code
that lies in it, and not without. Prints the largest differences, one line for each, `FOLDER: what: 1.2e-07 (at most
1e-05)`, and `BEYOND` behind what is above its tolerance; exit status 1 then.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
import transformers.utils.logging
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoConfig,
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
OTHERS = 1e-4
"""Tolerance for all that other families compute."""


def on_the_left(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The same texts with their padding before them."""
    shifts = (tokens.shape[1] - mask.sum(1)).tolist()
    return tuple(torch.stack([row.roll(by) for row, by in zip(x, shifts, strict=True)]) for x in (tokens, mask))


@torch.no_grad()
def differences(folder: str, reference: str) -> Iterator[tuple[str, float, float]]:
    """What was compared, the largest difference, its tolerance."""
    with safe_open(reference, "pt") as file:
        expected = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        texts = json.loads((file.metadata() or {}).get("texts", "[]"))
    config = json.loads((Path(folder) / "config.json").read_text())
    coded = config["model_type"] != "eurobert"
    options: dict[str, Any] = {"trust_remote_code": True} if coded else {}
    if coded:
        refuse_without_code(folder)
    # Scores that are squashed are beyond PyTorch's attention; such a folder chooses eager itself.
    ways = [None, "eager", *([] if config.get("attn_logit_softcapping") else ["sdpa"])]
    tokens, mask = expected["input_ids"], expected["attention_mask"]
    for name, (auto, output, tolerance) in KINDS.items():
        if name not in expected:
            continue
        tolerance = max(tolerance, OTHERS) if coded else tolerance
        each = name != "sequence"
        wanted = expected[name][mask.bool()] if each else expected[name]
        for way in ways:
            model = auto.from_pretrained(folder, attn_implementation=way, **options).eval()
            where = "transformers_modules." if coded else "transformers.models.eurobert."
            assert type(model).__module__.startswith(where), type(model)
            sides = {"right": (tokens, mask), "left": on_the_left(tokens, mask)}
            if name == "sequence" and config.get("classifier_pooling") == "bos":
                del sides["left"]  # the first place of a row is padding there
            for side, (given, kept) in sides.items():
                found = getattr(model(input_ids=given, attention_mask=kept), output)
                found = found[kept.bool()] if each else found
                yield f"{name}, {way}, {side}", (found - wanted).abs().max().item(), tolerance
            alone = [model(row[kept.bool()][None])[0][0] for row, kept in zip(tokens, mask, strict=True)]
            found = torch.cat(alone) if each else torch.stack(alone)
            yield f"{name}, {way}, alone", (found - wanted).abs().max().item(), tolerance
            if name == "hidden":
                assert looks_ahead(model, tokens[:1]), f"{folder}: the first token doesn't see the last"
    if "logits" in expected:
        # A classifier starts from the same folder.
        for auto in (AutoModelForSequenceClassification, AutoModelForTokenClassification):
            model = auto.from_pretrained(folder, num_labels=3, **options).eval()
            assert model(input_ids=tokens, attention_mask=mask).logits.shape[-1] == 3
    if "embeddings" in expected:
        from sentence_transformers import SentenceTransformer

        embeddings = SentenceTransformer(folder, device="cpu", **options).encode(texts, convert_to_tensor=True)
        yield "embeddings", (embeddings - expected["embeddings"]).abs().max().item(), OTHERS if coded else 1e-5


def looks_ahead(model: Any, text: Tensor) -> bool:
    """Whether the first hidden state depends on the last token."""
    other = text.clone()
    other[0, -1] += 1
    first, changed = (model(x).last_hidden_state[0, 0] for x in (text, other))
    return bool((first - changed).abs().max() > 1e-4)


def refuse_without_code(folder: str) -> None:
    """Nothing may load, and look back only, without the folder's code."""
    for auto in (AutoConfig, AutoModel, AutoModelForMaskedLM):
        try:
            auto.from_pretrained(folder, trust_remote_code=False)
        except ValueError as error:
            said = str(error)
        else:
            said = "it loads"
        assert "trust_remote_code=True" in said, f"{folder}, without its code: {said}"


def main(*paths: str) -> int:
    """Exit status: 0 all within their tolerances."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    worst = 0
    for folder, reference in zip(paths[::2], paths[1::2], strict=True):
        for name, difference, tolerance in differences(folder, reference):
            beyond = not difference <= tolerance  # NaN is no agreement
            print(f"{folder}: {name}: {difference:.2e} (at most {tolerance:.0e})" + " BEYOND" * beyond)
            worst |= beyond
    return worst


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
