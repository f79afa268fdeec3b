"""Export formats of a network: EuroBERT's or ModernBERT's, which need no code, or the decoder family's with a Python file.

The Python file makes the family's attention bidirectional. Its model type is separate, because a folder with the family's
own model type would also load without that file, as a causal decoder.
"""

import functools
import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from biphasic.data.tokenizer import Tokenizer
from biphasic.errors import UserError
from biphasic.model.architecture import MODERNBERT_HEADS
from biphasic.model.forward import packed_forward
from biphasic.model.hf_config import BIDIRECTIONAL, BIDIRECTIONAL_CODE
from biphasic.model.language_model import from_hf_config
from biphasic.model.segments import Segments
from biphasic.storage import user_errors

TOLERANCE = 1e-4
"""Largest allowed difference between the hidden states of the exported code and of training, on a small network."""
_LLAMA_SHAPED = ("llama", "eurobert", "mistral")
"""Families whose layers have the same parameters as EuroBERT's."""
_DIMENSIONS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "rms_norm_eps", "rope_parameters", "initializer_range", "hidden_act", "tie_word_embeddings",
)  # fmt: skip
LOADED_BY_4 = (
    *("cohere", "cohere2", "gemma2", "gemma3_text", "granite", "llama", "ministral", "mistral", "olmo2", "olmo3"),
    *("phi", "phi3", "qwen2", "qwen3", "smollm3"),
)
"""Decoder families whose exports were measured in transformers 4.57.6 too (tests/export/test_transformers4.py)."""
_NO_PERIOD = {"not_supported": "see layer_types and rope_parameters"}
"""Period of a ModernBERT that older software can't compute: an error in it. llama.cpp would take 3 for null."""
_TEMPLATE = Path(__file__).with_name("bidirectional_template.py")
_MODULE = BIDIRECTIONAL_CODE.partition(".")[0]
_NOT_KEPT = ("architectures", "auto_map", "model_type", "transformers_version", "dtype", "use_cache")
Kind = Literal["Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"]
"""The network to export, by the end of its class's name: the bare encoder, or the encoder with a head."""
_KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Format:
    """The export format of a network."""

    config: Any
    """The network's Hugging Face configuration."""
    classes: Mapping[Kind, Any]
    files: Mapping[str, str] = field(default_factory=dict)
    """Contents of additional files in the folder, by file name."""
    rename: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict
    """Returns stored weights as the network has them."""
    keeps_special_tokens: bool = False
    """Whether the tokenizer goes on adding its special tokens to a text, because the model was trained with them."""

    @property
    def family(self) -> str:
        """The `model_type` of the family's own classes."""
        return self.config.model_type.removeprefix(BIDIRECTIONAL)


