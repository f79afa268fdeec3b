"""The data in a plan: tokens and epochs of each dataset, and a warning when one would be repeated."""

import json
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from biphasic.commands import plan as commands_plan
from biphasic.config.load import load
from biphasic.config.plan import JobPlan, plan
from biphasic.config.pretrain import PretrainConfig
from biphasic.data import streams as data_streams
from biphasic.data.streams import read_conversions
from helpers.cpu_time import run_measured

ROOT = Path(__file__).parents[2]
LENGTH, BATCH = 256, 10


def record(folder: Path, rows: int, tokens: int, split: str = "train") -> str:
    """The record of a conversion, and the folder of its split."""
    (folder / split).mkdir(parents=True)
    (folder / split / "index.json").write_text("{}")
    content = {"sequence_length": LENGTH, "splits": {split: {"rows": rows, "tokens": tokens}}}
    (folder / "conversion.json").write_text(json.dumps(content))
    return str(folder / split)


def planned(data: dict[str, Any], tmp_path: Path, **changes: Any) -> tuple[JobPlan, str]:
    content = {
        "job": "pretrain",
        "run_name": "run",
        "output": str(tmp_path / "runs"),
        "tokenizer": "tokenizer",
        "max_duration": "100ba",
        "global_batch_size": BATCH,
        "model": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4},
        "data": {"sequence_length": LENGTH, **data},
        "objective": {"phases": [{"name": "clm"}]},
        "checkpoint": {"interval": "10ba"},
        **changes,
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(content))
    config = load(path)
    assert isinstance(config, PretrainConfig)
    run_plan = plan(config, 1, read_conversions(config.streams))
    assert json.loads(run_plan.to_json())["warnings"] == run_plan.warnings
    return run_plan, run_plan.describe()


def test_one_dataset(tmp_path: Path) -> None:
    """100 batches of 10 rows are 1,000 of 4,000 rows, of 250 tokens on average."""
    path = record(tmp_path / "out", rows=4_000, tokens=1_000_000)
    run_plan, text = planned({"train": {"local": path}}, tmp_path)
    [dataset] = run_plan.details["datasets"]
    assert (dataset["run_rows"], dataset["run_tokens"], dataset["epochs"]) == (1_000, 250_000, 0.25)
    assert run_plan.warnings == []
    assert f"  data           250,000 tokens, 0.25 epochs of {path}\n" in text
    assert json.loads(run_plan.to_json())["datasets"][0]["run_tokens"] == 250_000


def test_one_dataset_that_is_repeated(tmp_path: Path) -> None:
    path = record(tmp_path / "out", rows=400, tokens=100_000)
    run_plan, text = planned({"train": {"local": path}}, tmp_path)
    assert run_plan.details["datasets"][0]["epochs"] == 2.5
    assert text.endswith(f"\n  WARNING        data.train would be repeated: the run takes 2.5 epochs of {path}")


def test_a_run_that_begins_in_the_middle(tmp_path: Path) -> None:
    """1,000 rows from row 2,995 (rounded up to 3,000) on are the last quarter of 4,000."""
    path = record(tmp_path / "out", rows=4_000, tokens=1_000_000)
    run_plan, text = planned({"train": {"local": path}, "start_at": "2995sp"}, tmp_path)
    assert "begins at row 3,000 of the order (data.start_at: 2995sp)\n" in text
    assert run_plan.warnings == []
    run_plan, _ = planned({"train": {"local": path}, "start_at": "301ba"}, tmp_path)
    [warning] = run_plan.warnings
    assert warning.startswith("data.train: the run begins at row 3,010 (data.start_at) and ends in epoch 2 of")
    # An epoch is 4,000 rows; the first one is what is left of it.
    run_plan, _ = planned({"train": {"local": path}, "start_at": "301ba"}, tmp_path, max_duration="1ep")
    assert run_plan.details["datasets"][0]["run_rows"] == 990


@pytest.mark.parametrize(
    ("duration", "rows", "tokens"),
    # By batches; by epochs of the 1,005 rows, whose last 5 make no batch; by real tokens, of which 20 rows have 5,000.
    [("30ba", 300, 75_000), ("2ep", 2_000, 500_000), ("5000tok", 20, 5_000), ("5001tok", 30, 7_500)],
)
def test_lengths_in_every_unit(tmp_path: Path, duration: str, rows: int, tokens: int) -> None:
    path = record(tmp_path / "out", rows=1_005, tokens=251_250)
    run_plan, _ = planned({"train": {"local": path}}, tmp_path, max_duration=duration, checkpoint={})
    assert (run_plan.details["datasets"][0]["run_rows"], run_plan.details["datasets"][0]["run_tokens"]) == (
        rows,
        tokens,
    )


