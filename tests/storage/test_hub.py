"""A missing folder is reported at once, also without a network."""

import os
import subprocess
import sys
import time
from pathlib import Path

from biphasic.storage.hub import is_local_path, why_missing
from helpers.tiny import ROOT


def test_which_paths_can_only_be_local() -> None:
    for path in ("./x", "~/x", "/x", "x/", "a/b/c", "runs/encoder", "data/tokenizer", "../x/y"):
        assert is_local_path(path), path
    for path in ("bert-base-uncased", "EuroBERT/EuroBERT-210m", "s3://bucket/a/b", "hf://models/x/y/z"):
        assert not is_local_path(path), path


def test_a_folder_of_a_run(tmp_path: Path) -> None:
    assert why_missing("runs/nothing/encoder") == why_missing("runs/nothing") == "there is no such folder"
    assert why_missing(str(tmp_path)) is None


def test_without_a_network_one_line_says_so(tmp_path: Path) -> None:
    """A tokenizer `my/tok` that was never trained, with a hub on a port that nobody listens on."""
    (tmp_path / "text.txt").write_text("one")
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-m", "biphasic", "convert", str(ROOT / "yamls" / "data" / "own_text.yaml")]
    begin = time.monotonic()
    run = subprocess.run(
        [*command, "tokenizer=my/tok", "source.paths=[text.txt]", "output=out"],
        capture_output=True, text=True, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 2 and time.monotonic() - begin < 15
    [line] = run.stderr.splitlines()
    assert line.startswith("tokenizer my/tok: no such folder here, and from the hub: ")
