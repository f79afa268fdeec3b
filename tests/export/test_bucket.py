"""Checkpoints are exported from a file, a folder or a bucket, and from a run's folder the newest."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from biphasic.checkpointing.fetch import local_checkpoint
from biphasic.commands import main
from biphasic.errors import UserError
from conftest import MakeBucket
from helpers.buckets import bucket_for, client, flip_a_bit, upload, upload_to
from helpers.stored_checkpoints import checkpoint_of, network


@pytest.fixture
def run(dataset: Path, tmp_path: Path) -> Path:
    """A run's folder with a file, then a sharded checkpoint, each with its own weights."""
    folder = tmp_path / "made"
    for batch, sharded in ((20, False), (40, True)):
        model = network()
        with torch.no_grad():
            model.backbone.norm.weight.fill_(batch)  # pyright: ignore
        checkpoint_of(model, folder, dataset / "tokenizer", sharded, batch=batch)
    return folder


def exported(path: str, out: Path) -> float:
    """The batch of the exported weights; nothing else was written beside the export."""
    before = {file.name for file in out.parent.iterdir()}
    assert main(["export", path, str(out)]) == 0
    assert {file.name for file in out.parent.iterdir()} - before == {out.name}
    return float(load_file(out / "model.safetensors")["model.norm.weight"][0])


def test_export_from_a_bucket(run: Path, store: MakeBucket, tmp_path: Path) -> None:
    address = upload_to(run, f"{store('exports')}/run/checkpoints")
    assert exported(f"{address}/ba20-rank0.pt", tmp_path / "file") == 20
    assert exported(f"{address}/ep0-ba40", tmp_path / "sharded") == 40
    assert exported(f"{address}/", tmp_path / "newest") == 40


def test_export_of_the_newest_checkpoint(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert exported(str(run), tmp_path / "newest") == 40
    shutil.rmtree(run / "ep0-ba40")
    with caplog.at_level(logging.WARNING):
        assert exported(str(run), tmp_path / "before") == 20
    assert "ba40 in" in caplog.text and "is skipped" in caplog.text


def test_damaged_checkpoints_in_a_bucket_are_refused(
    run: Path, s3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = bucket_for(s3, "damaged-exports")
    address = upload(run, bucket, "run")
    flip_a_bit(bucket, "run/ep0-ba40/__0_0.distcp")
    flip_a_bit(bucket, "run/ba20-rank0.pt")
    client().put_object(Bucket=bucket, Key="run/ba60-rank0.pt", Body=b"half")
    before = sorted(tmp_path.iterdir())
    for name, message in (
        ("ba20-rank0.pt", "can't be used (ba20-rank0.pt is damaged: its hash is not the manifest's)"),
        ("ep0-ba40", "can't be used (ep0-ba40/__0_0.distcp is damaged"),
        ("ba40-rank0.pt", "can't be used (ba40.json is the manifest of ep0-ba40)"),
        ("ba60-rank0.pt", "its manifest is ba60.json)"),
        ("", "can't be used (it holds no complete checkpoint; ba60: it has no ba60.json, so it was not finished)"),
    ):
        path = f"{address}/{name}".rstrip("/")
        assert main(["export", path, str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"checkpoint {path}: ")
        assert message in error
        assert sorted(tmp_path.iterdir()) == before, name
    for path in (f"s3://{bucket}/nothing", "s3://there-is-no-such-bucket/run"):
        assert main(["export", path, str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"checkpoint {path}: can't be used (")
        assert error.count("\n") == 1


def test_local_checkpoint(run: Path, s3: Path, tmp_path: Path) -> None:
    downloads = tmp_path / "downloads"
    for path in ("org/model", str(tmp_path), str(run / "ba20-rank0.pt"), str(run / "ep0-ba40"), str(run / "none.pt")):
        assert local_checkpoint(path, downloads) == path
    assert local_checkpoint(str(run), downloads) == str(run / "ep0-ba40")
    assert not downloads.exists()
    address = upload(run, bucket_for(s3, "fetched"), "run")
    assert local_checkpoint(address, downloads) == str(downloads / "ep0-ba40")
    # Of a run's folder the newest, wherever the run saves.
    named = tmp_path / "named"
    named.mkdir()
    (named / "checkpoints").symlink_to(run)
    assert local_checkpoint(str(named), tmp_path / "unused") == str(named / "checkpoints" / "ep0-ba40")
    (named / "config.yaml").write_text(f"{{output: runs, run_name: named, checkpoint: {{folder: '{address}'}}}}")
    assert local_checkpoint(str(named), downloads) == str(downloads / "ep0-ba40")
    (named / "config.json").write_text("{}")  # a model of others, which has a config.yaml too
    assert local_checkpoint(str(named), downloads) == str(named)
    # Only a damaged file is downloaded again.
    index, content = downloads / "ep0-ba40" / ".metadata", downloads / "ep0-ba40" / "__0_0.distcp"
    before = index.stat().st_mtime_ns
    content.write_bytes(b"cut off")
    assert local_checkpoint(f"{address}/ep0-ba40/", downloads) == str(downloads / "ep0-ba40")
    assert index.stat().st_mtime_ns == before
    assert content.read_bytes() == (run / "ep0-ba40" / "__0_0.distcp").read_bytes()
    (run / "ep0-ba40" / ".metadata").unlink()
    (run / "ba20.json").unlink()
    with pytest.raises(UserError, match=r"it holds no complete checkpoint; ba40: ep0-ba40/.metadata is missing\)$"):
        local_checkpoint(str(run), downloads)
