"""A checkpoint from elsewhere can't run code."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from biphasic.errors import UserError
from biphasic.model.checkpoint import read_record, require_safe_checkpoint
from biphasic.storage import file_hash
from conftest import Write
from helpers.tiny import config_of, dump_json, launch, train


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_a_file_with_code(write_yaml: Write, tmp_path: Path) -> None:
    folder = train(config_of(write_yaml("trunk", checkpoint__interval="8ba")))
    good = folder / "checkpoints" / "ba8-rank0.pt"
    require_safe_checkpoint(str(good))
    assert read_record(str(good))["batches"] == 8
    content = torch.load(good, weights_only=False)
    content["state"]["callbacks"]["RunRecord"]["note"] = Evil(tmp_path / "ran")
    bad = tmp_path / "ba8-rank0.pt"
    torch.save(content, bad)
    manifest = json.loads((good.parent / "ba8.json").read_bytes())
    manifest["files"] = {bad.name: [bad.stat().st_size, file_hash(bad)]}
    dump_json(tmp_path / "ba8.json", manifest)
    for use in (require_safe_checkpoint, read_record):
        with pytest.raises(UserError, match=r"loading it would run (posix|nt).mkdir: refused"):
            use(str(bad))
    # As a trunk's checkpoint, too, which Composer would load.
    with pytest.raises(UserError, match=r"would run posix.mkdir"):
        train(config_of(write_yaml("branch", start_from=str(bad))))
    assert not (tmp_path / "ran").exists()


def test_shards_with_code(write_yaml: Write, tmp_path: Path) -> None:
    path = write_yaml("two", parallelism__strategy="fsdp", max_duration="4ba", checkpoint__interval="4ba",
                      objective__phases=[{"name": "mlm"}], schedule__warmup="1ba", schedule__decay="1ba")  # fmt: skip
    run = launch(path, processes=2)
    assert run.returncode == 0, run.stderr[-3000:]
    good = Path(config_of(path).output) / "two" / "checkpoints" / "ep0-ba4"
    require_safe_checkpoint(str(good))
    assert read_record(str(good))["batches"] == 4
    # In the index.
    bad = tmp_path / "ep0-ba4"
    shutil.copytree(good, bad)
    # The index can be read by every Python: a path's class has another module in 3.13.
    assert b"pathlib" not in (good / ".metadata").read_bytes()
    index = pickle.loads((good / ".metadata").read_bytes())
    index.planner_data = Evil(tmp_path / "ran")
    (bad / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match=r"would run posix.mkdir"):
        read_record(str(bad))
    # In a small value, which the loader unpickles.
    shutil.rmtree(bad)
    shutil.copytree(good, bad)
    index = pickle.loads((good / ".metadata").read_bytes())
    at = next(key for key in index.storage_data if key.fqn == "state.run_name")
    torch.save(Evil(tmp_path / "ran"), tmp_path / "value")
    (bad / "extra.distcp").write_bytes((tmp_path / "value").read_bytes())
    lies = index.storage_data[at]
    lies.relative_path, lies.offset, lies.length = "extra.distcp", 0, (tmp_path / "value").stat().st_size
    (bad / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match=r"would run posix.mkdir"):
        require_safe_checkpoint(str(bad))
    assert not (tmp_path / "ran").exists()


def test_a_cut_off_file(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1000)}, tmp_path / "whole.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:2000])
    with pytest.raises(UserError, match=r"cut.pt: is damaged or incomplete \("):
        require_safe_checkpoint(str(tmp_path / "cut.pt"))
