"""A resumed run is bit for bit the uninterrupted run."""

import shutil
from pathlib import Path

import pytest
import torch

from biphasic.errors import UserError
from conftest import Write
from helpers.decoders import saved_decoder
from helpers.tiny import config_of, keep_checkpoints_up_to, launch, losses, train, train_alone, weights

SWITCH, LAST = 6, 12


def assert_same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, weight in a.items():
        assert torch.equal(weight, b[name]), name


@pytest.mark.parametrize(("workers", "batches"), [(0, (SWITCH - 1, SWITCH, SWITCH + 1, 10)), (2, (SWITCH,))])
def test_one_process_resumes_around_the_switch(write_yaml: Write, workers: int, batches: tuple[int, ...]) -> None:
    uninterrupted = train_alone(write_yaml("uninterrupted", data__num_workers=workers))
    expected = losses(uninterrupted)
    assert len(expected) == LAST
    for batch in batches:
        path = write_yaml(f"from{batch}", data__num_workers=workers)
        folder = config_of(path).run_folder
        shutil.copytree(uninterrupted, folder)
        keep_checkpoints_up_to(folder, batch)
        (folder / "metrics.jsonl").unlink()
        assert train_alone(path) == folder
        assert losses(folder) == expected[batch:]
        assert_same_weights(weights(folder, LAST), weights(uninterrupted, LAST))


def test_a_checkpoint_may_lack_the_scalers_state(write_yaml: Write) -> None:
    """As one that was written on CPUs and is loaded on a GPU, where Composer's scaler has a state."""
    refuse = """
from torch.amp.grad_scaler import GradScaler
def refuse(scaler, state):
    raise RuntimeError("The source state dict is empty")
GradScaler.load_state_dict = refuse
"""
    path = write_yaml("moved")
    folder = train_alone(path)
    keep_checkpoints_up_to(folder, SWITCH)

    run = launch(path, code=refuse)
    assert run.returncode == 0 and f"resuming at batch {SWITCH}" in run.stdout, run.stderr[-3000:]


@pytest.mark.slow  # tests/faults/test_kills.py kills two ranks at the switch, too
def test_two_fsdp2_ranks_resume_at_the_switch(write_yaml: Write) -> None:
    path = write_yaml("uninterrupted", parallelism__strategy="fsdp", data__num_workers=1)
    run = launch(path, processes=2)
    assert run.returncode == 0, run.stderr[-3000:]
    uninterrupted = Path(config_of(path).output) / "uninterrupted"
    expected = losses(uninterrupted)
    assert len(expected) == LAST
    for batch in (SWITCH - 1, SWITCH, SWITCH + 1):
        folder = uninterrupted.parent / f"from{batch}"
        shutil.copytree(uninterrupted, folder)
        keep_checkpoints_up_to(folder, batch)
        (folder / "metrics.jsonl").unlink()
        run = launch(path, f"run_name=from{batch}", processes=2)
        assert run.returncode == 0, run.stderr[-3000:]
        assert losses(folder) == expected[batch:]
        assert_same_weights(weights(folder, LAST), weights(uninterrupted, LAST))


def test_a_run_that_begins_in_the_middle_of_the_data_resumes(write_yaml: Write) -> None:
    """An epoch is 87 batches: this run's first one is 4."""
    path = write_yaml("uninterrupted", data__start_at="83ba", max_duration="8ba", objective__phases=[{"name": "mlm"}])
    uninterrupted = train(config_of(path))
    expected = losses(uninterrupted)
    assert expected != losses(train(config_of(path, run_name="beginning", **{"data.start_at": "0ba"})))
    for batch in (3, 4, 6):
        folder = uninterrupted.parent / f"from{batch}"
        shutil.copytree(uninterrupted, folder)
        keep_checkpoints_up_to(folder, batch)
        (folder / "metrics.jsonl").unlink()
        train(config_of(path, run_name=f"from{batch}"))
        assert losses(folder) == expected[batch:]


def test_a_refused_start_leaves_the_run_s_configuration(write_yaml: Write) -> None:
    path = write_yaml()
    folder = train(config_of(path))
    written = (folder / "config.yaml").read_text()
    with pytest.raises(UserError, match=r"optimizer.lr: 0.005 until now, 0.1 here"):
        train(config_of(path, **{"optimizer.lr": 0.1}))
    assert (folder / "config.yaml").read_text() == written
    train(config_of(path, **{"checkpoint.keep": 3}))
    assert (folder / "config.yaml").read_text() == written.replace("keep: -1", "keep: 3")


def test_a_changed_setting_of_the_optimizer_has_an_effect(write_yaml: Write) -> None:
    """A checkpoint's optimizer state brings the old settings."""
    folder = train(config_of(write_yaml()))
    unchanged = shutil.copytree(folder, folder.parent / "unchanged")
    keep_checkpoints_up_to(folder, SWITCH)
    (folder / "metrics.jsonl").unlink()
    train(config_of(write_yaml(optimizer__weight_decay=5.0, checkpoint__resume_overrides=["optimizer.weight_decay"])))
    assert losses(folder)[0] == losses(unchanged)[SWITCH]
    before, after = (sum(float(w.square().sum()) for w in weights(run, LAST).values()) for run in (unchanged, folder))
    assert after < 0.9 * before


def test_a_model_with_dropout_resumes(write_yaml: Write, tmp_path: Path) -> None:
    saved_decoder("llama", tmp_path / "hub", attention_dropout=0.5)
    path = write_yaml("uninterrupted", model={"init_from": str(tmp_path / "hub")})
    uninterrupted = train(config_of(path))
    folder = uninterrupted.parent / "resumed"
    shutil.copytree(uninterrupted, folder)
    keep_checkpoints_up_to(folder, SWITCH)
    (folder / "metrics.jsonl").unlink()
    torch.manual_seed(99)
    train(config_of(path, run_name="resumed"))
    assert losses(folder) == losses(uninterrupted)[SWITCH:]
