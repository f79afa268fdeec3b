"""Biphasic: training recipes for text encoders.

Importing this makes the `eurobert` format known to transformers 4.57, which lacks it; transformers 5 has its own. Nothing
heavy is imported for that: the registration happens when transformers' auto classes are.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

try:
    from wrapt import register_post_import_hook
except ImportError:  # a bare image, for benchmarks/gpu.py: what needs `eurobert` there imports it
    register_post_import_hook = None


def _registering(name: str) -> Callable[[ModuleType], None]:
    def hook(_: ModuleType) -> None:
        if int(sys.modules["transformers"].__version__.split(".")[0]) < 5:
            import_module(name)

    return hook


if register_post_import_hook is not None:
    # The modules register what they hold when they are whole, also when a hook fires while they are still being imported.
    auto = "transformers.models.auto"
    register_post_import_hook(_registering("biphasic.model.eurobert_config"), f"{auto}.configuration_auto")
    register_post_import_hook(_registering("biphasic.model.eurobert"), f"{auto}.modeling_auto")
