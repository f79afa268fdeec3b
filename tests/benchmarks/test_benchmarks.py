"""Each training benchmark at a tiny size: its numbers are consistent, and it refuses runs that train different models."""

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

from helpers import warm

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZE = {"vocabulary": 256, "width": 32, "layers": 1, "heads": 2, "length": 64, "mean": 20, "rows": 4, "microbatch": 2,
        "steps": 4, "dropped": 1, "threads": 1}  # fmt: skip
OPTIONS = ["--rounds", "1", *(part for name, value in SIZE.items() for part in (f"--{name}", str(value)))]


def module(name: str) -> ModuleType:
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)


@pytest.fixture
def results_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module("workload"), "RESULTS", tmp_path / "results")
    return tmp_path / "results"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biphasic's ranks are forked from a warm process; a single rank of the other loops runs in this process."""
    workload = module("workload")
    launch_processes = workload.launch

    def launch(arguments: list[str], ranks: int, threads: int) -> float:
        started, script = time.time(), Path(arguments[0]).name
        if script == "main.py":
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
            run = warm.run(arguments[1:], ranks, environment)
            assert not run.returncode, run.stderr
        elif script == "bare_loop.py" and ranks == 1:
            module("bare_loop").main(arguments[1:])
        elif script == "hugging_face.py":
            with monkeypatch.context() as context:
                # Earlier tests of this process leave Composer's variables, with which accelerate expects MASTER_ADDR.
                for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"):
                    context.delenv(name, raising=False)
                module("hugging_face").main(*arguments[1:])
        else:
            return launch_processes(arguments, ranks, threads)
        return started

    monkeypatch.setattr(workload, "launch", launch)
    monkeypatch.setattr(module("peers"), "launch", launch)


def run_main(name: str, results_folder: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]) -> dict[str, Any]:
    """Run the script; returns the JSON that it wrote."""
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / f"{name}.py"), *options])
    module(name).main()
    page = (results_folder / f"{name}.md").read_text()
    assert f"python benchmarks/{name}.py" in page and "| --- |" in page
    return json.loads((results_folder / f"{name}.json").read_text())


