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


_AUTO, _LAYERS = "transformers.models.auto", "transformers.modeling_layers"


def _register(name: str, loaded: ModuleType) -> None:
    # A model that is imported by its own name brings the auto classes along while the module of its layers is half done.
    # Ours are made of it too, and wait for the whole.
    layers = sys.modules.get(_LAYERS)
    half_done = layers is not None and getattr(layers.__spec__, "_initializing", False)
    if loaded.__name__ == f"{_AUTO}.modeling_auto" and half_done:
        return
    if int(sys.modules["transformers"].__version__.split(".")[0]) < 5:
        import_module(name)


if register_post_import_hook is not None:
    # The modules register what they hold when they are whole, also when a hook fires while they are still being imported.
    register_post_import_hook(partial(_register, "biphasic.model.eurobert_config"), f"{_AUTO}.configuration_auto")
    for place in (f"{_AUTO}.modeling_auto", _LAYERS):
        register_post_import_hook(partial(_register, "biphasic.model.eurobert"), place)
