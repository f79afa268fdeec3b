"""Waiting for data is measured, and said when it is long."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from biphasic.training import pretrain
from biphasic.training.jsonl_logger import read_metrics
from biphasic.training.loader_meter import LoaderMeter
from conftest import Write
from tiny import config_of, train


def run(write_yaml: Write, monkeypatch: pytest.MonkeyPatch, seconds: float) -> Path:
    """A tiny run of 12 batches whose loader takes `seconds` for each."""
    original = pretrain.loader

    def slow(*given: object, **named: object) -> object:
        spec = original(*given, **named)  # pyright: ignore[reportArgumentType]
        collate = spec.dataloader.collate_fn

        def collate_slowly(rows: object) -> object:
            time.sleep(seconds)
            return collate(rows)

        spec.dataloader.collate_fn = collate_slowly
        return spec

    monkeypatch.setattr(pretrain, "loader", slow)
    # The share of a step of a few milliseconds: what a loader without processes needs is not short beside it.
    monkeypatch.setattr(pretrain, "LoaderMeter", lambda: LoaderMeter(window=5, too_long=0.6))
    return train(config_of(write_yaml(checkpoint__interval="100ba")))


def test_a_slow_loader(
    write_yaml: Write,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with caplog.at_level(logging.WARNING, "biphasic"):
        found = read_metrics(run(write_yaml, monkeypatch, 0.4) / "metrics.jsonl")
    assert len(found) == 12
    assert all(0.4 <= entry["data/wait_seconds"] < 3 for entry in found)
    # 12 batches: the first is the start, then two windows of 5.
    windows = [entry["batch"] for entry in found if "data/wait_share" in entry]
    assert windows == [6, 11]
    for entry in found:
        if "data/wait_share" in entry:
            assert 0.6 < entry["data/wait_share"] < 1
            tokens = entry["tokens"] - next(e["tokens"] for e in found if e["batch"] == entry["batch"] - 5)
            seconds = entry["time"] - next(e["time"] for e in found if e["batch"] == entry["batch"] - 5)
            assert entry["data/tokens_per_second"] == pytest.approx(tokens / seconds, rel=0.1)
    warnings = [record.getMessage() for record in caplog.records if "waits for data" in record.getMessage()]
    assert len(warnings) == 2
    assert "of the last 5 steps' time; raise data.num_workers or data.predownload" in warnings[0]
    assert found[-1]["data/wait_share_total"] > 0.6
    assert "waited for data: " in capsys.readouterr().out


def test_a_fast_loader(write_yaml: Write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "biphasic"):
        found = read_metrics(run(write_yaml, monkeypatch, 0) / "metrics.jsonl")
    assert not [record for record in caplog.records if "waits for data" in record.getMessage()]
    assert 0 <= found[-1]["data/wait_share_total"] < 0.6


def test_nothing_is_kept_in_checkpoints() -> None:
    assert LoaderMeter().state_dict() == {}