def is_rate(rate: dict[str, float]) -> bool:
    return rate["seconds"] > 0 and abs(rate["tokens"] / rate["seconds"] / rate["tokens_per_second"] - 1) < 1e-6


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trainer_against_the_bare_loop(
    results_folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, processes: bool
) -> None:
    """`processes`: every run in a process of its own, as users run it."""
    if not processes:
        request.getfixturevalue("quick")
    results = run_main("train", results_folder, monkeypatch, OPTIONS)
    assert results["largest_difference_of_losses"] <= 1e-4
    for name in ("ours", "bare"):
        assert all(is_rate(results["rates"][name][phase]) for phase in ("clm", "mlm", "both"))
        assert results["start_seconds"][name] > 0
        (run,) = results["runs"][name]
        assert len(run["step_seconds"]) == len(run["losses"]) == len(run["tokens"]) == 8
        assert min(run["step_seconds"]) > 0
    assert results["runs"]["ours"][0]["tokens"] == results["runs"]["bare"][0]["tokens"]
    assert set(results["ratios"]) == {"clm", "mlm"}
    assert min(results["switch"]["ours"] + results["switch"]["bare"]) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_loops_that_train_different_models_are_refused(results_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other weights and masks: no table is written."""
    monkeypatch.setattr(sys, "argv", ["train.py", *OPTIONS, "--bare-seed", "5"])
    with pytest.raises(SystemExit, match=r"at step 1 the losses are .* don't train the same model"):
        module("train").main()
    assert not results_folder.exists()


def test_a_late_difference_a_nan_and_a_missing_step_are_refused() -> None:
    workload = module("workload")
    one = workload.Run(started=0, began=0, ends=[1, 2, 3], losses=[3.0, 2.0, 1.0], tokens=[1, 1, 1])
    agreed = workload.Agreement()
    for run in (one, dataclasses.replace(one, losses=[3.0, 2.00009, 1.0])):
        assert agreed(run, "these") is run
    assert agreed.largest == pytest.approx(9e-5)
    for losses in ([3.0, 2.0, 1.0002], [3.0, float("nan"), 1.0]):
        with pytest.raises(workload.Disagreement, match=r"these: at step [23]"):
            agreed(dataclasses.replace(one, losses=losses), "these")
    with pytest.raises(workload.Disagreement, match="3 steps against 2"):
        agreed(dataclasses.replace(one, losses=[3.0, 2.0]), "these")


def test_rates_leave_out_the_first_steps_of_each_phase() -> None:
    """Those steps are slow. The cost of the switch counts them."""
    workload, train = module("workload"), module("train")
    shape = workload.Shape(**{**SIZE, "steps": 5, "dropped": 2})
    seconds = [9, 9, 2, 2, 2, 7, 9, 4, 4, 4]
    ends = [sum(seconds[: at + 1]) for at in range(10)]
    run = workload.Run(started=-3, began=0, ends=ends, losses=[1.0] * 10, tokens=[100] * 10)
    results = workload.rates([run], shape)
    assert (results["clm"]["tokens_per_second"], results["mlm"]["tokens_per_second"]) == (50, 25)
    assert results["both"]["tokens_per_second"] == pytest.approx(200 / 6)
    assert run.start_seconds == 3
    assert train.switch_cost(run, shape, results) == 9 / 4


def test_efficiency_of_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds and ratios of runs with known times."""
    scaling, workload = module("scaling"), module("workload")
    shape = workload.Shape(**SIZE)
    seconds = {"bare_1": 2.0, "bare_ddp": 1.25, "bare_fsdp": 1.6, "ours_1": 2.5, "ours_ddp": 1.5, "ours_fsdp": 2.0}

    def run(path: Path, name: str, shape: Any, ranks: int = 1, *overrides: str) -> Any:
        ends = [seconds[name.partition("-")[0]] * (step + 1) for step in range(8)]
        return workload.Run(started=0, began=0, ends=ends, losses=[1.0] * 8, tokens=[100] * 8)

    for function in ("run_biphasic", "run_bare_loop"):
        monkeypatch.setattr(scaling, function, run)
    monkeypatch.setattr(scaling, "prepare", lambda folder, shape: folder)
    results = scaling.measure(shape, 1)
    assert results["over_bare"] == pytest.approx({"ours_1": 0.8, "ours_ddp": 1.25 / 1.5, "ours_fsdp": 0.8})
    efficiency = {"bare_ddp": 0.8, "bare_fsdp": 0.625, "ours_ddp": 2.5 / 3, "ours_fsdp": 2.5 / 4}
    assert results["efficiency"] == pytest.approx(efficiency)
    header, rows = scaling.table(results)
    assert all(len(row) == len(header) for row in rows)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_two_ranks_against_one(results_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = run_main("scaling", results_folder, monkeypatch, OPTIONS)
    ways = {"bare_1", "bare_ddp", "bare_fsdp", "ours_1", "ours_ddp", "ours_fsdp"}
    assert set(results["rates"]) == ways
    assert all(is_rate(results["rates"][way]["both"]) for way in ways)
    assert set(results["over_bare"]) == {"ours_1", "ours_ddp", "ours_fsdp"}
    assert set(results["efficiency"]) == ways - {"bare_1", "ours_1"}
    speed = {way: results["rates"][way]["both"]["tokens_per_second"] for way in ways}
    assert results["efficiency"]["ours_fsdp"] == pytest.approx(speed["ours_fsdp"] / (2 * speed["ours_1"]))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="Hugging Face's Trainer needs accelerate")
@pytest.mark.usefixtures("quick")
def test_against_hugging_face(results_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = run_main("peers", results_folder, monkeypatch, OPTIONS)
    for name in ("ours", "padded", "packed"):
        assert all(is_rate(results["rates"][name][phase]) for phase in ("clm", "mlm"))
        (run,) = results["runs"][name]
        assert len(run["step_seconds"]) == len(run["tokens"]) == 8
        # About as many real tokens a step, and no more than there are positions where rows are packed.
        real = results["rates"][name]["both"]["tokens"] / 2
        assert 0.6 < real / 256 <= (1.5 if name == "padded" else 1.0)
    assert results["ratios"].keys() == {"padded", "packed"}


def test_a_missing_accelerate_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["peers.py", *OPTIONS])
    with pytest.raises(SystemExit, match="accelerate isn't installed"):
        module("peers").main()


def test_the_masked_llama_attends_to_both_sides_and_not_to_padding() -> None:
    """The same logits with padding (a full mask) and without (a flag of the layers), and not causal."""
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


@pytest.mark.slow
def test_memory_of_the_loss(results_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full logits of 8,192 tokens and 50,000 words take 1.6 GB, and their gradients as much: they don't fit the limit."""
    loss = module("loss_memory")
    monkeypatch.setattr(loss, "PHASES", ("clm",))
    options = ["--tokens", "8192", "--vocabulary", "50000", "--width", "8", "--threads", "1", "--limit", str(3 << 29)]
    [point] = run_main("loss_memory", results_folder, monkeypatch, options)["points"]
    assert point["full"] is None and "ratio" not in point
    assert 0 < point["ours"]["bytes"] < 8192 * 50000 * 4
    assert (results_folder / "loss_memory.md").read_text().count("does not fit") == 2


def test_ratio_of_the_loss_and_its_full_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = module("loss_memory")
    values = {"ours": {"bytes": 10, "seconds": 3.0}, "full": {"bytes": 40, "seconds": 2.0}}
    monkeypatch.setattr(loss, "_run_point", lambda kind, *_: values[kind])
    results = loss.measure([512], 100, 8)
    assert [point["ratio"] for point in results["points"]] == [0.25, 0.25]
    assert loss.table(results)[1][0] == ["CLM, 512 tokens", "10", "40", "0.250", "3.0", "2.0"]


def test_a_point_that_fails_for_another_reason_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = module("loss_memory")
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="KeyError: 'neither'")
    monkeypatch.setattr(loss.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match=r"ended with 1:\nKeyError"):
        loss._run_point("neither", "clm", 8, 16, 8, None, threads=1)


def test_the_error_of_a_failed_run_has_its_output() -> None:
    with pytest.raises(RuntimeError, match=r"ended with 2:\n(.|\n)*no_such"):
        module("workload").launch([str(BENCHMARKS.parent / "src" / "main.py"), "no_such.yaml"], 1, 1)


def test_help_names_every_field_of_the_shape() -> None:
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "scaling.py"), "--help"], capture_output=True, text=True, check=True
    )
    assert all(f"--{name}" in run.stdout for name in SIZE)
