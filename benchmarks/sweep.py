"""What a sweep costs beside its training: its whole time over the sum of bare training loops, for as many at a time.

A sweep of 60 trials by `src/main.py`, from its start to its end: Ray, imports, hashing, Composer, scoring, records. Against
it the same 60 trainings (weights, batches, rates; the last losses must agree) in the barest loop, in as many processes side
by side; only the loops are timed, not imports, loading, tokenizing or scoring.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tables import save
from workload import ROOT, command, say

import finetuning

GOAL = 1.15
AGREE = 1e-4
RATES = (5e-4, 1e-3, 2e-3)


@dataclass(frozen=True)
class Shape:
    """The grid and its trials."""

    seeds: int = 20
    steps: int = 80
    width: int = 128
    layers: int = 3
    median: int = 40
    at_once: int = 2

    @property
    def trials(self) -> int:
        """One model, one task."""
        return len(RATES) * self.seeds

    def describe(self) -> str:
        """A line for the page."""
        return (
            f"{self.trials} trials ({len(RATES)} rates, {self.seeds} seeds) of {self.steps} steps of 32 texts (median "
            f"{self.median} tokens), {self.layers} layers of width {self.width}, {self.at_once} at a time, a thread each"
        )


def prepare(folder: Path, shape: Shape) -> Path:
    """Set, model and the sweep's YAML."""
    import yaml

    theirs = finetuning.Shape(steps=shape.steps, width=shape.width, layers=shape.layers, median=shape.median)
    # A tenth of what is trained on, as SST-2's are at 1,000 steps: scoring is work that has to be done, but no bare loop's.
    scored = max(shape.steps * 32 // 20, 1)
    finetuning.prepare(folder, theirs, scored, scored)
    one = finetuning.content(folder, "llama", 0)
    for key in ("run_name", "seed", "save_model"):
        one.pop(key)
    (folder / "task.yaml").write_text(yaml.safe_dump({**one, "run_name": "texts"}))
    sweep = {
        "job": "sweep", "output": str(folder / "out"), "models": {"llama": {"path": str(folder / "llama")}},
        "tasks": {"texts": str(folder / "task.yaml")}, "learning_rates": list(RATES), "seeds": list(range(shape.seeds)),
        "cluster": {"at_once": shape.at_once},
    }  # fmt: skip
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(sweep))
    return path


def run_sweep(path: Path) -> tuple[float, list[dict[str, Any]]]:
    """Seconds of the whole command, and its records."""
    say(f"the sweep: {path}")
    begin = time.monotonic()
    subprocess.run([sys.executable, str(ROOT / "src" / "main.py"), str(path)], check=True, env=_alone())
    seconds = time.monotonic() - begin
    return seconds, [json.loads(file.read_text()) for file in sorted((path.parent / "out" / "trials").glob("*.json"))]


def run_bare(path: Path, shape: Shape) -> list[dict[str, Any]]:
    """Each trial's loop, `at_once` processes side by side."""
    say("the same trainings in bare loops")
    outs = [path.parent / f"bare{part}.json" for part in range(shape.at_once)]
    script = [sys.executable, __file__, "--part", str(path)]
    parts = [
        subprocess.Popen([*script, str(part), str(shape.at_once), str(out)], env=_alone())
        for part, out in enumerate(outs)
    ]
    if any([part.wait() for part in parts]):
        sys.exit("a bare loop failed")
    return [one for out in outs for one in json.loads(out.read_text())]


def bare(path: Path, part: int, parts: int, out: Path) -> None:
    """Every `parts`-th trial, from `part` on, one after another in this process."""
    import torch

    from biphasic.config.load import load
    from biphasic.config.sweep import SweepConfig
    from biphasic.finetuning.task import drawn, steps_of
    from biphasic.finetuning.trainer import Batches
    from biphasic.finetuning.trial import task_of
    from biphasic.model.encoder import load_encoder
    from biphasic.model.heads import initialize
    from biphasic.sweep.grid import configurations

    torch.set_num_threads(1)
    sweep = load(path)
    assert isinstance(sweep, SweepConfig)
    found = []
    for cell, config in list(configurations(sweep).items())[part::parts]:
        task, _ = task_of(config.model, config.task, config.cache)
        encoder = load_encoder(config.model.path)
        head = task.head(encoder.width)
        initialize(head, 0.02, drawn("head", config.seed))
        examples = task.training()
        steps = steps_of(config, len(examples))
        weights = [*encoder.backbone.parameters(), *head.parameters()]
        optimizer = torch.optim.AdamW(weights, lr=cell.lr, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
        warmup, loss = max(round(steps * 0.1), 1), torch.zeros(())
        begin = time.perf_counter()
        for step, batch in enumerate(Batches(task, examples, config, steps)):
            rate = cell.lr * (step / warmup if step < warmup else 1 - (step - warmup) / (steps - warmup))
            for group in optimizer.param_groups:
                group["lr"] = rate
            [one] = batch["parts"]
            loss = task.loss(encoder, head, one) / one["targets"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        found.append({"lr": cell.lr, "seed": cell.seed, "seconds": time.perf_counter() - begin, "loss": float(loss)})
    out.write_text(json.dumps(found))


def measure(shape: Shape) -> dict[str, Any]:
    """Both, one after the other, and their ratio."""
    with tempfile.TemporaryDirectory() as temporary:
        path = prepare(Path(temporary) / "work", shape)
        wall, records = run_sweep(path)
        loops = run_bare(path, shape)
    theirs = {(one["lr"], one["seed"]): one["loss"] for one in loops}
    apart = max(abs(one["about"]["loss"] - theirs[one["cell"]["lr"], one["cell"]["seed"]]) for one in records)
    if len(records) != shape.trials or not apart <= AGREE:
        sys.exit(f"{len(records)} records, last losses up to {apart:.3g} apart: these don't train the same")
    total = sum(one["seconds"] for one in loops)
    return {
        "shape": asdict(shape),
        "sweep_seconds": wall,
        "bare_seconds": total,
        "train_seconds": sum(one["seconds"]["train"] for one in records),
        "trial_seconds": sum(one["seconds"]["total"] for one in records),
        "ratio": wall * shape.at_once / total,
        "largest_difference_of_losses": apart,
        "loops": loops,
    }


def table(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table's header and rows."""
    at_once, total = found["shape"]["at_once"], found["bare_seconds"]
    rows = [["bare loops", f"{total:,.1f}", "1.00", ""]]
    for name, seconds in (("Composer's loops in the trials", found["train_seconds"]), ("trials, with loading and scoring",
                          found["trial_seconds"])):  # fmt: skip
        rows.append([name, f"{seconds:,.1f}", f"{seconds / total:.2f}", ""])
    whole = found["sweep_seconds"] * at_once
    rows.append([f"the sweep's whole time, times {at_once}", f"{whole:,.1f}", f"{found['ratio']:.2f}", f"≤ {GOAL}"])
    return ["", "seconds", "over the bare loops", "goal"], rows


def _alone() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for field in fields(Shape):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    parser.add_argument("--part", nargs=4, help=argparse.SUPPRESS)
    given = vars(parser.parse_args())
    if (part := given.pop("part")) is not None:
        bare(Path(part[0]), int(part[1]), int(part[2]), Path(part[3]))
        return
    found = measure(Shape(**given))
    header, rows = table(found)
    title = "A sweep against bare training loops"
    print(save("sweep", title, command("bench-sweep"), header, rows, found, note=Shape(**given).describe()))


if __name__ == "__main__":
    main()
