"""Biphasic: training recipes for text encoders.

Importing this makes the `eurobert` format known to transformers 4.57, which lacks it; transformers 5 has its own. Nothing
heavy is imported for that: the registration happens when transformers' auto classes are.
"""

import sys
from functools import partial
from importlib import import_module
from types import ModuleType

try:
    from wrapt import register_post_import_hook
except ImportError:  # a bare image, for benchmarks/gpu.py: what needs `eurobert` there imports it
    register_post_import_hook = None


_AUTO = "transformers.models.auto"
_PARTS = ("transformers.modeling_layers", "transformers.models.llama.modeling_llama")
"""What ours are made of."""


def _register(name: str, loaded: ModuleType) -> None:
    # A model that is imported by its own name brings the auto classes along while these are half done: the last of them
    # to be whole registers.
    for part in _PARTS if loaded.__name__ != f"{_AUTO}.configuration_auto" else ():
        found = sys.modules.get(part)
        if found not in (None, loaded) and getattr(found.__spec__, "_initializing", False):
            return
    if int(sys.modules["transformers"].__version__.split(".")[0]) < 5:
        import_module(name)


if register_post_import_hook is not None:
    # The modules register what they hold when they are whole, also when a hook fires while they are still being imported.
    register_post_import_hook(partial(_register, "biphasic.model.eurobert_config"), f"{_AUTO}.configuration_auto")
    for place in (f"{_AUTO}.modeling_auto", *_PARTS):
        register_post_import_hook(partial(_register, "biphasic.model.eurobert"), place)
