"""Biphasic: pretrain text encoders with causal language modeling, then masked language modeling.

The names below stay (docs/library.md). Each is imported when it is first used: the functions need torch, and the classes
that Composer's Trainer takes need Composer.
"""

TYPE_CHECKING = False  # typing's, which is not imported here: `import biphasic` imports nothing else
if TYPE_CHECKING:
    from biphasic.data.packing import pack
    from biphasic.model.losses import cross_entropy_at_targets
    from biphasic.model.probe import check_attention, packed_attention
    from biphasic.objectives.batch import step_of
    from biphasic.objectives.objective import CLM, MLM, Objective, Ramp, Replacement
    from biphasic.objectives.targets import Vocabulary, clm_targets, mlm_inputs_and_targets
    from biphasic.training.optimizer import WarmupStableDecay
    from biphasic.training.switch import ObjectiveSwitch

_MODULES = {
    "data.packing": ("pack",),
    "model.losses": ("cross_entropy_at_targets",),
    "model.probe": ("check_attention", "packed_attention"),
    "objectives.batch": ("step_of",),
    "objectives.objective": ("CLM", "MLM", "Objective", "Ramp", "Replacement"),
    "objectives.targets": ("Vocabulary", "clm_targets", "mlm_inputs_and_targets"),
    "training.optimizer": ("WarmupStableDecay",),
    "training.switch": ("ObjectiveSwitch",),
}
_NAMES = {name: module for module, names in _MODULES.items() for name in names}
__all__ = [
    "CLM", "MLM", "Objective", "ObjectiveSwitch", "Ramp", "Replacement", "Vocabulary", "WarmupStableDecay",
    "check_attention", "clm_targets", "cross_entropy_at_targets", "mlm_inputs_and_targets", "pack", "packed_attention",
    "step_of",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _NAMES:
        raise AttributeError(f"module 'biphasic' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"biphasic.{_NAMES[name]}"), name)
