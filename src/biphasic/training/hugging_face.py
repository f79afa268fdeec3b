"""Let Composer's `HuggingFaceModel` compute the batches of the objective switch, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from biphasic.model.forward import packed_forward
from biphasic.model.language_model import LanguageModel, language_model_of
from biphasic.objectives.batch import segments_of, step_of


def compute_prepared_batches(model: Any) -> None:
    """Change a Composer `HuggingFaceModel` in place, so that it takes batches of `ObjectiveSwitch` besides its own.

    Its network then attends to packed segments, and computes the loss without the complete logits. For validation and
    training metrics, labels are aligned with logits (`shift_labels=False`).

    Raises:
        UserError: the network has no linear head on a decoder that can be made causal and bidirectional.
    """
    network, name = model.model, type(model.model).__name__
    if hasattr(network, "_biphasic"):
        return
    parts = language_model_of(network, f"model {name}")
    # Not as an attribute of the network, which would register its modules a second time.
    original, network._biphasic = network.forward, True
    model.model_forward_args |= {"input_ids", "labels", "segment_ids", "lengths", "step"}
    model.shift_labels = False
    with_logits = bool(model.train_metrics)

    def forward(*inputs: Any, **batch: Any) -> Any:
        return original(*inputs, **batch) if "step" not in batch else _forward(parts, batch, with_logits)

    network.forward = forward


def _forward(parts: LanguageModel, batch: Mapping[str, Any], with_logits: bool) -> Any:
    """Return the loss of a prepared batch, as transformers' output; its logits if it has no labels, or if asked for."""
    from transformers.modeling_outputs import CausalLMOutput

    step, inputs, targets = step_of(batch), batch["input_ids"], batch.get("labels")
    segments = segments_of(batch)
    loss = None
    if targets is not None and not with_logits:
        total, _ = parts(inputs.flatten(), targets.flatten(), segments, step.causal)
        return CausalLMOutput(loss=step.mean_loss(total, len(inputs)))
    hidden = packed_forward(parts.backbone, inputs.flatten(), segments, step.causal)
    logits = parts.logits(hidden).unflatten(0, inputs.shape)
    if targets is not None:
        loss = step.mean_loss(_cross_entropy(logits, targets), len(inputs))
    return CausalLMOutput(loss=loss, logits=logits)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
