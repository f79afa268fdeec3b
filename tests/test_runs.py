"""The report of a run: checkpoints, attempts, lost tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from biphasic.checkpointing.run_lock import KILLED
from biphasic.commands import main
from conftest import Write
from helpers.tiny import config_of, keep_checkpoints_up_to, train


def test_report_of_a_killed_and_resumed_run(write_yaml: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_yaml("past", checkpoint__interval="4ba")
    folder = train(config_of(path))
    keep_checkpoints_up_to(folder, 8)
    [attempt] = (folder / "checkpoints" / "attempts").iterdir()
    about = json.loads(attempt.read_text())
    tokens = {manifest["batch"]: manifest["run"]["tokens"] for manifest in
              (json.loads(file.read_text()) for file in (folder / "checkpoints").glob("ba*.json"))}  # fmt: skip
    # As if it had been killed three batches later.
    attempt.write_text(json.dumps({**about, "batch": 11, "tokens": tokens[8] + 500, "until": None, "reason": KILLED}))
    # A start that failed before it had found its checkpoint.
    failed = {**about, "attempt": f"{about['attempt']}a", "from": None, "batch": 0, "tokens": 0, "reason": "no data"}
    attempt.with_name(f"{attempt.stem}a.json").write_text(json.dumps(failed))
    train(config_of(path))
    (folder / "checkpoints" / "ba10-rank0.pt").write_bytes(b"cut off")
    cut = folder / "checkpoints" / "ba4-rank0.pt"
    cut.write_bytes(cut.read_bytes()[:100])
    capsys.readouterr()
    assert main(["runs", str(folder)]) == 0
    output = capsys.readouterr().out
    lines = {int(line.split()[0].replace(",", "")): line for line in output.splitlines() if "B  " in line}
    assert "not usable: ba4-rank0.pt has 100 bytes instead of" in lines[4]
    assert "clm" in lines[6] and "complete, kept" in lines[6]
    assert "not usable: it has no ba10.json, so it was not finished" in lines[10]
    assert lines[12].endswith("complete") and f"{tokens[8]:,}" in lines[8]
    assert f"batch 0 to at least 11: {KILLED}" in output and "batch 0 to 0: no data" in output
    assert [line.strip() for line in output.splitlines() if "lost: " in line] == [
        "lost: at least 500 tokens",
        "lost: nothing",
    ]
    assert "batch 8 to 12: finished" in output
    # Killed before its first heartbeat: its checkpoints say how far it came.
    attempt.write_text(json.dumps({**about, "batch": 0, "tokens": 0, "until": None, "reason": KILLED}))
    assert main(["runs", str(folder)]) == 0
    assert f"batch 0 to at least 8: {KILLED}" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["nothing", "s3://no-such-bucket-here/x"])
def test_folder_without_a_run(tmp_path: Path, where: str, capsys: pytest.CaptureFixture[str], s3: Any) -> None:
    assert main(["runs", where if "://" in where else str(tmp_path / where)]) == 2
    error = capsys.readouterr().err
    assert "holds no run (no checkpoints, no attempts)" in error or "can't be read" in error


@pytest.mark.parametrize(("command", "more"), [("runs", []), ("export", ["out"])])
def test_a_fine_tuning_has_no_checkpoints(
    tmp_path: Path, command: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "attempts").mkdir()
    (tmp_path / "config.yaml").write_text("job: finetune\nrun_name: x\n")
    assert main([command, str(tmp_path), *more]) == 2
    message = f"{tmp_path}/config.yaml: is of job: finetune; expected a run of job: pretrain, with checkpoints"
    assert message in capsys.readouterr().err


def test_damaged_files_of_a_run_are_named(write_yaml: Write, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = train(config_of(write_yaml("damaged")))
    [attempt] = (folder / "checkpoints" / "attempts").iterdir()
    attempt.write_text("")
    assert main(["runs", str(folder)]) == 2
    assert f"{attempt}: is not a run's record; remove it" in capsys.readouterr().err
    (folder / "config.yaml").write_text("")
    assert main(["runs", str(folder)]) == 2
    assert f"{folder / 'config.yaml'}: is not a run's configuration" in capsys.readouterr().err
