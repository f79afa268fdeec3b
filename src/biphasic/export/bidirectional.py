"""Export format for decoder families other than Llama's: a separate model type and a Python file in the exported folder.

The Python file makes attention bidirectional. The model type is separate because a folder with the family's own model type
would also load without that file, as a causal decoder.
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

from biphasic.data.tokenizer import Tokenizer
from biphasic.errors import UserError
from biphasic.export.formats import Format, Kind, special_token_ids
from biphasic.model.backbone import BIDIRECTIONAL, BIDIRECTIONAL_CODE
from biphasic.model.forward import packed_forward
from biphasic.model.initialization import from_hf_config
from biphasic.model.segments import Segments
from biphasic.storage import first_line

_MODULE = BIDIRECTIONAL_CODE.partition(".")[0]
"""The module's name in an exported folder."""
TOLERANCE = 1e-4
"""Largest allowed difference between the hidden states of the exported code and of training, on a small network."""
_TEMPLATE = Path(__file__).with_name("bidirectional_template.py")
_CLASSES: dict[Kind, str] = {
    "model": "Model",
    "masked_lm": "ForMaskedLM",
    "sequence": "ForSequenceClassification",
    "token": "ForTokenClassification",
}
"""Suffixes of the class names."""
_NOT_KEPT = ("architectures", "auto_map", "model_type", "transformers_version", "dtype", "use_cache")
_TEST_LENGTHS = ((9, 4, 1), (6, 6))


def bidirectional_format(config: Any, tokenizer: Tokenizer) -> Format:
    """Return the export format for a decoder family, verified on a small network with the same configuration.

    Args:
        config: the backbone's Hugging Face configuration.
        tokenizer: the encoder's tokenizer.

    Raises:
        UserError: the family has layers of an unknown kind, or its results differ from those of training.
    """
    code = _code_of(config)
    module = _module_of(code)
    special = special_token_ids(tokenizer)
    content = {
        name: value
        for name, value in config.to_diff_dict().items()
        if name not in _NOT_KEPT and name not in special and name[0] != "_"
    }
    _require_equal_results(json.dumps(content, sort_keys=True), config.model_type, code)
    written = module.BidirectionalConfig(**content, **special, use_cache=False)
    names: dict[Kind, str] = {kind: f"Bidirectional{name}" for kind, name in _CLASSES.items()}
    written.auto_map = {"AutoConfig": BIDIRECTIONAL_CODE}
    for kind, name in names.items():
        written.auto_map["AutoModel" + _CLASSES[kind].removeprefix("Model")] = f"{_MODULE}.{name}"
    classes: dict[Kind, Any] = {kind: getattr(module, name) for kind, name in names.items()}
    return Format(f"{BIDIRECTIONAL}{config.model_type}", written, classes, {f"{_MODULE}.py": code})


def _code_of(config: Any) -> str:
    """Return the template's code with the transformers classes of the configuration's family."""
    import transformers
    from transformers import MODEL_MAPPING

    family = config.model_type
    refused = f"export: a {family} model can't be written"
    unknown = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UserError(f"{refused}: it has layers of unknown kinds: {', '.join(sorted(unknown))}")
    if type(config) not in MODEL_MAPPING:
        raise UserError(f"{refused}: its network is not one of transformers' own")
    network: Any = MODEL_MAPPING[type(config)]
    bases = [base.__name__ for base in network.__mro__ if base.__name__.endswith("PreTrainedModel")]
    names = {"Config": type(config).__name__, "Model": network.__name__, "PreTrainedModel": bases[0]}
    for name in names.values():
        if not hasattr(transformers, name):
            raise UserError(f"{refused}: transformers doesn't export its {name}")
    code = _TEMPLATE.read_text(encoding="utf-8")
    for part, name in names.items():
        code = code.replace(f"import Llama{part} as", f"import {name} as")
    return code.replace('FAMILY = "llama"', f'FAMILY = "{family}"')


@functools.cache
def _module_of(code: str) -> ModuleType:
    """Import the code as a module, so that the exported classes are the ones that were verified."""
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
def _require_equal_results(content: str, family: str, code: str) -> None:
    """Compare the code's hidden states, for left and right padding, with those of training's attention on a small network.

    Raises:
        UserError: the hidden states differ, or no such small network can be built.
    """
    from transformers import AutoConfig

    module = _module_of(code)
    refused = f"export: a {family} model can't be written"
    try:
        values = _small(json.loads(content))
        trained = from_hf_config(AutoConfig.for_model(family, **values), seed=0).backbone.eval()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for parameter in trained.parameters():
                if parameter.dim() > 1:
                    # Weights are large enough that every path matters, and small enough that scores don't amplify rounding.
                    torch.nn.init.normal_(parameter, std=0.5 * values["hidden_size"] ** -0.5)
        largest = 0.0
        for implementation in ["eager", "sdpa"] if module.BidirectionalModel._supports_sdpa else ["eager"]:
            config = module.BidirectionalConfig(**values, attn_implementation=implementation)
            written = module.BidirectionalModel(config).eval()
            written.load_state_dict(trained.state_dict())
            largest = max([largest, *(_difference(trained, written, lengths) for lengths in _TEST_LENGTHS)])
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(f"{refused}: its code can't be verified on a small network ({first_line(error)})") from None
    if not largest <= TOLERANCE:
        raise UserError(f"{refused}: the results of transformers would differ from training's by {largest:.1e}")


@torch.no_grad()
def _difference(trained: Any, written: Any, lengths: tuple[int, ...]) -> float:
    """Return the largest difference between hidden states for texts of these lengths; infinite if there is a NaN."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(trained.config.vocab_size, (length,), generator=generator) for length in lengths]
    segments = Segments.of(lengths, torch.device("cpu"))
    expected = packed_forward(trained, torch.cat(texts), segments, causal=False)
    largest = 0.0
    for side in ("right", "left"):
        tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_side=side)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(t) for t in texts], batch_first=True, padding_side=side)
        output = written(input_ids=tokens, attention_mask=None if bool(mask.all()) else mask)
        difference = (output.last_hidden_state[mask.bool()] - expected).abs().max().nan_to_num(float("inf"))
        largest = max(largest, float(difference))
    return largest


def _small(content: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a small network that keeps every kind of layer and the family's other features."""
    layers: int = content["num_hidden_layers"]
    kinds: list[str] = content.get("layer_types") or []
    # At least four layers, because SmolLM3 has no rotary positions in every fourth layer.
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
        sizes["sliding_window"] = 3  # shorter than the texts
    return {**values, **sizes, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
