"""Throughput compared with counts by hand; warnings about waiting for data."""

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.core import State
from composer.loggers import Logger

from biphasic.config.model import architecture_of
from biphasic.devices import peak_flops
from biphasic.model.architecture import PRESETS
from biphasic.objectives.batch import step_of
from biphasic.training import meters, recipe
from biphasic.training.meters import Meters
from biphasic.training.metrics_file import read_metrics
from conftest import Write
from helpers.tiny import LENGTH, config_of, train


def run(write_yaml: Write, monkeypatch: pytest.MonkeyPatch, seconds: float, most: float) -> Path:
    """A tiny run of 12 batches whose loader takes `seconds` for each, and which warns of a share of waiting above `most`."""
    original = recipe.build_loader

    def slow(*arguments: object, **keywords: object) -> object:
        batches = original(*arguments, **keywords)  # pyright: ignore[reportArgumentType]
        collate = batches.collate_fn

        def collate_slowly(rows: object) -> object:
            time.sleep(seconds)
            return collate(rows)

        batches.collate_fn = collate_slowly
        return batches

    monkeypatch.setattr(recipe, "build_loader", slow)
    monkeypatch.setattr(meters, "_WINDOW", 5)
    monkeypatch.setattr(meters, "_MAX_WAIT_SHARE", most)
    return train(config_of(write_yaml(checkpoint__interval="100ba")))


def test_a_slow_loader_is_measured_and_warned_about(
    write_yaml: Write,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with caplog.at_level(logging.WARNING, "biphasic"):
        entries = read_metrics(run(write_yaml, monkeypatch, 0.4, 0.1) / "metrics.jsonl")
    assert len(entries) == 12
    assert all(0.4 <= entry["data/wait_seconds"] < 3 for entry in entries)
    # 12 batches: the first is the start, then two windows of 5.
    windows = [entry["batch"] for entry in entries if "data/wait_share" in entry]
    assert windows == [6, 11]
    for entry in entries:
        if "data/wait_share" in entry:
            last = entries[entry["batch"] - 5 : entry["batch"]]
            waited = sum(e["data/wait_seconds"] for e in last) / sum(e["time/step_seconds"] for e in last)
            assert entry["data/wait_share"] == pytest.approx(waited) and waited < 1
            tokens = entry["tokens"] - next(e["tokens"] for e in entries if e["batch"] == entry["batch"] - 5)
            seconds = sum(e["time/step_seconds"] for e in last)
            assert entry["throughput/tokens_per_second"] == pytest.approx(tokens / seconds)
            assert entry["memory/peak_bytes"] > 1e8
    warnings = [record.getMessage() for record in caplog.records if "waits for data" in record.getMessage()]
    assert len(warnings) == 2
    assert "of the last 5 steps' time; raise data.num_workers or data.predownload" in warnings[0]
    waited = sum(e["data/wait_seconds"] for e in entries[1:]) / sum(e["time/step_seconds"] for e in entries[1:])
    assert entries[-1]["data/wait_share_total"] == pytest.approx(waited)
    output = capsys.readouterr().out
    assert "waited for data: " in output and "clm: " in output and "mlm: " in output


def test_a_fast_loader_is_not_warned_about(
    write_yaml: Write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "biphasic"):
        # Of a step of a few milliseconds: what a loader without processes needs is not short beside it.
        entries = read_metrics(run(write_yaml, monkeypatch, 0, 0.6) / "metrics.jsonl")
    assert not [record for record in caplog.records if "waits for data" in record.getMessage()]
    assert 0 <= entries[-1]["data/wait_share_total"] < 0.6


def test_flops_are_counted_from_segments_and_targets(write_yaml: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """MFU counts documents' tokens and the positions that are predicted; one objective at a time."""
    counted: list[tuple[str, float]] = []
    shapes: list[tuple[list[list[int]], int]] = []
    after = Meters.after_train_batch

    def spy(self: Meters, state: State, logger: Logger) -> None:
        after(self, state, logger)
        batch: Any = state.batch
        counted.append((step_of(batch).objective.name, self._flops))
        shapes.append((batch["lengths"], int((batch["labels"] >= 0).sum())))

    monkeypatch.setattr(Meters, "after_train_batch", spy)
    config = config_of(write_yaml(max_duration="8ba", schedule={}, checkpoint__interval="100ba"))
    entries = read_metrics(train(config) / "metrics.jsonl")
    size = architecture_of(config.model)
    assert size is not None
    assert [objective for objective, _ in counted] == ["clm"] * 6 + ["mlm"] * 2
    for (objective, flops), (lengths, predicted) in zip(counted, shapes, strict=True):
        real = [length for row in lengths for length in row]
        assert flops == size.flops(real, objective == "clm", predicted)
        assert any(sum(row) < LENGTH for row in lengths)
    rate = sum(flops for _, flops in counted[6:]) / sum(entry["time/step_seconds"] for entry in entries[6:])
    assert entries[-1]["throughput/mlm/flops_per_second"] == pytest.approx(rate)
    assert "throughput/mlm/mfu" not in entries[-1]


def test_mfu_is_the_share_of_the_peak() -> None:
    steps = [(2.0, 1.0, 100.0, 300.0), (6.0, 0.0, 300.0, 700.0)]
    expected = {"tokens_per_second": 50, "flops_per_second": 125, "mfu": 0.25}
    assert meters._rates(steps, 500.0) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H200", torch.bfloat16, 989.4e12),
        ("NVIDIA H200 NVL", torch.bfloat16, 835.5e12),
        ("NVIDIA H200 NVL", torch.float32, 60e12),
        ("NVIDIA GH200 480GB", torch.bfloat16, 989.4e12),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA H800", torch.bfloat16, 989.4e12),
        ("NVIDIA H800 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA B200", torch.bfloat16, 2250e12),
        ("NVIDIA GB200", torch.bfloat16, 2500e12),
        ("NVIDIA B300 SXM6 AC", torch.bfloat16, 2250e12),
        ("NVIDIA GB300", torch.bfloat16, 2500e12),
        ("NVIDIA GB300", torch.float32, 80e12),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", torch.bfloat16, 480e12),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", torch.bfloat16, 503.8e12),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", torch.bfloat16, 440e12),
        ("NVIDIA RTX 6000 Ada Generation", torch.bfloat16, 364.2e12),
        ("NVIDIA RTX A6000", torch.bfloat16, 154.8e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5e12),
        ("NVIDIA A10G", torch.bfloat16, 70e12),
        ("NVIDIA L40S", torch.bfloat16, 362e12),
        ("AMD Instinct MI250X", torch.bfloat16, 191.5e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16, None),
        ("NVIDIA RTX A1000", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, None),
        ("Something else", torch.bfloat16, None),
    ],
)
def test_peak_flops(name: str, dtype: torch.dtype, peak: float | None) -> None:
    assert peak_flops(name, dtype) == peak


def test_checkpoints_hold_no_meters() -> None:
    assert Meters(PRESETS["210m"], torch.float32).state_dict() == {}