def add_older_keys(folder: Path) -> None:
    """Add to a folder's config.json what transformers 4 reads in place of `rope_parameters` and `layer_types`.

    Without these keys it takes its own defaults, without a message. text-embeddings-inference reads ModernBERT's too.
    """
    file = folder / "config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    full, local = _ropes(content.get("rope_parameters"))
    if content["model_type"] == "modernbert":
        kinds = content["layer_types"]
        globals_ = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
        period = next(iter(globals_[1:]), len(kinds))
        plain = all(rope == {"rope_type": "default", "rope_theta": rope["rope_theta"]} for rope in (full, local))
        every = period if plain and globals_ == [*range(0, len(kinds), period)] else _NO_PERIOD
        thetas = {"global_rope_theta": full["rope_theta"], "local_rope_theta": local["rope_theta"]}
        # vLLM and llama.cpp read the older name of `norm_eps`, as the hub's first ModernBERT has it too.
        content |= {"global_attn_every_n_layers": every, "layer_norm_eps": content["norm_eps"], **thetas}
    elif "rope_theta" in full:
        # Without `rope_scaling`, with which AutoTokenizer fails in transformers 5: see bidirectional_template.py.
        content["rope_theta"] = full["rope_theta"]
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _ropes(parameters: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rotary positions of layers with full and with sliding attention."""
    parameters = parameters or {}
    return parameters.get("full_attention") or parameters, parameters.get("sliding_attention") or parameters


def choose_format(config: Any, tokenizer: Tokenizer) -> Format:
    """Return EuroBERT's format if it can represent the network of this Hugging Face configuration, else the family's.

    The tokenizer's special tokens are written into the format's configuration. A family's code is verified on a small
    network with the same configuration. Raises a UserError if neither format can represent the network.
    """
    special = {f"{role}_token_id": token for role, token in tokenizer.role_ids.items()}
    shaped = config.model_type in _LLAMA_SHAPED and not getattr(config, "sliding_window", None)
    biases = getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)
    if shaped and not biases and config.rope_parameters["rope_type"] == "default":
        content: dict[str, Any] = {**{name: getattr(config, name) for name in _DIMENSIONS}, **special}
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        written = transformers.EuroBertConfig(**content, head_dim=head_dim, classifier_pooling="mean")
        return Format(written, {kind: getattr(transformers, f"EuroBert{kind}") for kind in _KINDS})
    if config.model_type in MODERNBERT_HEADS:
        return _modernbert_format(config, special)
    if config.model_type == "eurobert":
        raise UserError("export: a eurobert model with rope scaling or biases can't be written as a plain eurobert one")
    return _bidirectional_format(config, special)


def _modernbert_format(config: Any, special: dict[str, int | None]) -> Format:
    """Return the format of ModernBERT's own encoder, for its decoder too: both have the same layers.

    The decoder's queries, keys and values are separate weights. In its local layers tokens attend to tokens closer than
    `local_attention // 2`, in the encoder's also to those at this distance.
    """
    known, is_decoder = transformers.ModernBertConfig().to_dict(), config.model_type != "modernbert"
    content = {name: value for name, value in config.to_dict().items() if name in known and name not in _NOT_KEPT}
    content |= special | {"cls_token_id": special["bos_token_id"], "sep_token_id": special["eos_token_id"]}
    if is_decoder:
        content["local_attention"] = 2 * (config.sliding_window - 1)

    def rename(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weights, renamed = {re.sub(r"^lm_head\.", "decoder.", name): weights[name] for name in weights}, {}
        for name, weight in weights.items():
            if is_decoder and "q_proj" in name:
                parts = [weights[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
                renamed[name.replace("q_proj", "Wqkv")] = torch.cat(parts)
            elif not is_decoder or not re.search(r"\b[kv]_proj\b", name):
                renamed[name] = weight
        return renamed

    written = transformers.ModernBertConfig(**content)
    classes: Any = {"Model": transformers.ModernBertModel, "ForMaskedLM": transformers.ModernBertForMaskedLM}
    return Format(written, classes, rename=rename, keeps_special_tokens=True)


def _bidirectional_format(config: Any, special: dict[str, int | None]) -> Format:
    code = _code_of(config)
    module = _module_of(code)
    not_kept = (*_NOT_KEPT, *special)
    own = config.to_diff_dict().items()
    content = {name: value for name, value in own if name not in not_kept and name[0] != "_"}
    _require_equal_results(json.dumps(content, sort_keys=True), config.model_type, code)
    written = module.BidirectionalConfig(**content, **special, use_cache=False)
    written.auto_map = {"AutoConfig": BIDIRECTIONAL_CODE}
    for kind in _KINDS:
        written.auto_map[f"AutoModel{kind.removeprefix('Model')}"] = f"{_MODULE}.Bidirectional{kind}"
    classes: dict[Kind, Any] = {kind: getattr(module, f"Bidirectional{kind}") for kind in _KINDS}
    return Format(written, classes, {f"{_MODULE}.py": code})


def _code_of(config: Any) -> str:
    """Return the template's code with the transformers classes of the configuration's family."""
    family = config.model_type
    refused = f"export: a {family} model can't be written"
    if unknown := set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        raise UserError(f"{refused}: it has layers of unknown kinds: {', '.join(sorted(unknown))}")
    if type(config) not in transformers.MODEL_MAPPING:
        raise UserError(f"{refused}: its network is not one of transformers' own")
    network: Any = transformers.MODEL_MAPPING[type(config)]
    bases = [base.__name__ for base in network.__mro__ if base.__name__.endswith("PreTrainedModel")]
    names = {"Config": type(config).__name__, "Model": network.__name__, "PreTrainedModel": bases[0]}
    code = _TEMPLATE.read_text(encoding="utf-8")
    for part, name in names.items():
        if not hasattr(transformers, name):
            raise UserError(f"{refused}: transformers doesn't export its {name}")
        code = code.replace(f"import Llama{part} as", f"import {name} as")
    full, local = _ropes(getattr(config, "rope_parameters", None))
    # There, layers with sliding attention have no scaling, and only Gemma 3's a base of their own.
    same_base = family == "gemma3_text" or local.get("rope_theta") == full.get("rope_theta")
    fits = local is full or (local["rope_type"] == "default" and same_base)
    if family in LOADED_BY_4 and full.get("rope_type") in ("default", "linear", "llama3", "yarn") and fits:
        code = code.replace("OLDEST = (5, 0)", "OLDEST = (4, 57)")
    return code.replace('FAMILY = "llama"', f'FAMILY = "{family}"')


@functools.cache
def _module_of(code: str) -> ModuleType:
    """Execute the code as a module, so that the exported classes are those that were verified."""
    module = ModuleType(f"_biphasic_bidirectional_{hashlib.sha256(code.encode()).hexdigest()[:16]}")
    sys.modules[module.__name__] = module
    exec(code, module.__dict__)
    return module


@functools.cache
def _require_equal_results(content: str, family: str, code: str) -> None:
    """Compare the code's hidden states, padded left and right, with training's on a small network."""
    module = _module_of(code)
    refused = f"export: a {family} model can't be written"
    errors = (RuntimeError, ValueError, TypeError, AttributeError, KeyError)
    with user_errors(f"{refused}: its code can't be verified on a small network", *errors):
        values = _small(json.loads(content))
        trained = from_hf_config(transformers.AutoConfig.for_model(family, **values), seed=0).backbone.eval()
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
            largest = max([largest, *(_difference(trained, written, lengths) for lengths in ((9, 4, 1), (6, 6)))])
    if not largest <= TOLERANCE:
        raise UserError(f"{refused}: the results of transformers would differ from training's by {largest:.1e}")


@torch.no_grad()
def _difference(trained: Any, written: Any, lengths: tuple[int, ...]) -> float:
    """Return the largest difference between hidden states for texts of these lengths; infinite for a NaN."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(trained.config.vocab_size, (length,), generator=generator) for length in lengths]
    expected = packed_forward(trained, torch.cat(texts), Segments.of(lengths, torch.device("cpu")), causal=False)
    largest = 0.0
    for side in ("right", "left"):
        tokens = pad_sequence(texts, batch_first=True, padding_side=side)
        mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True, padding_side=side)
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
    of_layers = [name for name, value in content.items() if isinstance(value, list) and len(value) == layers]
    small = {**content, **{name: content[name][:few] for name in of_layers}}
    small |= {"vocab_size": 64, "num_hidden_layers": few, "initializer_range": 0.1}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2 if grouped else 4}
    small |= dict.fromkeys(("hidden_size", "intermediate_size"), 4 * head_dim)
    small |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    if "head_dim" in content:
        small["head_dim"] = head_dim
    if content.get("sliding_window"):
        small["sliding_window"] = 3  # shorter than the texts
    return small
