"""Reading a Composer checkpoint of ours without a Trainer: its weights and what the run recorded of itself."""

from __future__ import annotations

import importlib
import io
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

from biphasic.config.errors import UserError

RECORD = "RunRecord"
"""The callback that puts the run's own record into every checkpoint."""
_PREFIX = "model."
_SHARDED = "state.model."
"""Of weights in a sharded checkpoint."""
_PLAIN = {
    "numpy.dtype",
    "numpy.ndarray",
    "numpy._core.multiarray._reconstruct",
    "datetime.timedelta",
    "torch.torch_version.TorchVersion",
}
"""What Composer's checkpoints hold beside tensors: random states, wall-clock times, a version."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds that outlives the run.

    `weights` are named as in `LanguageModel`; `backbone` is a Hugging Face configuration as JSON; `record` is what
    `biphasic.training.record.RunRecord` wrote: the run's configuration, position, losses and command.
    """

    weights: dict[str, Tensor]
    record: dict[str, Any]

    @property
    def backbone(self) -> str:
        """The backbone's Hugging Face configuration, JSON."""
        return str(self.record["backbone"])


def is_checkpoint(path: str) -> bool:
    """Whether `path` looks like a checkpoint, and not like a folder of model files: a file, or a folder with DCP's index."""
    return Path(path).is_file() or (Path(path) / ".metadata").is_file()


def read_checkpoint(path: str) -> Checkpoint:
    """Read a checkpoint's weights, on the CPU, and its record.

    Args:
        path: the file of a monolithic checkpoint, or the folder of a sharded one.

    Raises:
        UserError: there is no checkpoint, it is incomplete, or it was not written by Biphasic.
    """
    state = _checked(path, {"state.model", "state.callbacks"})
    with _faults_of(path):
        record = _record_in(state)
        weights = {name.removeprefix(_PREFIX): weight for name, weight in state["model"].items()}
    return Checkpoint(weights, record)


def read_record(path: str) -> dict[str, Any]:
    """What the run recorded of itself, without the weights. Errors as for `read_checkpoint`."""
    state = _checked(path, {"state.callbacks"})
    with _faults_of(path):
        return _record_in(state)


def weight_shapes(path: str) -> dict[str, Tensor]:
    """A checkpoint's weights by name, on the meta device: shapes and dtypes, of which no byte is read.

    Errors as for `read_checkpoint`.
    """
    if not Path(path).is_dir():
        return {name: _on_meta(weight.shape, weight.dtype) for name, weight in _weights_of_file(path).items()}
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    _require_checkpoint(path)
    prefix = f"{_SHARDED}{_PREFIX}"
    with _faults_of(path):
        known = _index_of(Path(path)).state_dict_metadata
        found = {
            name.removeprefix(prefix): _on_meta(about.size, about.properties.dtype)
            for name, about in known.items()
            if name.startswith(prefix) and isinstance(about, TensorStorageMetadata)
        }
        if not found:
            raise KeyError("model")
    return found


def read_weights(path: str, names: Iterable[str]) -> dict[str, Tensor]:
    """Some of a checkpoint's weights, on the CPU: of a file, views into it as it is mapped; of a folder, read now.

    The file is mapped anew each time, so that what was read before goes when nobody holds it.

    Args:
        path: a checkpoint that `weight_shapes` has seen.
        names: of its weights.

    Raises:
        UserError: it is damaged or incomplete.
    """
    if not Path(path).is_dir():
        found = _weights_of_file(path)
        return {name: found[name] for name in names}
    with _faults_of(path):
        state = _read_sharded(Path(path), {f"{_SHARDED}{_PREFIX}{name}" for name in names})["model"]
        return {name: state[f"{_PREFIX}{name}"] for name in names}


def _record_in(state: dict[str, Any]) -> dict[str, Any]:
    # PyTorch's sharded format leaves out dictionaries that are empty.
    return {"data": {}, "losses": {}, "versions": {}} | dict(state["callbacks"])[RECORD]


def _checked(path: str, keys: set[str]) -> dict[str, Any]:
    """The state's parts `keys` (dotted names; a file gives all)."""
    _require_checkpoint(path)
    with _faults_of(path):
        return _read_sharded(Path(path), keys) if Path(path).is_dir() else _read_file(Path(path))


def _require_checkpoint(path: str) -> None:
    if not is_checkpoint(path):
        raise UserError(f"checkpoint {path}: no such file, and no folder with a .metadata file")
    require_plain(path)


