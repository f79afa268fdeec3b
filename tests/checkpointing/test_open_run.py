"""The files in which ranks that a signal ended leave their stacks, and what identifies a run."""

from collections.abc import Iterator
from pathlib import Path
from traceback import StackSummary

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from biphasic.checkpointing.open_run import Run, open_run, read_crashes, remove_empty_files
from biphasic.checkpointing.run_lock import RunLock
from biphasic.checkpointing.start_rules import ResumeGuard
from biphasic.errors import Unavailable, UserError
from biphasic.storage import UNFINISHED_PREFIX
from biphasic.training.recipe import run_settings
from conftest import Write
from helpers.buckets import bucket_for, client
from helpers.tiny import config_of


def test_a_folder_that_another_rank_removes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a run each rank removes its file, and the folder once it is empty."""
    path = tmp_path / "one-rank1.txt"
    path.write_text("Fatal Python error: Aborted\n")
    assert read_crashes(tmp_path, "one") == [f"rank 1: Aborted ({path})"]

    def glob(self: Path, pattern: str) -> Iterator[Path]:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "glob", glob)
    assert read_crashes(tmp_path, "one") == []
    remove_empty_files(tmp_path)


def test_a_run_is_known_by_its_first_attempt(write_yaml: Write) -> None:
    """Where W&B or MLflow asks for it."""
    for logger in ("wandb", "mlflow", "tensorboard"):
        config = config_of(write_yaml(logger, **{f"logging__{logger}": logger != "tensorboard" and "project"}))
        names = []
        for _ in range(2):
            lock = RunLock(config.checkpoint_destination)
            names.append(lock.acquire(1))
            lock.release("finished")
        run = Run(run_settings(config), ResumeGuard(config))
        assert run.id == (None if logger == "tensorboard" else names[0])
        run.close("finished")


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (
            RuntimeError("Missing key in checkpoint state_dict: a.b"),
            UserError,
            "Missing key in checkpoint state_dict: a.b",
        ),
        (OSError(5, "Input/output error"), Unavailable, "Input/output error"),
        (None, UserError, "Error.s. in loading state_dict for PretrainModel: size mismatch for a.b"),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_is_named(
    fault: Exception | None, kind: type[UserError], message: str, write_yaml: Write
) -> None:
    """PyTorch's error for sharded ones is no `Exception`, and its text is a traceback of each rank."""
    text = "Error(s) in loading state_dict for PretrainModel:\n\tsize mismatch for a.b"
    error = RuntimeError(text) if fault is None else CheckpointException("load", {1: (fault, StackSummary())})
    expected = pytest.raises(kind, match=rf"^checkpoint .*: can't be loaded \({message}\)$")
    config = config_of(write_yaml())
    if fault is None:  # a first start, from another run's checkpoint
        config = config.model_copy(update={"model": config.model.model_copy(update={"init_from": "other"})})
        expected = pytest.raises(kind, match=r"^checkpoint other: can't be loaded")
    with expected as caught, open_run(run_settings(config), ResumeGuard(config)):
        raise error
    assert type(caught.value) is kind


def test_what_a_killed_save_left_is_removed(write_yaml: Write) -> None:
    config = config_of(write_yaml())
    left = config.local_checkpoints / f"{UNFINISHED_PREFIX}9-host-ba1873-rank0.pt"
    left.parent.mkdir(parents=True)
    left.touch()
    with open_run(run_settings(config), ResumeGuard(config)):
        assert not left.exists()


def test_what_a_killed_upload_left_is_removed(s3: Path, write_yaml: Write) -> None:
    """S3 keeps the parts of an upload until it is aborted. Those of other runs and other programs may go on."""
    bucket = bucket_for(s3, "unfinished-uploads")
    names = ("run/ba8-rank0.pt", "run/ep0-ba8/__0_0.distcp", "run/notes.bin", "run/other/ba8-rank0.pt", "ba8-rank0.pt")
    for name in names:
        client().create_multipart_upload(Bucket=bucket, Key=name)
    config = config_of(write_yaml(checkpoint__folder=f"s3://{bucket}/run"))
    with open_run(run_settings(config), ResumeGuard(config)):
        left = [item["Key"] for item in client().list_multipart_uploads(Bucket=bucket)["Uploads"]]
    assert sorted(left) == sorted(names[2:])
