"""The comparison of Muon with AdamW: its tables, from runs whose losses are known."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "recipes" / "muon"))

from compare import Final, main, tokens_to  # noqa: E402  # pyright: ignore[reportMissingImports]


def test_tokens_between_two_lengths() -> None:
    """A loss that falls by 1 from 100 to 400 tokens has fallen by half at 200."""
    runs = [Final(400, 3.0), Final(100, 4.0)]
    assert tokens_to(3.5, runs) == pytest.approx(200)
    assert tokens_to(4.0, runs) == pytest.approx(100)
    assert tokens_to(2.9, runs) is None
    assert tokens_to(4.1, runs) is None


def write_run(folder: Path, tokens: int, loss: float) -> None:
    folder.mkdir(parents=True)
    lines = [
        {"time": 1.0, "batch": 1, "tokens": tokens // 2, "metrics/mlm/loss": 9.0},
        {"time": 2.0, "batch": 2, "tokens": tokens, "metrics/mlm/loss": loss},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for objective in ("mlm", "clm-mlm"):
        for optimizer, gain in (("adamw", 0.0), ("muon", 0.5)):
            for rate in ("2e-3", "16e-3") if optimizer == "muon" else ("2e-3",):
                write_run(tmp_path / "muon" / "rates" / f"{objective}-{optimizer}-{rate}", 100, 5.0 - gain)
        for seed, loss in (("s1", 5.0), ("s2", 5.2)):
            write_run(tmp_path / "muon" / "seeds" / f"{objective}-adamw-320-{seed}", 320, loss)
            # Muon has AdamW's loss at half the tokens.
            write_run(tmp_path / "muon" / "seeds" / f"{objective}-muon-160-{seed}", 160, loss)
            write_run(tmp_path / "muon" / "seeds" / f"{objective}-muon-320-{seed}", 320, loss - math.log(2))
    monkeypatch.setattr(sys, "argv", ["compare.py", str(tmp_path)])
    main()
    printed = capsys.readouterr().out
    assert "| final MLM loss | 2e-3 | 16e-3 |" in printed
    assert "| MLM: AdamW | 5.000 |  |" in printed
    assert "| MLM: Muon | 4.500 | 4.500 |" in printed
    assert "| CLM, then MLM | 5.100 ± 0.141 | 4.407 ± 0.141 | 2.00, 2.00 |" in printed
