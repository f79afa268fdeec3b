"""Which checkpoint a run resumes from, branches off or takes its weights from, and where it is downloaded to."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from biphasic.checkpointing.fetch import (
    fetch_branch_point,
    find_resume_point,
    local_checkpoint,
)
from biphasic.checkpointing.manifest import Manifest, rank_manifest_name
from biphasic.checkpointing.open_run import Run
from biphasic.checkpointing.rank_group import RankGroup
from biphasic.checkpointing.start_rules import ResumeGuard
from biphasic.config.pretrain import PretrainConfig
from biphasic.errors import UserError
from biphasic.storage import file_hash
from biphasic.training.recipe import run_settings
from conftest import MakeBucket, Write
from helpers.buckets import bucket_for, client, flip_a_bit, upload
from helpers.tiny import config_of

CLM = [{"name": "clm"}]


def write_checkpoint(folder: Path, batch: int, config: PretrainConfig, *, complete: bool = True) -> Manifest:
    """A checkpoint of one rank of a run that has trained so far; an incomplete one has only the rank's manifest."""
    path = folder / f"ba{batch}-rank0.pt"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(f"{config.run_name} at batch {batch}".encode())
    run = {
        "name": config.run_name,
        "config": config.model_dump(mode="json"),
        **{"indexes": {}, "overridden": [], "writers": 1, "rows": 8 * batch, "tokens": 240 * batch, "epochs": 0},
        "last_batch": [batch - 1, 8 * (batch - 1), 240 * (batch - 1), 0],
    }
    manifest = Manifest(batch, path.name, {path.name: (path.stat().st_size, file_hash(path))}, run)
    (folder / (manifest.name if complete else rank_manifest_name(batch, 0))).write_bytes(manifest.to_bytes())
    return manifest


def resume_point(config: PretrainConfig, ranks: Any = None) -> Manifest | None:
    return find_resume_point(
        config.checkpoint_destination, config.local_checkpoints, ResumeGuard(config), ranks or RankGroup()
    )


