"""Helper of test_gradient.py: save the gradient of the first step of each of several runs.

dump_gradient.py OUT run1.yaml run2.yaml ...
"""

import gc
import sys
from pathlib import Path

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist, get_device
from torch.distributed.tensor import DTensor

from biphasic.checkpointing.open_run import open_run
from biphasic.checkpointing.start_rules import ResumeGuard
from biphasic.config.load import load
from biphasic.config.pretrain import PretrainConfig
from biphasic.training.recipe import prepare, run_settings


def gather(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


class Dump(Callback):
    """Writes all gradients to a file."""

    def __init__(self, path: Path):
        self.path = path

    def after_train_batch(self, state: State, logger: Logger) -> None:
        module = getattr(state.model, "module", state.model)
        gradients = {name: gather(parameter.grad).clone() for name, parameter in module.named_parameters()}
        if dist.get_global_rank() == 0:
            torch.save(gradients, self.path)


def dump(out: Path, files: list[Path]) -> None:
    dist.initialize_dist(get_device(None))
    for file in files:
        config = load(file, [], dist.get_world_size())
        assert isinstance(config, PretrainConfig)
        with open_run(run_settings(config), ResumeGuard(config)) as run:
            trainer = prepare(config, run)
            trainer.state.callbacks.append(Dump(out / f"{file.stem}.pt"))
            run.train(trainer)
        del trainer, run
        gc.collect()


if __name__ == "__main__":
    dump(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
