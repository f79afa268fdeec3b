"""Other decoder families as encoders: a model type of their own, and one file of code that makes attention look both ways.

Under its family's own model type a folder would also load without that file, as the decoder it was, and look back only.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from biphasic.config.errors import UserError
from biphasic.data.tokenizer import Tokenizer
from biphasic.export.formats import Format, Kind, special_tokens
from biphasic.model.backbone import BIDIRECTIONAL, BIDIRECTIONAL_CODE
from biphasic.model.fresh import from_hf_config
from biphasic.model.packed import encode
from biphasic.model.segments import Segments

FILE = BIDIRECTIONAL_CODE.partition(".")[0]
"""The module's name in an exported folder."""
TOLERANCE = 1e-4
"""Largest difference of hidden states, written code against training's, on a small network."""
_TEMPLATE = Path(__file__).with_name("bidirectional_template.py")
_CLASSES: dict[Kind, str] = {
    "model": "BidirectionalModel",
    "masked_lm": "BidirectionalForMaskedLM",
    "sequence": "BidirectionalForSequenceClassification",
    "token": "BidirectionalForTokenClassification",
}
_AUTO: dict[Kind, str] = {
    "model": "AutoModel",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence": "AutoModelForSequenceClassification",
    "token": "AutoModelForTokenClassification",
}
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "mask_token_id")
_NOT_KEPT = ("architectures", "auto_map", "model_type", "transformers_version", "dtype", "use_cache", *_TOKENS)
_SHAPES = ((9, 4, 1), (6, 6))


def bidirectional_format(config: Any, tokenizer: Tokenizer) -> Format:
    """The format of a decoder family, proven on a small network of the same configuration.

    Args:
        config: the backbone's Hugging Face configuration.
        tokenizer: the encoder's.

    Raises:
        UserError: the family has layers of a kind that the code doesn't know, or its numbers differ from training's.
    """
    code = _code_of(config)
    module = _module_of(code)
    _prove(json.dumps(_content_of(config), sort_keys=True), config.model_type, code)
    found = module.BidirectionalConfig(**_content_of(config), **special_tokens(tokenizer), use_cache=False)
    found.auto_map = {"AutoConfig": BIDIRECTIONAL_CODE}
    found.auto_map |= {auto: f"{FILE}.{_CLASSES[kind]}" for kind, auto in _AUTO.items()}
    classes: dict[Kind, Any] = {kind: getattr(module, name) for kind, name in _CLASSES.items()}
    return Format(f"{BIDIRECTIONAL}{config.model_type}", found, classes, {f"{FILE}.py": code})


def _content_of(config: Any) -> dict[str, Any]:
    """The configuration's values, special tokens aside."""
    return {name: value for name, value in config.to_diff_dict().items() if name not in _NOT_KEPT and name[0] != "_"}


def _code_of(config: Any) -> str:
    """The template, for the family that a configuration is of."""
    import transformers
    from transformers import MODEL_MAPPING

    family = config.model_type
    refused = f"export: a {family} model can't be written"
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        raise UserError(f"{refused}: it has layers of the kinds {', '.join(sorted(kinds))}, which aren't known")
    if type(config) not in MODEL_MAPPING:
        raise UserError(f"{refused}: its network is not one of transformers' own")
    network: Any = MODEL_MAPPING[type(config)]
    bases = [base.__name__ for base in network.__mro__ if base.__name__.endswith("PreTrainedModel")]
    names = {"Config": type(config).__name__, "Model": network.__name__, "PreTrainedModel": bases[0]}
    for name in names.values():
        if not hasattr(transformers, name):
            raise UserError(f"{refused}: transformers doesn't offer its {name}")
    code = _TEMPLATE.read_text(encoding="utf-8")
    for part, name in names.items():
        code = code.replace(f"import Llama{part} as", f"import {name} as")
    return code.replace('FAMILY = "llama"', f'FAMILY = "{family}"')


@functools.cache
def _module_of(code: str) -> ModuleType:
    """The code as a module; the classes that are written are the ones that were checked."""
    name = f"_biphasic_bidirectional_{hashlib.sha256(code.encode()).hexdigest()[:16]}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.py"
        file.write_text(code, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@functools.cache
def _prove(content: str, family: str, code: str) -> None:
    """Compare the code's hidden states with those of training's attention, padded left and right.

    Raises:
        UserError: they differ, or there is no such small network.
    """
    from transformers import AutoConfig

    module = _module_of(code)
    refused = f"export: a {family} model can't be written"
    try:
        values = _small(json.loads(content))
        ours = from_hf_config(AutoConfig.for_model(family, **values), seed=0).backbone.eval()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for parameter in ours.parameters():
                if parameter.dim() > 1:
                    # Each path counts, and no score is so large that it would make much of rounding.
                    torch.nn.init.normal_(parameter, std=0.5 * values["hidden_size"] ** -0.5)
        ways = ["eager", "sdpa"] if module.BidirectionalModel._supports_sdpa else ["eager"]
        worst = 0.0
        for way in ways:
            theirs = module.BidirectionalModel(module.BidirectionalConfig(**values, attn_implementation=way)).eval()
            theirs.load_state_dict(ours.state_dict())
            worst = max([worst, *(_difference(ours, theirs, lengths) for lengths in _SHAPES)])
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{refused}: its code can't be proven on a small network of its kind ({first[0]})") from None
    if not worst <= TOLERANCE:
        raise UserError(f"{refused}: what transformers would compute differs from training by {worst:.1e}")


@torch.no_grad()
def _difference(ours: Any, theirs: Any, lengths: tuple[int, ...]) -> float:
    """The largest, for texts of these lengths; NaN is the largest of all."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(ours.config.vocab_size, (length,), generator=generator) for length in lengths]
    expected = encode(ours, torch.cat(texts), Segments.of(lengths, torch.device("cpu")), causal=False)
    found: list[Tensor] = []
    for left in (False, True):
        tokens = torch.zeros(len(texts), max(lengths), dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, text in enumerate(texts):
            place = slice(-len(text), None) if left else slice(0, len(text))
            tokens[row, place], mask[row, place] = text, 1
        given = None if bool(mask.all()) else mask
        hidden = theirs(input_ids=tokens, attention_mask=given).last_hidden_state[mask.bool()]
        found.append((hidden - expected).abs().max())
    worst = float(torch.stack(found).max())
    return float("inf") if worst != worst else worst


def _small(content: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a small network with every kind of layer, and whatever makes the family differ from others."""
    layers: int = content["num_hidden_layers"]
    kinds: list[str] = content.get("layer_types") or []
    # SmolLM3 rotates three layers of four.
    few = min(layers, max([4, *(kinds.index(kind) + 1 for kind in set(kinds))]))
    heads: int = content["num_attention_heads"]
    head_dim = content.get("head_dim") or content["hidden_size"] // heads
    grouped = (content.get("num_key_value_heads") or heads) < heads
    values = {
        name: value[:few] if isinstance(value, list) and len(value) == layers else value
        for name, value in content.items()
    }
    sizes = {
        "vocab_size": 64,
        "hidden_size": 4 * head_dim,
        "intermediate_size": 4 * head_dim,
        "num_hidden_layers": few,
        "num_attention_heads": 4,
        "num_key_value_heads": 2 if grouped else 4,
        "initializer_range": 0.1,
    }
    if "head_dim" in content:
        sizes["head_dim"] = head_dim
    if content.get("sliding_window"):
        sizes["sliding_window"] = 3  # less than the texts have
    return {**values, **sizes, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
