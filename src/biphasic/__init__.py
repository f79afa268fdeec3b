"""Biphasic: training recipes for text encoders.

Importing this makes the `eurobert` format known to transformers 4.57, which lacks it; transformers 5 has its own. Nothing
heavy is imported for that: the registration happens when transformers' auto classes are.
"""

from importlib import import_module

from wrapt import register_post_import_hook

# The modules register what they hold when they are whole, also when a hook fires while they are still being imported.
register_post_import_hook(
    lambda _: import_module("biphasic.model.eurobert_config"), "transformers.models.auto.configuration_auto"
)
register_post_import_hook(lambda _: import_module("biphasic.model.eurobert"), "transformers.models.auto.modeling_auto")
