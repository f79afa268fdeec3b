"""The comparison of Muon with AdamW: its records and tables, from runs whose losses and scores are known."""

import json
import math
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from biphasic.finetuning.records import DownstreamResult
from biphasic.report.formatting import markdown_page
from biphasic.storage import open_store
from biphasic.sweep.records import Cell, Grid, GridTask, TrialRecord, write_grid, write_record
from helpers.tiny import ROOT

sys.path.insert(0, str(ROOT / "recipes" / "muon"))

import compare  # pyright: ignore[reportMissingImports]

MUON = ROOT / "recipes" / "muon"
SEEDS = ("s1", "s2", "s3")


def run(tokens: int, loss: float) -> Any:
    return compare.Run("seeds", "mlm-muon", tokens, loss, 0)


def test_tokens_between_two_lengths() -> None:
    """A loss that falls by 1 from 100 to 400 tokens has fallen by half at 200."""
    runs = [run(400, 3.0), run(100, 4.0)]
    assert compare.tokens_to(3.5, runs) == pytest.approx(200)
    assert compare.tokens_to(4.0, runs) == pytest.approx(100)
    assert compare.tokens_to(2.9, runs) is None
    assert compare.tokens_to(4.1, runs) is None


def write_run(folder: Path, tokens: int, loss: float) -> None:
    folder.mkdir(parents=True)
    lines = [
        {"time": 1.0, "batch": 1, "tokens": tokens // 2, "metrics/mlm/loss": 9.0},
        {"time": 2.0, "batch": 2, "tokens": tokens, "metrics/mlm/loss": loss},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_sweep(folder: Path, models: list[str]) -> None:
    """Write trials at two rates and with two seeds. Muon is better by 0.1, 0.2 and 0.3, and validation prefers 6e-3."""
    cells = [Cell(*cell) for cell in product(models, ["parameters"], (2e-3, 6e-3), (0, 1))]
    names = {f"{cell.model}.{cell.lr}.{cell.seed}": cell for cell in cells}
    task = GridTask("parameters", "tokens", (("parameters", "parameters", "f1"),))
    store = open_store(str(folder))
    write_grid(store, Grid(tuple(models), (task,), (2e-3, 6e-3), (0, 1), names, 2))
    for name, cell in names.items():
        gain = 0.1 * int(cell.model[-1]) if "muon" in cell.model else 0.0
        validation, test = (0.4, 0.5 + gain + 0.02 * cell.seed) if cell.lr == 6e-3 else (0.3, 0.9)
        result = DownstreamResult("parameters", "parameters", "tokens", "f1", validation, test)
        about = {"commit": "abc", "host": "h", "hardware": "c", "versions": {}, "tokens": 5}
        write_record(store, TrialRecord(name, cell, "done", (result,), seconds={"total": 2.0}, about=about))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The mini study's folder, with runs of Muon and AdamW that have no checkpoints."""
    source = {"commit": "def", "host": "h", "hardware": "c", "versions": {}}
    monkeypatch.setattr(compare.Sources, "index_of_run", lambda self, _: self.index(source))
    for objective in ("mlm", "clm-mlm"):
        for optimizer, gain in (("adamw", 0.0), ("muon", 0.5)):
            for rate in ("2e-3", "16e-3") if optimizer == "muon" else ("2e-3",):
                write_run(tmp_path / "muon" / "rates" / f"{objective}-{optimizer}-{rate}", 100, 5.0 - gain)
        for seed, loss in zip(SEEDS, (5.0, 5.2, 5.1), strict=True):
            write_run(tmp_path / "muon" / "seeds" / f"{objective}-adamw-320-{seed}", 320, loss)
            # Muon has AdamW's loss at half the tokens.
            write_run(tmp_path / "muon" / "seeds" / f"{objective}-muon-160-{seed}", 160, loss)
            write_run(tmp_path / "muon" / "seeds" / f"{objective}-muon-320-{seed}", 320, loss - math.log(2))
    models = [run.parent.name for run in sorted((tmp_path / "muon" / "seeds").glob("*/metrics.jsonl"))]
    write_sweep(tmp_path / "muon" / "seeds" / "sweep", models)
    return tmp_path


def test_the_records_and_their_tables(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert compare.main([str(folder)], target) == 0
    tables = (target / "results.md").read_text()
    assert "| final MLM loss | 2e-3 | 16e-3 |" in tables
    assert "| MLM: AdamW | 5.000 |  |" in tables
    assert "| MLM: Muon | 4.500 | 4.500 |" in tables
    assert "| CLM, then MLM | 5.100 ± 0.100 | 4.407 ± 0.100 | 2.00, 2.00, 2.00 |" in tables
    # The mean of the seeds at the rate that validation chose; t(0.975, 2) of 0.1, 0.2 and 0.3 is 4.30 * 0.1 / 3**0.5.
    assert "| MLM | 51.00 ± 0.00 | 71.00 ± 24.84 | +20.00 ± 24.84 | 0.0742 |" in tables
    records = json.loads((target / "records.json").read_text())
    assert [source["commit"] for source in records["sources"]] == ["def", "abc"]
    assert len(records["runs"]) == 6 + 18 and len(records["trials"]) == 72

    (target / "results.md").unlink()
    assert compare.main([], target) == 0
    assert (target / "results.md").read_text() == tables


def test_a_missing_fine_tuning_is_named_and_nothing_is_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "muon" / "seeds" / "sweep" / "trials" / "mlm-muon-320-s2.0.006.1.json").unlink()
    assert compare.main([str(folder)], tmp_path / "target") == 2
    assert "mlm-muon-320-s2.0.006.1 is missing or failed" in capsys.readouterr().err
    assert not list((tmp_path / "target").glob("*"))


def test_a_run_that_has_not_ended_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = folder / "muon" / "rates" / "mlm-adamw-2e-3" / "metrics.jsonl"
    for line in ('{"time": 3.0, "batch": 3, "tokens": 9, "loss/train/total": 3.0}\n', ""):
        metrics.write_text(line)
        assert compare.main([str(folder)], tmp_path / "target") == 2
        assert f"{metrics.parent}: has no MLM loss after its last batch" in capsys.readouterr().err


def test_the_page_has_the_tables_of_the_published_records() -> None:
    records = compare.parse((MUON / "records.json").read_bytes())
    made = markdown_page(
        [*compare.rate_table(records), *compare.token_table(records), *compare.score_table(records)]
    ).decode()
    assert (MUON / "results.md").read_text() == made
    page = (MUON / "README.md").read_text()
    assert all(f"\n{table}\n" in page for table in made.strip().split("\n\n"))
