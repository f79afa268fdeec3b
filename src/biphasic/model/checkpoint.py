"""Read the weights and the run record of a checkpoint without a Trainer, and without running code from its pickles."""

from __future__ import annotations

import importlib
import io
import json
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np
import torch
from torch import Tensor

from biphasic.errors import UserError
from biphasic.storage import first_line, is_inside

RECORD_CALLBACK = "RunRecord"
"""Name of the callback that stores the run record in every checkpoint."""
_PREFIX = "model."
_SHARDED_PREFIX = "state.model."
"""Prefix of the weights in a sharded checkpoint."""
_PLAIN = {
    "numpy.dtype",
    "numpy.ndarray",
    "numpy._core.multiarray._reconstruct",
    "datetime.timedelta",
    "torch.torch_version.TorchVersion",
}
"""Types in Composer's checkpoints besides tensors, for RNG states, wall-clock times and a version."""


@dataclass(frozen=True)
class Checkpoint:
    """The parts of a checkpoint that are used after the run.

    Attributes:
        weights: weights by name, as in `LanguageModel`.
        record: the run's configuration, progress, losses and command, as stored by `biphasic.training.record.RunRecord`.
    """

    weights: dict[str, Tensor]
    record: dict[str, Any]

    @property
    def backbone(self) -> str:
        """The backbone's Hugging Face configuration, as JSON."""
        return str(self.record["backbone"])


def is_checkpoint(path: str) -> bool:
    """Return whether `path` is a file or a sharded checkpoint's folder, rather than a folder of model files."""
    return Path(path).is_file() or (Path(path) / ".metadata").is_file()


def read_checkpoint(path: str) -> Checkpoint:
    """Read a checkpoint's weights, on the CPU, and its record.

    Args:
        path: file of a monolithic checkpoint, or folder of a sharded one.

    Raises:
        UserError: the checkpoint is missing, incomplete, unsafe to load, or was not written by Biphasic.
    """
    state = _read_state(path, {"state.model", "state.callbacks"})
    with _reported_errors(path):
        return Checkpoint(_without_prefix(state["model"]), _record_in(state))


def read_record(path: str) -> dict[str, Any]:
    """Read a checkpoint's record without the weights. Raises the same errors as `read_checkpoint`."""
    state = _read_state(path, {"state.callbacks"})
    with _reported_errors(path):
        return _record_in(state)


def weight_shapes(path: str) -> dict[str, Tensor]:
    """Return a checkpoint's weights by name as meta tensors, which have shapes and dtypes but no data.

    Raises the same errors as `read_checkpoint`.
    """
    if not Path(path).is_dir():
        return {name: torch.empty_like(weight, device="meta") for name, weight in _file_weights(path).items()}
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    _require_checkpoint(path)
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


def read_weights(path: str, names: Iterable[str]) -> dict[str, Tensor]:
    """Read some of a checkpoint's weights, on the CPU.

    Each call memory-maps a file anew, so its memory is freed together with the returned weights.

    Args:
        path: a checkpoint that `weight_shapes` has accepted.
        names: names of the weights to read.

    Raises:
        UserError: the checkpoint is damaged or incomplete.
    """
    if not Path(path).is_dir():
        weights = _file_weights(path)
        return {name: weights[name] for name in names}
    with _reported_errors(path):
        state = _read_sharded(Path(path), {f"{_SHARDED_PREFIX}{_PREFIX}{name}" for name in names})["model"]
        return {name: state[f"{_PREFIX}{name}"] for name in names}


def _record_in(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(state["callbacks"][RECORD_CALLBACK]["record"])


def _without_prefix(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(_PREFIX): weight for name, weight in weights.items()}


def _read_state(path: str, keys: set[str]) -> dict[str, Any]:
    """Read the parts of a sharded checkpoint's state with these keys (dotted names), or all of a monolithic one's state."""
    _require_checkpoint(path)
    with _reported_errors(path):
        return _read_sharded(Path(path), keys) if Path(path).is_dir() else _read_file(Path(path))


def _require_checkpoint(path: str) -> None:
    if not is_checkpoint(path):
        raise UserError(f"checkpoint {path}: no such file, and no folder with a .metadata file")
    require_safe_checkpoint(path)


@contextmanager
def _reported_errors(path: str) -> Iterator[None]:
    """Convert errors in reading a checkpoint to a one-line UserError."""
    try:
        yield
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"checkpoint {path}: is damaged or incomplete ({first_line(error)})") from None
    except KeyError as error:
        raise UserError(f"checkpoint {path}: was not written by a Biphasic run (it has no {error})") from None
    except (TypeError, ValueError, IndexError, AttributeError):
        raise UserError(f"checkpoint {path}: was not written by a Biphasic run (it is not a dictionary)") from None


