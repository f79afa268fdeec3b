"""Reading a Composer checkpoint of ours without a Trainer: its weights and what the run recorded of itself."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch import Tensor

from biphasic.config.errors import UserError

RECORD = "RunRecord"
"""The callback that puts the run's own record into every checkpoint."""
_PREFIX = "model."


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
    if not is_checkpoint(path):
        raise UserError(f"checkpoint {path}: no such file, and no folder with a .metadata file")
    try:
        state = _read_sharded(Path(path)) if Path(path).is_dir() else _read_file(Path(path))
        record = dict(state["callbacks"])[RECORD]
        weights = {name.removeprefix(_PREFIX): weight for name, weight in state["model"].items()}
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"checkpoint {path}: is damaged or incomplete ({str(error).splitlines()[0]})") from None
    except KeyError as error:
        raise UserError(f"checkpoint {path}: was not written by a Biphasic run (it has no {error})") from None
    except (TypeError, IndexError):
        raise UserError(f"checkpoint {path}: was not written by a Biphasic run (it is no dictionary)") from None
    return Checkpoint(weights, record)


def _read_file(path: Path) -> dict[str, Any]:
    if not is_zipfile(path):
        raise OSError("it is not what torch.save writes, or was cut off")
    # Composer pickles plain objects of its own (timestamps, say) beside the tensors, so the whole can't be read with
    # weights_only. A checkpoint is as trusted as the code that it is resumed by; see docs/checkpoints.md.
    return torch.load(path, map_location="cpu", weights_only=False, mmap=True)["state"]


def _read_sharded(path: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    # What torch's own dcp_to_torch_save does, less the optimizer's moments, which are twice the weights' size.
    planner = _EmptyStateDictLoadPlanner(keys={"state.model", "state.callbacks"})
    try:
        _load_state_dict(state, storage_reader=FileSystemReader(path), planner=planner, no_dist=True)
    except CheckpointException as error:  # not an Exception: nobody above would catch it
        cause, _ = next(iter(error.failures.values()))
        raise OSError(str(cause)) from None
    return state["state"]
