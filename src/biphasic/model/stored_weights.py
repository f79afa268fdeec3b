"""What names and small files of a model's folder show about its weights, before they are loaded.

Imports neither torch nor transformers, so that plans say what the start would.
"""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Where transformers looks for weights, in its order."""
_OTHER_FORMATS = ("*.gguf", "*.onnx", "onnx/*.onnx")
_MERGE = "merge it into its base model (merge_and_unload of peft), and save that"


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if there is no such file, or something else is in it."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError, OSError):
        return {}


def weights_problem(path: str) -> str | None:
    """Return why the weights in a local folder of model files can't be loaded; None if nothing shows it, or elsewhere."""
    try:
        problem = _problem(Path(path), read_json(Path(path, "config.json")))
    except (OSError, ValueError, TypeError, AttributeError):  # loading gives the error
        return None
    return None if problem is None else f"model {path}: {problem}"


def _problem(folder: Path, config: dict[str, Any]) -> str | None:
    if "transformers_weights" in config:  # files of other names
        return None
    file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if file is None:
        return _without_weights(folder, config)
    names, shards = list[str](), [file.name]
    if file.suffix == ".json":
        of_weights: dict[str, str] = read_json(file).get("weight_map", {})
        names, shards = list(of_weights), sorted(set(of_weights.values()))
    for shard in shards:
        if not (folder / shard).is_file():
            return f"its {file.name} names {shard}, which isn't there: copy all files of the model"
        with (folder / shard).open("rb") as opened:
            if opened.read(8) == b"version ":
                return f"{shard} is a pointer of Git LFS instead of weights: fetch them with git lfs pull"
    if file.suffix == ".safetensors":
        names = list(_header(file))
    # A model's own code may give any names.
    return (None if "auto_map" in config else names_problem(names)) or quantized_problem(folder, config)


def _header(file: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: by name, the type, shape and place of each weight."""
    with file.open("rb") as opened:  # a header has at most 100 MB; other files begin with any number
        header = json.loads(opened.read(min(int.from_bytes(opened.read(8), "little"), 10**8)))
    return {name: weight for name, weight in header.items() if name != "__metadata__"}


def quantized_problem(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return why a folder's weights can't be read as numbers: they are quantized, and its config.json doesn't say how.

    Reads the headers of its safetensors files, except those that are damaged, which loading reports.
    """
    if config.get("quantization_config"):
        return None
    for file in sorted([*folder.glob("model.safetensors"), *folder.glob("model-*.safetensors")]):
        with suppress(OSError, ValueError):
            for name, weight in sorted(_header(file).items()):
                # Buffers may have other types. Experts' weights are called `experts.down_proj`.
                if name.endswith(("weight", "_proj")) and weight["dtype"] not in ("F64", "F32", "F16", "BF16"):
                    stored = f"{name} in {file.name} has type {weight['dtype']}, and config.json has no quantization_config"
                    return f"{stored}: expected weights in F32, F16 or BF16; dequantize the model first"
    return None


def _without_weights(folder: Path, config: dict[str, Any]) -> str | None:
    if (adapter := folder / "adapter_config.json").is_file():
        base = read_json(adapter).get("base_model_name_or_path")
        return f"is an adapter of {base}, without that model's weights: {_MERGE}"
    if not config and (folder / "modules.json").is_file():
        for nested in sorted(folder.glob("*/config.json")):
            if "model_type" in read_json(nested):  # and not a pooling's
                return f"has no config.json, and the network of its modules.json is in {nested.parent}: name that folder"
    expected = "expected model.safetensors or pytorch_model.bin, or an index of their parts"
    others = [str(file.relative_to(folder)) for pattern in _OTHER_FORMATS for file in sorted(folder.glob(pattern))]
    if others:
        return f"has weights in {others[0]} only, which can't be read: {expected}"
    return f"has no weights: {expected}" if config else None  # without config.json it may be anything


def names_problem(names: Iterable[str]) -> str | None:
    """Return why weights of these names aren't those of a network itself, but of one in a wrapper or with an adapter."""
    names = list(names)
    wrapper = re.match(r"((_orig_mod|module)\.)+", min(names, default=""))
    if wrapper is not None and all(name.startswith(wrapper[0]) for name in names):
        advice = "save the network that is wrapped, or remove this from the names"
        return f"all names of its weights begin with {wrapper[0]} (of torch.compile or DistributedDataParallel): {advice}"
    if adapted := [name for name in names if ".lora_A." in name or ".base_layer." in name]:
        return f"its weights have an adapter beside them, e.g. {min(adapted)}: {_MERGE}"
    return None
