"""The gradient of a step is that of the mean loss over the global batch's targets, however the batch is cut."""

import os
from pathlib import Path

import torch

from conftest import Write
from helpers import warm

OBJECTIVES = ("clm", "mlm")


def gradients_of(out: Path, files: list[Path], ranks: int) -> dict[str, torch.Tensor]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = warm.run([str(out), *map(str, files)], ranks, environment, module="helpers.dump_gradient")
    flat = {}
    for file in files:
        assert (out / f"{file.stem}.pt").exists(), run.stderr[-3000:]
        gradients = torch.load(out / f"{file.stem}.pt")
        flat[file.stem] = torch.cat([gradients[name].flatten().double() for name in sorted(gradients)])
    return flat


def test_gradients_are_equal_for_all_microbatches_ranks_and_strategies(write_yaml: Write, tmp_path: Path) -> None:
    def files(microbatches: tuple[int, ...], ranks: int, strategy: str = "ddp") -> list[Path]:
        # No clipping, so that what is compared is the gradient itself.
        return [
            write_yaml(
                f"{objective}-{microbatch}-{ranks}-{strategy}",
                parallelism__strategy=strategy,
                objective__phases=[{"name": objective}],
                microbatch_size=microbatch,
                optimizer__clip_norm=None,
                max_duration="1ba",
                schedule={},
                checkpoint__interval="1ba",
            )
            for objective in OBJECTIVES
            for microbatch in microbatches
        ]

    gradients = gradients_of(tmp_path, files((8, 2), 1), 1)
    gradients |= gradients_of(tmp_path, [*files((2,), 2), *files((1,), 2, "fsdp")], 2)
    for objective in OBJECTIVES:
        reference = gradients[f"{objective}-8-1-ddp"]
        assert reference.norm() > 0.1
        for name, gradient in gradients.items():
            if name.startswith(objective):
                assert (gradient - reference).norm() / reference.norm() < 1e-6, name