def _file_weights(path: str) -> dict[str, Tensor]:
    state = _read_state(path, set())
    with _reported_errors(path):
        return _without_prefix(state["model"])


def _read_file(path: Path) -> dict[str, Any]:
    _require_zip(path)
    with torch.serialization.safe_globals(_plain_objects()):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)["state"]


def _read_sharded(path: Path, keys: set[str]) -> dict[str, Any]:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    # Like torch's dcp_to_torch_save, but for the given keys only: the optimizer state is twice as large as the weights.
    planner = _EmptyStateDictLoadPlanner(keys=keys)
    try:
        _load_state_dict(state, storage_reader=FileSystemReader(path), planner=planner, no_dist=True)
    except CheckpointException as error:  # a BaseException, which callers would not catch
        cause, _ = next(iter(error.failures.values()))
        raise OSError(str(cause)) from None
    return state["state"]


def require_safe_checkpoint(path: str) -> None:
    """Check that a checkpoint contains only tensors and plain values, without loading it: a pickle can run any code.

    Call this before Composer loads a checkpoint, because Composer allows any pickle, and before PyTorch reads a sharded one,
    whose index and small values are pickles.

    Raises:
        UserError: the checkpoint contains other objects, or can't be read.
    """
    local = Path(path)
    try:
        names = _sharded_globals(local) if local.is_dir() else _globals_in(local)
    except (OSError, RuntimeError, EOFError, ValueError, LookupError, pickle.UnpicklingError) as error:
        raise UserError(f"checkpoint {path}: is damaged or incomplete ({first_line(error)})") from None
    if names:
        raise UserError(
            f"checkpoint {path}: loading it would run {', '.join(sorted(names))}: refused, since no Biphasic run wrote it"
        )


def _require_zip(file: Path | io.BytesIO) -> None:
    if not is_zipfile(file):
        raise OSError("it is not what torch.save writes, or was cut off")


def _globals_in(file: Path | io.BytesIO) -> set[str]:
    """Return the names of objects in a torch.save file other than tensors and the types in `_PLAIN`."""
    _require_zip(file)
    if isinstance(file, io.BytesIO):
        file.seek(0)
    return set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - _PLAIN


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler for a sharded checkpoint's `.metadata` that allows only PyTorch classes that describe the contents."""

    def find_class(self, module: str, name: str) -> Any:
        known = module.startswith(("torch.distributed.checkpoint.", "torch.distributed._shard."))
        known |= module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype))
        known |= (module, name) in (("collections", "OrderedDict"), ("torch.serialization", "_get_layout"))
        known |= (module, name) == ("torch.torch_version", "TorchVersion")
        # Only classes are allowed, because a function could do anything.
        if not known or (module.startswith("torch.distributed.") and not _is_class(module, name)):
            raise _UnsafeGlobalError(f"{module}.{name}")
        return super().find_class(module, name)


class _UnsafeGlobalError(Exception):
    pass


def _is_class(module: str, name: str) -> bool:
    value: Any = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return isinstance(value, type)


def _read_index(folder: Path) -> Any:
    with (folder / ".metadata").open("rb") as file:
        return _IndexUnpickler(file).load()


def _sharded_globals(folder: Path) -> set[str]:
    """Return the unsafe names in a sharded checkpoint's index and small values."""
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
                names |= _globals_in(io.BytesIO(file.read(location.length)))
    return names


def _plain_objects() -> list[Any]:
    parts = [name.rpartition(".") for name in sorted(_PLAIN)]
    objects = [getattr(importlib.import_module(module), name) for module, _, name in parts]
    # PyTorch also checks the class of an array's dtype, although the pickle doesn't name it.
    return [*objects, type(np.dtype(np.uint32))]