def mix(tmp_path: Path) -> dict[str, Any]:
    web = record(tmp_path / "web", rows=1_000, tokens=250_000)
    code = record(tmp_path / "code", rows=100, tokens=20_000)
    return {"web": {"local": web, "proportion": 0.8}, "code": {"local": code, "proportion": 0.2}}


def test_a_mix(tmp_path: Path) -> None:
    """1,000 rows: 800 of the web's 1,000, and 200 of code's 100."""
    streams = mix(tmp_path)
    run_plan, text = planned({"mix": streams}, tmp_path)
    code, web = run_plan.details["datasets"]
    assert (code["key"], code["run_rows"], code["run_tokens"], code["epochs"]) == ("data.mix.code", 200, 40_000, 2.0)
    assert (web["key"], web["run_rows"], web["run_tokens"], web["epochs"]) == ("data.mix.web", 800, 200_000, 0.8)
    assert run_plan.warnings == [
        f"data.mix.code would be repeated: the run takes 2 epochs of {streams['code']['local']}",
    ]
    assert f"  data           web 0.8: 200,000 tokens, 0.8 epochs of {streams['web']['local']}\n" in text


def test_a_mix_by_tokens_and_by_epochs(tmp_path: Path) -> None:
    streams = mix(tmp_path)
    # A batch has 8 x 250 + 2 x 200 = 2,400 tokens: 10 batches.
    run_plan, text = planned({"mix": streams}, tmp_path, max_duration="24000tok", checkpoint={})
    assert [dataset["run_tokens"] for dataset in run_plan.details["datasets"]] == [4_000, 20_000]
    assert "web 0.8: about 20,000 tokens" in text
    # Streaming's epoch: as many rows as both have together, 1,100.
    run_plan, _ = planned({"mix": streams}, tmp_path, max_duration="1ep")
    assert [dataset["run_rows"] for dataset in run_plan.details["datasets"]] == [220, 880]
    run_plan, _ = planned({"mix": streams, "epoch_rows": 500}, tmp_path, max_duration="2ep")
    assert [dataset["run_rows"] for dataset in run_plan.details["datasets"]] == [200, 800]


def test_a_run_over_several_epochs_of_the_mix_is_warned(tmp_path: Path) -> None:
    web = record(tmp_path / "web", rows=10_000, tokens=2_500_000)
    code = record(tmp_path / "code", rows=10_000, tokens=2_500_000)
    streams = {"web": {"local": web, "proportion": 0.5}, "code": {"local": code, "proportion": 0.5}}
    run_plan, _ = planned({"mix": streams, "epoch_rows": 600}, tmp_path)
    assert len(run_plan.warnings) == 1 and "set data.epoch_rows to 1,000" in run_plan.warnings[0]
    run_plan, _ = planned({"mix": streams, "epoch_rows": 1_000}, tmp_path)
    assert run_plan.warnings == []


def test_records_that_cannot_be_read(tmp_path: Path) -> None:
    streams = mix(tmp_path)
    streams["code"]["local"] = str(tmp_path / "nowhere" / "train")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "conversion.json").write_text("{")
    streams["web"]["local"] = str(tmp_path / "broken" / "train")
    run_plan, text = planned({"mix": streams}, tmp_path)
    assert [dataset["tokens"] for dataset in run_plan.details["datasets"]] == [None, None]
    assert f"code 0.2: unknown (no record at {tmp_path / 'nowhere'})" in text
    assert f"web 0.8: unknown (no record at {tmp_path / 'broken'})" in text


def test_a_bucket_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: object) -> None:
        time.sleep(60)

    planned({"train": {"local": str(tmp_path / "cache/train"), "remote": str(tmp_path / "out" / "train")}}, tmp_path)
    monkeypatch.setattr(data_streams, "read_stream_record", never)
    monkeypatch.setattr(commands_plan, "PLAN_SECONDS", 0.2)
    start = time.monotonic()
    options = Namespace(ranks=1, json=False, memory=False, draw=None)
    assert commands_plan.print_plan(load(tmp_path / "run.yaml"), options) == 0
    assert time.monotonic() - start < 30
    printed = capsys.readouterr().out
    assert f"unknown (no record at {tmp_path / 'out'})" in printed and "start          batch 0, from new weights" in printed


def test_the_plan_of_a_mix_is_fast_and_needs_no_torch(tmp_path: Path) -> None:
    planned({"mix": mix(tmp_path)}, tmp_path)
    code = (
        "import sys, time; sys.path.insert(0, 'src')\nimport main\n"
        f"assert main.main([{str(tmp_path / 'run.yaml')!r}, '--plan']) == 0\n"
        "assert not {'torch', 'composer', 'streaming', 'transformers', 'boto3', 'pyarrow', 'numpy'} & set(sys.modules)\n"
    )
    run, seconds = run_measured([sys.executable, "-c", code], cwd=ROOT)
    assert seconds < 3
    assert run.returncode == 0, run.stderr
    assert "WARNING" in run.stdout