@contextmanager
def _faults_of(path: str) -> Iterator[None]:
    """What goes wrong within, as the line that says it."""
    try:
        yield
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        text = str(error).strip() or type(error).__name__
        raise UserError(f"checkpoint {path}: is damaged or incomplete ({text.splitlines()[0]})") from None
    except KeyError as error:
        raise UserError(f"checkpoint {path}: was not written by a Biphasic run (it has no {error})") from None
    except (TypeError, IndexError, AttributeError):
        raise UserError(f"checkpoint {path}: was not written by a Biphasic run (it is no dictionary)") from None


def _weights_of_file(path: str) -> dict[str, Tensor]:
    state = _checked(path, set())
    with _faults_of(path):
        return {name.removeprefix(_PREFIX): weight for name, weight in state["model"].items()}


def _on_meta(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _read_file(path: Path) -> dict[str, Any]:
    if not is_zipfile(path):
        raise OSError("it is not what torch.save writes, or was cut off")
    with torch.serialization.safe_globals(_plain_objects()):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)["state"]


def _read_sharded(path: Path, keys: set[str]) -> dict[str, Any]:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    # What torch's own dcp_to_torch_save does, less what isn't asked for: an optimizer's moments are twice the weights.
    planner = _EmptyStateDictLoadPlanner(keys=keys)
    try:
        _load_state_dict(state, storage_reader=FileSystemReader(path), planner=planner, no_dist=True)
    except CheckpointException as error:  # not an Exception: nobody above would catch it
        cause, _ = next(iter(error.failures.values()))
        raise OSError(str(cause)) from None
    return state["state"]


def require_plain(path: str) -> None:
    """See that a checkpoint holds tensors and plain values only, without loading it: a pickle can run any code.

    Composer loads whatever is there, and PyTorch's sharded format unpickles its index and its small values, so this comes
    before either.

    Raises:
        UserError: it names something else, or can't be read.
    """
    place = Path(path)
    try:
        found = _globals_of_shards(place) if place.is_dir() else _globals_of(place)
    except (OSError, RuntimeError, EOFError, ValueError, LookupError, pickle.UnpicklingError) as error:
        text = str(error).strip() or type(error).__name__
        raise UserError(f"checkpoint {path}: is damaged or incomplete ({text.splitlines()[0]})") from None
    if found:
        raise UserError(f"checkpoint {path}: would run {', '.join(sorted(found))} when it is loaded; it isn't, and was not "
                        "written by a Biphasic run")  # fmt: skip


def _globals_of(file: Path | io.BytesIO) -> set[str]:
    """What a file of torch.save's names beside tensors and what Composer's own checkpoints hold."""
    if not is_zipfile(file):
        raise OSError("it is not what torch.save writes, or was cut off")
    if isinstance(file, io.BytesIO):
        file.seek(0)
    return set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - _PLAIN


class _Index(pickle.Unpickler):
    """Reads a sharded checkpoint's `.metadata`, which is made of PyTorch's own descriptions."""

    def find_class(self, module: str, name: str) -> Any:
        known = module.startswith(("torch.distributed.checkpoint.", "torch.distributed._shard."))
        known |= module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype))
        known |= (module, name) in (("collections", "OrderedDict"), ("torch.serialization", "_get_layout"))
        known |= (module, name) == ("torch.torch_version", "TorchVersion")
        # A description is a class; a function could be anything.
        if not known or (module.startswith("torch.distributed.") and not _is_description(module, name)):
            raise _Named(f"{module}.{name}")
        return super().find_class(module, name)


class _Named(Exception):
    pass


def _is_description(module: str, name: str) -> bool:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return isinstance(found, type)


def _index_of(folder: Path) -> Any:
    with (folder / ".metadata").open("rb") as file:
        return _Index(file).load()


def _globals_of_shards(folder: Path) -> set[str]:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    try:
        index = _index_of(folder)
    except _Named as named:
        return {str(named)}
    found: set[str] = set()
    small = {name for name, known in index.state_dict_metadata.items() if isinstance(known, BytesStorageMetadata)}
    for at, lies in index.storage_data.items():
        if at.fqn in small:
            with (folder / lies.relative_path).open("rb") as file:
                file.seek(lies.offset)
                found |= _globals_of(io.BytesIO(file.read(lies.length)))
    return found


def _plain_objects() -> list[Any]:
    parts = [one.rpartition(".") for one in sorted(_PLAIN)]
    named = [getattr(importlib.import_module(module), name) for module, _, name in parts]
    # PyTorch asks for the class of an array's dtype, too, which the pickle doesn't name.
    return [*named, type(np.dtype(np.uint32))]
