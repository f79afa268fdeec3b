"""Keep libraries from drawing progress bars and from logging warnings."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Within the block, draw tqdm's bars, which transformers and datasets use too, only if `shown`."""
    from tqdm import tqdm

    original = tqdm.__init__

    def disabled(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **{**options, "disable": True})

    if not shown:
        tqdm.__init__ = disabled
    try:
        yield
    finally:
        tqdm.__init__ = original


@contextmanager
def without_warnings() -> Iterator[None]:
    """Keep transformers from logging warnings."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
