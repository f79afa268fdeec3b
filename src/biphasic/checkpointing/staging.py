"""A copy of the training state in host memory: all that training waits for when it saves."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict

_LARGE = ("model", "optimizers")


class Staging:
    """Keeps its memory from one copy to the next; on a GPU's machine it is pinned, which makes the copy several times as
    fast. PyTorch's own stager checks for types that Composer's states have more of, and makes new memory each time.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Any] = {}
        self._shapes: Any = None

    def copy(self, content: dict[str, Any]) -> dict[str, Any]:
        """A copy of what Composer stores: `state`, and `rng`. The next call writes over it."""
        state: dict[str, Any] = content["state"]
        large = {name: state[name] for name in _LARGE if name in state}
        shapes = _shapes(large)
        if shapes != self._shapes:
            self._buffers = _create_cpu_state_dict(large, pin_memory=torch.cuda.is_available())
            self._shapes = shapes
        copied = _copy_state_dict(large, self._buffers, type_check=False)
        small = {name: value for name, value in state.items() if name not in _LARGE}
        rest = {name: value for name, value in content.items() if name != "state"}
        return {"state": {**copied, **copy.deepcopy(small)}, **copy.deepcopy(rest)}


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return {key: _shapes(child) for key, child in value.items()}
    return [_shapes(child) for child in value] if isinstance(value, list | tuple) else None
