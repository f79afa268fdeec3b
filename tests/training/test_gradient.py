"""The gradient of a step is that of the mean over all predicted tokens of the global batch, however it is cut."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch

from conftest import Write
from tiny import composer_command

SCRIPT = Path(__file__).parent / "dump_gradient.py"
OBJECTIVES = ("clm", "mlm")


def launch(out: Path, files: list[Path], processes: int) -> dict[str, torch.Tensor]:
    command = composer_command(SCRIPT, out, *files, processes=processes)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    found = {}
    for file in files:
        assert (out / f"{file.stem}.pt").exists(), run.stderr[-3000:]
        gradients = torch.load(out / f"{file.stem}.pt")
        found[file.stem] = torch.cat([gradients[name].flatten().double() for name in sorted(gradients)])
    return found


def test_same_for_every_microbatch_size_and_for_two_ranks(write_yaml: Write, tmp_path: Path) -> None:
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

    two = [*files((4, 2), 2), *files((4, 2), 2, "fsdp")]
    found = launch(tmp_path, files((8, 4, 1), 1), 1) | launch(tmp_path, two, 2)
    for objective in OBJECTIVES:
        reference = found[f"{objective}-8-1-ddp"]
        assert reference.norm() > 0.1
        for name, gradient in found.items():
            if name.startswith(objective):
                assert (gradient - reference).norm() / reference.norm() < 1e-6, name
