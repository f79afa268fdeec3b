"""The overhead of a sweep: its total time over the sum of bare training loops, for as many at a time.

A sweep of 60 trials by `src/main.py` is timed from start to end: workers, imports, hashing, Composer, scoring, records. The
same 60 trainings (weights, batches, rates; the last losses must agree) run in a bare loop, in as many processes at a time,
half of them before the sweep and half after it, so that a machine whose speed drifts changes the ratio less. Of these only
the loops are timed, without imports, loading, tokenization and scoring.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workload import ROOT, parse_options, report, say

import finetuning

GOAL = 1.10
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
        """One model on one task."""
        return len(RATES) * self.seeds

    def describe(self) -> str:
        return (
            f"{self.trials} trials ({len(RATES)} rates, {self.seeds} seeds) of {self.steps} steps of 32 texts (median "
            f"{self.median} tokens), {self.layers} layers of width {self.width}, {self.at_once} at a time, a thread each"
        )


def prepare(folder: Path, shape: Shape) -> Path:
    import yaml

    texts_shape = finetuning.Shape(steps=shape.steps, width=shape.width, layers=shape.layers, median=shape.median)
    # A tenth of the training texts, as SST-2 has at 1,000 steps: scoring is necessary, but not part of the bare loops.
    scored = max(shape.steps * 32 // 20, 1)
    finetuning.prepare(folder, texts_shape, scored, scored)
    task = finetuning.content(folder, "llama", 0)
    for key in ("run_name", "seed", "save_model"):
        task.pop(key)
    (folder / "task.yaml").write_text(yaml.safe_dump({**task, "run_name": "texts"}))
    sweep = {
        "job": "sweep", "output": str(folder / "out"), "models": {"llama": {"path": str(folder / "llama")}},
        "tasks": {"texts": str(folder / "task.yaml")}, "learning_rates": list(RATES), "seeds": list(range(shape.seeds)),
        "cluster": {"at_once": shape.at_once},
    }  # fmt: skip
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(sweep))
    return path


def run_sweep(path: Path) -> tuple[float, list[dict[str, Any]]]:
    say(f"the sweep: {path}")
    begin = time.monotonic()
    subprocess.run([sys.executable, str(ROOT / "src" / "main.py"), str(path)], check=True, env=_alone())
    seconds = time.monotonic() - begin
    return seconds, [json.loads(file.read_text()) for file in sorted((path.parent / "out" / "trials").glob("*.json"))]


def run_bare(path: Path, at_once: int, half: int) -> list[dict[str, Any]]:
    """Run the loops of one half of the trials (0 or 1), `at_once` processes at a time."""
    say(f"half {half + 1} of the same trainings in bare loops")
    outs = {part: path.parent / f"bare{part}.json" for part in range(half * at_once, (half + 1) * at_once)}
    script = [sys.executable, __file__, "--part", str(path)]
    processes = [
        subprocess.Popen([*script, str(part), str(2 * at_once), str(out)], env=_alone()) for part, out in outs.items()
    ]
    if any([process.wait() for process in processes]):
        sys.exit("a bare loop failed")
    return [one for out in outs.values() for one in json.loads(out.read_text())]


def run_bare_part(path: Path, part: int, parts: int, out: Path) -> None:
    """Run every `parts`-th trial's loop, starting with `part`, in this process."""
    import torch

    from biphasic.config.load import load_job
    from biphasic.config.sweep import SweepConfig
    from biphasic.finetuning.batches import GlobalBatches, count_steps, derive_seed
    from biphasic.finetuning.trial import build_task
    from biphasic.model.encoder import load_encoder
    from biphasic.model.heads import initialize_head
    from biphasic.model.segments import Segments
    from biphasic.sweep.grid import trial_configs

    torch.set_num_threads(1)
    sweep = load_job(SweepConfig, path)
    results = []
    for cell, config in list(trial_configs(sweep).items())[part::parts]:
        task = build_task(config.model, config.task, config.cache)
        encoder = load_encoder(config.model.path)
        head = task.build_head(encoder.width)
        initialize_head(head, 0.02, derive_seed("head", config.seed))
        examples = task.training_examples()
        steps = count_steps(config, len(examples["texts"]))
        weights = [*encoder.backbone.parameters(), *head.parameters()]
        optimizer = torch.optim.AdamW(weights, lr=cell.lr, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1, fused=True)
        warmup, loss = max(round(steps * 0.1), 1), torch.zeros(())
        begin = time.perf_counter()
        for step, batch in enumerate(GlobalBatches(task, examples, config, steps)):
            rate = cell.lr * (step / warmup if step < warmup else 1 - (step - warmup) / (steps - warmup))
            for group in optimizer.param_groups:
                group["lr"] = rate
            [microbatch] = batch["parts"]
            segments = Segments.of(microbatch["lengths"], microbatch["tokens"].device)
            hidden = encoder.hidden(microbatch["tokens"], segments)
            loss = task.loss(head, hidden, segments, microbatch) / microbatch["mean_targets_per_rank"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        results.append({"lr": cell.lr, "seed": cell.seed, "seconds": time.perf_counter() - begin, "loss": loss.item()})
    out.write_text(json.dumps(results))


def measure(shape: Shape) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        path = prepare(Path(temporary) / "work", shape)
        before = run_bare(path, shape.at_once, 0)
        wall, records = run_sweep(path)
        loops = [*before, *run_bare(path, shape.at_once, 1)]
    bare_losses = {(record["lr"], record["seed"]): record["loss"] for record in loops}
    difference = max(
        abs(record["about"]["loss"] - bare_losses[record["cell"]["lr"], record["cell"]["seed"]]) for record in records
    )
    if len(records) != shape.trials or not difference <= AGREE:
        sys.exit(f"{len(records)} records, last losses up to {difference:.3g} apart: these don't train the same models")
    total = sum(record["seconds"] for record in loops)
    return {
        "shape": asdict(shape),
        "sweep_seconds": wall,
        "bare_seconds": total,
        "train_seconds": sum(record["seconds"]["train"] for record in records),
        "trial_seconds": sum(record["seconds"]["total"] for record in records),
        "ratio": wall * shape.at_once / total,
        "largest_difference_of_losses": difference,
        "loops": loops,
    }


def table(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    at_once, total = results["shape"]["at_once"], results["bare_seconds"]
    rows = [["bare loops", f"{total:,.1f}", "1.00", ""]]
    for name, seconds in (("Composer's loops in the trials", results["train_seconds"]), ("trials, with loading and scoring",
                          results["trial_seconds"])):  # fmt: skip
        rows.append([name, f"{seconds:,.1f}", f"{seconds / total:.2f}", ""])
    scaled = results["sweep_seconds"] * at_once
    rows.append([f"the sweep's total time, times {at_once}", f"{scaled:,.1f}", f"{results['ratio']:.2f}", f"≤ {GOAL}"])
    return ["", "seconds", "over the bare loops", "goal"], rows


def _alone() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def main() -> None:
    if sys.argv[1:2] == ["--part"]:
        path, part, parts, out = sys.argv[2:]
        run_bare_part(Path(path), int(part), int(parts), Path(out))
        return
    shape, _ = parse_options(Shape, __doc__)
    results = measure(shape)
    report("sweep", "A sweep against bare training loops", *table(results), results, note=shape.describe())


if __name__ == "__main__":
    main()
