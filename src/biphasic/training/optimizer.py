"""Build the optimizer, and set the learning rate of each batch."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from torch import Tensor, nn

from biphasic.durations import Duration, TrainingProgress, epoch_batches
from biphasic.errors import UserError
from biphasic.timeline import learning_rate_factor


def build_optimizer(model: nn.Module, backbone: nn.Module, name: str, **adam: Any) -> torch.optim.Optimizer:
    """Build `adamw`, or `muon` for the backbone's linear layers with AdamW for the others.

    Scalars (a learned temperature) are the last parameter group, without weight decay. `adam` are AdamW's `lr`, `betas`,
    `eps` and `weight_decay`.
    """
    if name == "adamw":
        return _adamw(model.parameters(), adam)
    matrices = {module.weight: None for module in backbone.modules() if isinstance(module, nn.Linear)}
    others = (parameter for parameter in model.parameters() if parameter not in matrices)
    return MuonWithAdamW(matrices, others, adam)


def _adamw(parameters: Iterable[Tensor], adam: Mapping[str, Any]) -> torch.optim.AdamW:
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [{"params": [each for each in parameters if each.dim()]}]
    if scalars := [each for each in parameters if not each.dim()]:
        groups.append({"params": scalars, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, fused=True, **adam)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for matrices and AdamW for all other parameters, in one optimizer, because Composer takes only one.

    Both have the same learning rate and weight decay, because Muon's updates are scaled to the size of AdamW's (Liu et
    al., "Muon is Scalable for LLM Training", arXiv 2502.16982). `matrices` are the first parameter group.
    """

    def __init__(self, matrices: Iterable[Tensor], others: Iterable[Tensor], adam: Mapping[str, Any]):
        shared = {name: adam[name] for name in ("lr", "weight_decay")}
        self._muon = torch.optim.Muon(list(matrices), **shared, adjust_lr_fn="match_rms_adamw")
        self._adamw = _adamw(others, adam)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for optimizer, groups in ((self._muon, self.param_groups[:1]), (self._adamw, self.param_groups[1:])):
            # Assigned at each step, because loading a checkpoint replaces this optimizer's groups and state.
            optimizer.param_groups, optimizer.state = groups, self.state
            optimizer.step()
        return loss


class WarmupStableDecay(Algorithm):
    """Algorithm that sets the learning rate: a linear warmup from 0, a stable phase, and a decay to `max_duration`.

    The rate depends only on the timestamp and `max_duration`, so nothing is stored. It is not a Composer scheduler, because
    Composer asks for the next batch's rate before it counts the last batch: every rate would come one batch late.

    Args:
        warmup: length of the warmup, such as `2000ba`.
        decay: length of the decay, in the unit of `max_duration` or in `dur`. Epochs, and `dur` of them, become batches.
        lr: the highest rate, times `lr_scale` in parameter groups that have one.
        decay_shape: `linear`, `1-sqrt` or `cosine`.
        final_lr: rate at the end of the decay, as a share of `lr`.

    Raises:
        ValueError: a duration can't be parsed, or the shape is unknown.
        UserError: when the Trainer is built, parameter groups have different rates and no `lr_scale`.
    """

    def __init__(
        self,
        warmup: Duration | str = "0ba",
        decay: Duration | str = "0ba",
        lr: float = 5e-4,
        *,
        decay_shape: str = "linear",
        final_lr: float = 0.0,
    ):
        if decay_shape not in ("linear", "1-sqrt", "cosine"):
            raise ValueError(f"decay_shape: expected linear, 1-sqrt or cosine; got {decay_shape!r}")
        self.warmup, self.decay, self.lr = Duration.parse(warmup), Duration.parse(decay), lr
        self.decay_shape, self.final_lr = decay_shape, final_lr

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.INIT, Event.BATCH_START)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
        if event == Event.INIT:
            rates = sorted({float(group["lr"]) for group in groups})
            if len(rates) > 1 and not any("lr_scale" in group for group in groups):
                message = f"parameter groups have the rates {', '.join(map(str, rates))}, which WarmupStableDecay replaces"
                raise UserError(f"{message}: give a group 'lr_scale': 0.1 for 0.1 times the algorithm's lr")
            return
        end, epoch = Duration.parse(str(state.max_duration)), epoch_batches(state)
        if self.decay.value and self.decay.resolve(end, epoch).unit != end.resolve(end, epoch).unit:
            raise UserError(f"decay: expected the unit of max_duration ({end}), or dur; got {self.decay}")
        if self.warmup.value and self.warmup.resolve(end, epoch).unit == "ep":
            raise UserError(f"warmup: expected ba, sp or tok with a loader whose length isn't known; got {self.warmup}")
        rate = self.lr * learning_rate_factor(self, end, TrainingProgress.of(state.timestamp), epoch)
        for group in groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
