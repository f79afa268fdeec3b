"""Trials of `small_trials` in workers of which some have a GPU that can't be used: one for each file in DEAD_GPUS."""

import os
from contextlib import suppress
from functools import cache
from multiprocessing import parent_process
from pathlib import Path

import torch

from helpers.small_trials import *  # noqa: F403


@cache
def is_dead() -> bool:
    """Whether this process has taken one of the files."""
    for file in Path(os.environ["DEAD_GPUS"]).iterdir():
        with suppress(FileNotFoundError):
            file.unlink()
            return True
    return False


def synchronize() -> None:
    if parent_process() is not None and is_dead():
        raise RuntimeError("CUDA unknown error\nall CUDA devices are busy")


# The tests' own process imports this module too.
is_available = torch.cuda.is_available
torch.cuda.is_available = lambda: parent_process() is not None or is_available()
torch.cuda.synchronize = synchronize  # pyright: ignore[reportAttributeAccessIssue]
