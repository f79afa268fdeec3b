"""Each training benchmark from end to end at a tiny size: its numbers have the right form, and it refuses what it should."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import warm

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZE = {"vocabulary": 256, "width": 32, "layers": 1, "heads": 2, "length": 64, "mean": 20, "rows": 4, "microbatch": 2,
        "steps": 4, "dropped": 1, "threads": 1}  # fmt: skip
OPTIONS = ["--rounds", "1", *(part for name, value in SIZE.items() for part in (f"--{name}", str(value)))]


def module(name: str) -> ModuleType:
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module("tables"), "RESULTS", tmp_path / "results")
    return tmp_path / "results"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of ours are forked from a warm process, and one rank of the bare loop is this process."""
    workload = module("workload")
    slow = workload.launch

    def launch(arguments: list[str], ranks: int, threads: int) -> float:
        started, script = time.time(), Path(arguments[0]).name
        if script == "main.py":
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
            run = warm.run(arguments[1:], ranks, environment)
            assert not run.returncode, run.stderr
        elif script == "bare_loop.py" and ranks == 1:
            module("bare_loop").main(arguments[1:])
        else:
            return slow(arguments, ranks, threads)
        return started

    monkeypatch.setattr(workload, "launch", launch)


def run_main(name: str, results: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]) -> dict[str, Any]:
    """What the script wrote."""
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / f"{name}.py"), *options])
    module(name).main()
    page = (results / f"{name}.md").read_text()
    assert f"python benchmarks/{name}.py" in page and "| --- |" in page
    return json.loads((results / f"{name}.json").read_text())


def is_rate(found: dict[str, float]) -> bool:
    return found["seconds"] > 0 and abs(found["tokens"] / found["seconds"] / found["tokens_per_second"] - 1) < 1e-6


