"""Import Composer and transformers without what they import and training doesn't use: 5 s less at each start."""

import atexit
import gc
import importlib.util
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

_UNUSED = re.compile(r"(scipy|matplotlib|scienceplots|torchvision|transformers|PIL|sentencepiece)\b.*")
"""Requirements that torchmetrics would import, and Composer's trainer and the metrics of language models don't use."""


@contextmanager
def composer_imported() -> Iterator[None]:
    """Import Composer; the block imports what uses it.

    Garbage collections, which find hardly anything in imports and take 1.5 s, begin after the block and leave out what was
    imported. In this process, metrics of images and audio, transformers' losses of object detection and Composer's own
    store over SFTP can't be used. The packages that they need can be imported; mcli, the client of MosaicML's platform,
    is imported when it is used.
    """
    if "composer" in sys.modules:
        yield
        return
    gc.disable()
    try:
        _import_composer()
        yield
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # nanobind shows what is alive at the end as leaks


def _import_composer() -> None:
    """Import Composer, torchmetrics and transformers' losses without scipy, matplotlib, paramiko and mcli."""
    from lightning_utilities.core import imports

    is_installed, check = imports.package_available, imports.RequirementCache._check_requirement

    def check_used(self: imports.RequirementCache) -> None:
        check(self)
        self.available &= not _UNUSED.fullmatch(self.requirement or "")

    used = {"package_available": lambda name: not _UNUSED.fullmatch(name) and is_installed(name)}
    with _replaced(imports, **used), _replaced(imports.RequirementCache, _check_requirement=check_used):
        import torchmetrics  # noqa: F401
    _delay_mcli()
    absent = {} if "paramiko" in sys.modules else {"paramiko": None}
    sys.modules.update(absent)  # pyright: ignore[reportArgumentType, reportCallIssue]
    handlers = {number: signal.getsignal(number) or signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        import_module("composer")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name in absent:
            del sys.modules[name]
    import transformers.utils

    with _replaced(transformers.utils, is_scipy_available=lambda: False):
        import transformers.loss.loss_utils


@contextmanager
def _replaced(owner: object, **values: object) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def _delay_mcli() -> None:
    """Let mcli be imported when it is used."""
    if "mcli" in sys.modules or (spec := importlib.util.find_spec("mcli")) is None:
        return
    sys.modules["mcli"] = module = importlib.util.module_from_spec(spec)

    def load(name: str) -> object:
        if name.startswith("__") or module.__dict__.pop("__getattr__", None) is None:
            raise AttributeError(name, name=name, obj=module)
        assert spec.loader is not None
        spec.loader.exec_module(module)
        return getattr(module, name)

    # Not importlib's LazyLoader: it loads a module when another `import` looks at its `__spec__`.
    module.__dict__["__getattr__"] = load
