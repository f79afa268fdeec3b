"""Read the weights and the run record of a checkpoint without a Trainer, and without running code from its pickles."""

import io
import json
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy._core.multiarray import _reconstruct  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor
from torch.torch_version import TorchVersion

from biphasic.errors import UserError, first_line
from biphasic.storage import is_inside, user_errors

_PREFIX = "model."
_SHARDED_PREFIX = "state.model."
"""Prefix of the weights in a sharded checkpoint."""
# Besides tensors, Composer's checkpoints have RNG states, wall-clock times and a version. PyTorch also checks the class
# of an array's dtype, although the pickle doesn't name it.
_PLAIN_TYPES: list[Any] = [np.dtype, np.ndarray, _reconstruct, type(np.dtype(np.uint32)), timedelta, TorchVersion]
_METADATA_TYPES = (
    *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
    *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
_INDEX_GLOBALS = {
    *(f"torch.distributed.checkpoint.metadata.{name}" for name in _METADATA_TYPES),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    *("torch.Size", "torch.serialization._get_layout", "torch.torch_version.TorchVersion", "collections.OrderedDict"),
}
"""Names in the pickle of a sharded checkpoint's `.metadata`, besides dtypes."""


def is_checkpoint(path: str) -> bool:
    """Return whether `path` is a file or a sharded checkpoint's folder, rather than a folder of model files."""
    return Path(path).is_file() or (Path(path) / ".metadata").is_file()


def require_no_checkpoints(path: str) -> None:
    """Raise a UserError if a model's folder is a run's folder, or its folder of checkpoints."""
    folders = [] if (Path(path) / "config.json").exists() else [Path(path), Path(path) / "checkpoints"]
    if found := [file for folder in folders for name in ("*.pt", "*/.metadata") for file in folder.glob(name)]:
        newest = max(found, key=lambda file: file.stat().st_mtime)
        one = newest.parent if newest.name == ".metadata" else newest
        raise UserError(f"model {path}: holds checkpoints; expected one of them, such as {one}, or an exported folder")


def read_record(path: str) -> dict[str, Any]:
    """Read the run record (`biphasic.training.record.RunRecord`) of a checkpoint: a file, or a sharded one's folder.

    Raises a UserError if the checkpoint is missing, incomplete, unsafe to load, or was not written by Biphasic.
    """
    require_safe_checkpoint(path)
    with _reported_errors(path):
        return json.loads(_read_state(Path(path), {"state.callbacks"})["callbacks"]["RunRecord"]["record"])


def read_weights(path: str, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Read a checkpoint's weights by their names in `LanguageModel`, on the CPU. Raises UserErrors as `read_record` does.

    With `names`, only these weights are read, and the checkpoint must have been checked by `weight_shapes` before. Each
    call memory-maps a file anew, so its memory is freed together with the returned weights.
    """
    if names is None:
        require_safe_checkpoint(path)
        keys = {"state.model"}
    else:
        names = list(names)
        keys = {f"{_SHARDED_PREFIX}{_PREFIX}{name}" for name in names}
    with _reported_errors(path):
        weights = _read_state(Path(path), keys)["model"]
        weights = {name.removeprefix(_PREFIX): weight for name, weight in weights.items()}
        return weights if names is None else {name: weights[name] for name in names}


def weight_shapes(path: str) -> dict[str, Tensor]:
    """Return a checkpoint's weights by name as meta tensors, without data. Raises UserErrors as `read_record` does."""
    if not Path(path).is_dir():
        return {name: torch.empty_like(weight, device="meta") for name, weight in read_weights(path).items()}
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    require_safe_checkpoint(path)
    with _reported_errors(path):
        prefix = f"{_SHARDED_PREFIX}{_PREFIX}"
        shapes = {
            name.removeprefix(prefix): torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for name, entry in _read_index(Path(path)).state_dict_metadata.items()
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }
        if not shapes:
            raise KeyError("model")
    return shapes


def require_safe_checkpoint(path: str) -> None:
    """Raise a UserError if a checkpoint is missing, unreadable, or has more than tensors and plain values.

    A pickle can run any code. Call this before Composer loads a checkpoint, because Composer allows any pickle, and before
    PyTorch reads a sharded checkpoint, because its index and small values are pickles.
    """
    if not is_checkpoint(path):
        found = "holds no checkpoint" if Path(path).is_dir() else "is not there"
        expected = "expected a .pt file, the folder of a sharded checkpoint (with .metadata), or a run's folder"
        raise UserError(f"checkpoint {path}: {found}; {expected}")
    local = Path(path)
    kinds = (RuntimeError, EOFError, ValueError, LookupError, pickle.UnpicklingError)
    with user_errors(f"checkpoint {path}: is damaged or incomplete", *kinds):
        names = _sharded_globals(local) if local.is_dir() else _unsafe_globals(local)
    if names:
        problem = f"loading it would run {', '.join(sorted(names))}: refused, since no Biphasic run wrote it"
        raise UserError(f"checkpoint {path}: {problem}")


@contextmanager
def _reported_errors(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"checkpoint {path}: is damaged or incomplete ({first_line(error)})") from None
    except KeyError as error:
        raise UserError(f"checkpoint {path}: was not written by a Biphasic run (it has no {error})") from None
    except (TypeError, ValueError, IndexError, AttributeError):
        raise UserError(f"checkpoint {path}: was not written by a Biphasic run (it is not a dictionary)") from None


def _read_state(path: Path, keys: set[str]) -> dict[str, Any]:
    """Read a checkpoint's state; from a sharded checkpoint, only the parts with these keys (dotted names)."""
    if not path.is_dir():
        with torch.serialization.safe_globals(_PLAIN_TYPES):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)["state"]
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    # As torch's dcp_to_torch_save, but without the optimizer state, which is twice as large as the weights.
    planner = _EmptyStateDictLoadPlanner(keys=keys)
    try:
        _load_state_dict(state, storage_reader=FileSystemReader(path), planner=planner, no_dist=True)
    except CheckpointException as error:  # a BaseException, which callers would not catch
        cause, _ = next(iter(error.failures.values()))
        raise OSError(str(cause)) from None
    return state["state"]


def _unsafe_globals(file: Path | io.BytesIO) -> set[str]:
    with torch.serialization.safe_globals(_PLAIN_TYPES):
        return set(torch.serialization.get_unsafe_globals_in_checkpoint(file))


class _UnsafeGlobalError(Exception):
    pass


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler for a sharded checkpoint's `.metadata` that allows only `_INDEX_GLOBALS` and dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and f"{module}.{name}" not in _INDEX_GLOBALS:
            raise _UnsafeGlobalError(f"{module}.{name}")
        return super().find_class(module, name)


def _read_index(folder: Path) -> Any:
    with (folder / ".metadata").open("rb") as file:
        return _IndexUnpickler(file).load()


def _sharded_globals(folder: Path) -> set[str]:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    try:
        index = _read_index(folder)
    except _UnsafeGlobalError as error:
        return {str(error)}
    names: set[str] = set()
    for key, location in index.storage_data.items():
        if not is_inside(location.relative_path):
            raise ValueError(f".metadata names {location.relative_path!r}, which leads out of the checkpoint")
        if isinstance(index.state_dict_metadata.get(key.fqn), BytesStorageMetadata):
            with (folder / location.relative_path).open("rb") as file:
                file.seek(location.offset)
                names |= _unsafe_globals(io.BytesIO(file.read(location.length)))
    return names