def test_trainer_against_the_bare_loop(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As people run it, every process its own."""
    found = run_main("train", results, monkeypatch, OPTIONS)
    assert found["largest_difference_of_losses"] <= 1e-4
    for name in ("ours", "bare"):
        assert all(is_rate(found["rates"][name][phase]) for phase in ("clm", "mlm", "both"))
        assert found["start_seconds"][name] > 0
        (run,) = found["runs"][name]
        assert len(run["step_seconds"]) == len(run["losses"]) == len(run["tokens"]) == 8
        assert min(run["step_seconds"]) > 0
    assert found["runs"]["ours"][0]["tokens"] == found["runs"]["bare"][0]["tokens"]
    assert set(found["ratios"]) == {"clm", "mlm"}
    assert min(found["switch"]["ours"] + found["switch"]["bare"]) > 0


@pytest.mark.usefixtures("quick")
def test_loops_that_train_something_else_are_refused(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other weights and masks: no table."""
    monkeypatch.setattr(sys, "argv", ["train.py", *OPTIONS, "--bare-seed", "5"])
    with pytest.raises(SystemExit, match=r"at step 1 the losses are .* don't train the same model"):
        module("train").main()
    assert not results.exists()


def test_a_late_difference_a_nan_and_a_missing_step_are_seen() -> None:
    workload = module("workload")
    one = workload.Run(started=0, began=0, ends=[1, 2, 3], losses=[3.0, 2.0, 1.0], tokens=[1, 1, 1])
    near = dataclasses.replace(one, losses=[3.0, 2.00009, 1.0])
    assert workload.require_same(one, near, "these") == pytest.approx(9e-5)
    for losses in ([3.0, 2.0, 1.0002], [3.0, float("nan"), 1.0]):
        with pytest.raises(workload.Disagreement, match=r"these: at step [23]"):
            workload.require_same(one, dataclasses.replace(one, losses=losses), "these")
    with pytest.raises(workload.Disagreement, match="3 steps against 2"):
        workload.require_same(one, dataclasses.replace(one, losses=[3.0, 2.0]), "these")


def test_times_are_of_the_steps_that_count() -> None:
    """The first steps of each phase are slow, and not timed; the cost of the switch is their sight of it."""
    workload, train = module("workload"), module("train")
    shape = workload.Shape(**{**SIZE, "steps": 5, "dropped": 2})
    seconds = [9, 9, 2, 2, 2, 7, 9, 4, 4, 4]
    ends = [sum(seconds[: at + 1]) for at in range(10)]
    run = workload.Run(started=-3, began=0, ends=ends, losses=[1.0] * 10, tokens=[100] * 10)
    found = workload.rates([run], shape)
    assert (found["clm"]["tokens_per_second"], found["mlm"]["tokens_per_second"]) == (50, 25)
    assert found["both"]["tokens_per_second"] == pytest.approx(200 / 6)
    assert run.start_seconds == 3
    assert train.switch_cost(run, shape, found) == 9 / 4


@pytest.mark.usefixtures("quick")
def test_two_ranks_against_one(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_main("scaling", results, monkeypatch, OPTIONS)
    ways = {"bare_1", "bare_2", "ours_1", "ours_2", "fsdp_2"}
    assert set(found["rates"]) == ways
    assert all(is_rate(found["rates"][way]["both"]) for way in ways)
    assert set(found["over_bare"]) == {"ours_1", "ours_2", "fsdp_2"}
    assert set(found["efficiency"]) == {"bare_2", "ours_2", "fsdp_2"}
    speed = {way: found["rates"][way]["both"]["tokens_per_second"] for way in ways}
    assert found["efficiency"]["fsdp_2"] == pytest.approx(speed["fsdp_2"] / (2 * speed["ours_1"]))


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="Hugging Face's Trainer needs accelerate")
@pytest.mark.usefixtures("quick")
def test_against_hugging_face(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_main("peers", results, monkeypatch, OPTIONS)
    for name in ("ours", "padded", "packed"):
        assert all(is_rate(found["rates"][name][phase]) for phase in ("clm", "mlm"))
        (run,) = found["runs"][name]
        assert len(run["step_seconds"]) == len(run["tokens"]) == 8
        # About as many real tokens a step, and no more than there are positions where rows are packed.
        real = found["rates"][name]["both"]["tokens"] / 2
        assert 0.6 < real / 256 <= (1.5 if name == "padded" else 1.0)
    assert found["ratios"].keys() == {"padded", "packed"}


def test_without_accelerate_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["peers.py", *OPTIONS])
    with pytest.raises(SystemExit, match="accelerate isn't installed"):
        module("peers").main()


def test_the_masked_llama_sees_both_sides_and_no_padding() -> None:
    """With padding (a whole mask) and without (the layers are told): the same, and not causal."""
    hugging_face, workload = module("hugging_face"), module("workload")
    torch.manual_seed(1)
    model = hugging_face.MaskedLlama(hugging_face.llama(workload.Shape(**SIZE)))
    tokens = torch.randint(4, 256, (2, 10))
    ones = torch.ones_like(tokens)

    def logits(inputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(inputs, mask, inputs)["logits"]

    alone = logits(tokens, ones)
    changed = tokens.clone()
    changed[:, -1] = 4 + (changed[:, -1] - 3) % 252
    assert (logits(changed, ones)[:, 0] - alone[:, 0]).abs().max() > 1e-4
    longer = torch.cat([tokens, torch.zeros_like(tokens)], 1)
    mask = torch.cat([ones, torch.zeros_like(ones)], 1)
    torch.testing.assert_close(logits(longer, mask)[:, :10], alone)


def test_memory_of_the_loss_and_what_does_not_fit(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """50,000 words: whole logits of 4,096 tokens are 0.8 GB, and their gradients as many; ours bounds them."""
    loss = module("loss_memory")
    monkeypatch.setattr(loss, "PHASES", ("clm",))
    sizes = ["--vocabulary", "50000", "--width", "8", "--threads", "1"]
    found = run_main(
        "loss_memory", results, monkeypatch, ["--tokens", "512", "4096", "8192", *sizes, "--limit", str(3 << 29)]
    )
    small, large, larger = found["points"]
    assert small["ratio"] == small["ours"]["bytes"] / small["full"]["bytes"]
    assert small["full"]["bytes"] > 2 * 512 * 50000 * 4
    assert large["full"] is larger["full"] is None
    assert 0 < large["ours"]["bytes"] < 4096 * 50000 * 4
    assert "ratio" not in large
    assert (results / "loss_memory.md").read_text().count("does not fit") == 4


def test_points_fail_loudly() -> None:
    """What is no lack of memory is no point left out."""
    with pytest.raises(RuntimeError, match="ended with"):
        module("loss_memory")._apart("neither", "clm", 8, 16, 8, None, threads=1)


def test_a_failed_run_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"ended with 2:\n(.|\n)*no_such"):
        module("workload").launch([str(BENCHMARKS.parent / "src" / "main.py"), "no_such.yaml"], 1, 1)


def test_options_stand_on_the_page() -> None:
    """`--help` names every field of the shape; the page names the command."""
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "scaling.py"), "--help"], capture_output=True, text=True, check=True
    )
    assert all(f"--{name}" in run.stdout for name in SIZE)