def test_a_run_resumes_from_its_own_newest_checkpoint(write_yaml: Write, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(write_yaml("run"))
    other = config_of(write_yaml("other", optimizer__lr=1e-4))
    folder = config.local_checkpoints
    assert resume_point(config) is None
    write_checkpoint(folder, 12, other)
    with pytest.raises(UserError) as refused:
        resume_point(config)
    assert str(refused.value) == (
        f"checkpoint.folder {folder}: holds the checkpoints of another run, other: choose another folder, or set run_name "
        "to that run's name, so that the configurations are compared"
    )
    first, second = (write_checkpoint(folder, batch, config) for batch in (4, 8))
    assert resume_point(config) == second
    assert f"checkpoint ba12 in {folder} is skipped: it belongs to another run, other" in caplog.text
    (folder / second.path).write_bytes(b"x" * (folder / second.path).stat().st_size)
    assert resume_point(config) == first
    # All its files are there: only the manifest is missing.
    last = write_checkpoint(folder, 16, config, complete=False)
    assert resume_point(config) == last
    assert not (folder / rank_manifest_name(16, 0)).exists()


def test_a_run_resumes_from_a_bucket(store: MakeBucket, write_yaml: Write) -> None:
    address = store("resuming")
    config = config_of(write_yaml(checkpoint__folder=f"{address}/run"))
    folder = config.local_checkpoints
    # The last attempt ended before this was uploaded.
    pending = write_checkpoint(folder, 8, config, complete=False)
    assert resume_point(config) == pending
    (folder / pending.path).unlink()
    assert resume_point(config) == pending
    assert (folder / pending.path).read_bytes() == b"run at batch 8"
    # What an earlier start has downloaded to another node is no longer needed.
    old = folder / "ba4-rank0.pt"
    old.touch()
    node: Any = SimpleNamespace(
        rank=8, is_first=False, once_per_machine=lambda action: action(), on_first_rank=lambda action: action()
    )
    assert resume_point(config, node) == pending and not old.exists()
    missing = f"{address.partition('://')[0]}://there-is-no-such-bucket/run"
    with pytest.raises(UserError, match=rf"^checkpoint.folder {missing}: can't be used \(.+\)$"):
        resume_point(config_of(write_yaml(checkpoint__folder=missing)))


def test_a_run_that_moves_to_a_bucket_takes_its_checkpoints_along(s3: Path, write_yaml: Write) -> None:
    before = config_of(write_yaml())
    folder = before.local_checkpoints
    first, second = (write_checkpoint(folder, batch, before) for batch in (4, 8))
    bucket = bucket_for(s3, "moving")
    config = config_of(write_yaml(checkpoint__folder=f"s3://{bucket}/run"))
    place = f"checkpoint.folder s3://{bucket}/run"
    message = f"{place}: lacks checkpoints that this run has saved to {folder} (newest: ba8.json): copy "
    with pytest.raises(UserError) as refused:
        resume_point(config)
    assert str(refused.value).startswith(message)
    start = ResumeGuard(config).plan_start()
    assert (start.problem or "").startswith(message)
    upload(folder, bucket, "run")
    assert resume_point(config) == second
    # The newest alone is not enough: the others would be deleted here.
    client().delete_object(Bucket=bucket, Key=f"run/{first.name}")
    with pytest.raises(UserError, match=r"\(newest: ba4.json\)"):
        resume_point(config)


def test_a_branch_starts_from_another_run_s_checkpoint(s3: Path, write_yaml: Write) -> None:
    trunk = config_of(write_yaml("trunk", max_duration="30ba", objective__phases=CLM, schedule={}))
    folder = trunk.local_checkpoints
    for batch in (4, 8, 12):
        write_checkpoint(folder, batch, trunk)
    bucket = bucket_for(s3, "branching")
    address = upload(folder, bucket, "trunk")
    phases = [{"name": "clm", "until": "9ba"}, {"name": "mlm"}]

    def branch(start_from: str | Path) -> tuple[str, str]:
        config = config_of(
            write_yaml("branch", max_duration="30ba", objective__phases=phases, schedule={}, start_from=str(start_from))
        )
        place, _, path = fetch_branch_point(config.run_folder / "from", ResumeGuard(config), RankGroup())
        return place, path.removeprefix(str(config.run_folder))

    local = str(folder / "ba8-rank0.pt")
    assert branch(folder) == (local, local)
    assert branch(address) == (f"{address}/ba8-rank0.pt", "/from/ba8-rank0.pt")
    with pytest.raises(UserError, match=r"^start_from: .*: it holds no checkpoint; expected a complete checkpoint$"):
        branch(folder / "nothing")
    Path(local).write_bytes(b"x" * Path(local).stat().st_size)
    with pytest.raises(UserError) as refused:
        branch(folder)
    fault = "ba8-rank0.pt is damaged: its hash is not the manifest's"
    assert str(refused.value) == f"checkpoint {local}: can't be used ({fault})"


def test_initial_weights_come_from_a_folder_or_a_bucket(s3: Path, write_yaml: Write) -> None:
    config = config_of(write_yaml("made"))
    write_checkpoint(config.local_checkpoints, 4, config)
    address = upload(config.local_checkpoints, bucket_for(s3, "initial"), "made")
    run = Run(run_settings(config), ResumeGuard(config))
    assert run.fetch_initial_weights("org/model") == "org/model"
    assert run.fetch_initial_weights(str(config.local_checkpoints)) == str(config.local_checkpoints / "ba4-rank0.pt")
    assert run.fetch_initial_weights(address) == str(config.run_folder / "init" / "ba4-rank0.pt")
    run.close("finished")


def test_one_checkpoint_or_the_newest_of_a_bucket(s3: Path, write_yaml: Write, tmp_path: Path) -> None:
    config, made, downloads = config_of(write_yaml()), tmp_path / "made", tmp_path / "downloads"
    for batch in (4, 8):
        write_checkpoint(made, batch, config)
    (made / "ba12-rank0.pt").write_bytes(b"half")
    (made / "ba16.json").write_text("{}")
    bucket = bucket_for(s3, "named")
    address = upload(made, bucket, "run")
    assert local_checkpoint(f"{address}/ba4-rank0.pt", downloads) == str(downloads / "ba4-rank0.pt")
    assert [path.name for path in downloads.iterdir()] == ["ba4-rank0.pt"]
    assert local_checkpoint(f"{address}/", downloads) == str(downloads / "ba8-rank0.pt")
    flip_a_bit(bucket, "run/ba4-rank0.pt")
    (downloads / "ba4-rank0.pt").unlink()
    for name, reason in (
        ("ba4-rank0.pt", "ba4-rank0.pt is damaged: its hash is not the manifest's"),
        ("ep0-ba8", "ba8.json is the manifest of ba8-rank0.pt"),
        ("ba16-rank0.pt", "ba16.json is not a manifest"),
    ):
        with pytest.raises(UserError) as refused:
            local_checkpoint(f"{address}/{name}", downloads)
        assert str(refused.value) == f"checkpoint {address}/{name}: can't be used ({reason})"
    with pytest.raises(UserError, match=rf"^checkpoint {address}/ba12-rank0.pt: .*; its manifest is ba12.json\)$"):
        local_checkpoint(f"{address}/ba12-rank0.pt", downloads)
    for batch in (4, 8):
        client().delete_object(Bucket=bucket, Key=f"run/ba{batch}.json")
    with pytest.raises(UserError, match=r"\(it holds no complete checkpoint; ba16: ba16.json is not a manifest\)$"):
        local_checkpoint(address, downloads)
    with pytest.raises(UserError, match=r"^checkpoint s3://there-is-no-such-bucket/run: can't be used \(.+\)$"):
        local_checkpoint("s3://there-is-no-such-bucket/run", downloads)
