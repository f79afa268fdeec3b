"""A run that starts from another run's checkpoint is bit for bit the run that was trained from its own beginning."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from biphasic.checkpointing.run_lock import read_attempts
from biphasic.errors import UserError
from biphasic.storage import open_store
from conftest import Write
from helpers.buckets import bucket_for, upload
from helpers.tiny import config_of, content_of, launch, losses, release_streaming, train, weights, write_rows

CLM, LAST = [{"name": "clm"}], 12
RAMP = {"name": "mlm", "masking_ratio": {"start": 0.5, "end": 0.3}, "until": "4ba"}
TRUNKS: dict[str, dict[str, Any]] = {
    "clm": {"max_duration": "10ba", "objective": {"phases": CLM}, "schedule": {"warmup": "3ba", "decay": "3ba"}},
    "ramp": {"max_duration": "9ba", "objective": {"phases": [RAMP, {"name": "mlm", "masking_ratio": 0.3}]},
             "schedule": {"warmup": "3ba"}},
}  # fmt: skip
BRANCHES: dict[str, tuple[str, int, list[dict[str, Any]], dict[str, Any]]] = {
    # The trunk, the batch from which it isn't the branch any more, phases, schedule. The rate falls from the batch after
    # the decay's first one.
    "decay": ("clm", 6, CLM, {"warmup": "3ba", "decay": "7ba"}),
    "budget": ("clm", 8, CLM, {"warmup": "3ba", "decay": "3ba"}),
    "switch": ("clm", 6, [{"name": "clm", "until": "6ba"}, {"name": "mlm"}], {"warmup": "3ba", "decay": "4ba"}),
    "ratio after a ramp": ("ramp", 4, [RAMP, {"name": "mlm", "masking_ratio": 0.2}], {"warmup": "3ba"}),
    "three phases with resets": (
        "clm",
        4,
        [
            {"name": "clm", "until": "4ba"},
            {"name": "mlm", "until": "8ba", "reset_optimizer": True},
            {"name": "clm", "reset_optimizer": True},
        ],
        {"warmup": "3ba"},
    ),
}


@pytest.fixture(scope="module")
def trunks(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("trunks")
    shutil.copytree(dataset, folder / "data")
    runs = {}
    for name, keys in TRUNKS.items():
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**content_of(name, folder / "runs", folder / "data"), **keys}))
        runs[name] = train(config_of(path))
        release_streaming()
    return runs


def start_of(run: Path) -> int:
    """The batch at which a run's first attempt began."""
    return read_attempts(open_store(str(run / "checkpoints")))[0]["from"]["batch"]


def assert_equal(branch: Path, whole: Path, first: int) -> None:
    assert losses(branch) == losses(whole)[first:]
    expected = weights(whole, LAST)
    for name, weight in weights(branch, LAST).items():
        assert weight.equal(expected[name]), name


def keys_of(name: str) -> dict[str, Any]:
    _, _, phases, schedule = BRANCHES[name]
    return {"max_duration": f"{LAST}ba", "objective__phases": phases, "schedule": schedule}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_equals_the_whole_run(trunks: dict[str, Path], write_yaml: Write, name: str) -> None:
    trunk, first, *_ = BRANCHES[name]
    keys = keys_of(name)
    whole = train(config_of(write_yaml("whole", **keys, checkpoint__interval=f"{LAST}ba")))
    branch = train(config_of(write_yaml("branch", **keys, start_from=str(trunks[trunk]), checkpoint__interval="5ba")))
    assert start_of(branch) == first
    assert_equal(branch, whole, first)


@pytest.mark.slow
@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_from_a_bucket_equals_the_whole_run(
    trunks: dict[str, Path], s3: Path, write_yaml: Write, name: str
) -> None:
    """The short form, of a decay, is in tests/checkpointing/test_save.py."""
    trunk, first, *_ = BRANCHES[name]
    keys = {**keys_of(name), "checkpoint__interval": f"{LAST}ba"}
    place = upload(trunks[trunk] / "checkpoints", bucket_for(s3, f"branch {name}"), "trunk")
    whole = train(config_of(write_yaml("whole", **keys)))
    branch = train(config_of(write_yaml("branch", **keys, start_from=place)))
    assert start_of(branch) == first
    assert_equal(branch, whole, first)


def test_a_branch_resumes_from_its_own_checkpoints(trunks: dict[str, Path], write_yaml: Write) -> None:
    keys: dict[str, Any] = {"objective__phases": CLM, "schedule": {"warmup": "3ba"}}
    folder = train(config_of(write_yaml("branch", **keys, max_duration="9ba", start_from=str(trunks["clm"]))))
    train(config_of(write_yaml("branch", **keys, max_duration="12ba", start_from=str(folder / "nothing"))))
    assert [attempt["from"]["batch"] for attempt in read_attempts(open_store(str(folder / "checkpoints")))] == [8, 9]


def test_other_rows_and_another_past_are_refused(trunks: dict[str, Path], write_yaml: Write, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"objective__phases": CLM, "schedule": {"warmup": "3ba"}, "start_from": str(trunks["clm"])}
    write_rows(tmp_path / "other" / "train", 700, seed=3)
    with pytest.raises(UserError, match=r"^start_from: .*/ba8-rank0.pt was trained on other rows: data.train.index"):
        train(config_of(write_yaml("rows", **keys, data__train__local=str(tmp_path / "other" / "train"))))
    with pytest.raises(
        UserError, match=r"differ from batch 0 on \(seed is 7 there, 8 here\)\. Complete checkpoints there: ba10, ba9"
    ):
        train(config_of(write_yaml("seed", **keys, seed=8)))


@pytest.fixture(scope="module")
def sharded_trunks(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a trunk that two FSDP2 ranks have trained."""
    folder = tmp_path_factory.mktemp("sharded")
    shutil.copytree(dataset, folder / "data")

    @cache
    def trunk(name: str) -> Path:
        path = folder / f"{name}.yaml"
        keys = {**TRUNKS[name], "parallelism": {"strategy": "fsdp"}}
        path.write_text(yaml.safe_dump({**content_of(name, folder / "runs", folder / "data"), **keys}))
        return train_on_two_ranks(path)

    return trunk


def train_on_two_ranks(path: Path) -> Path:
    run = launch(path, processes=2)
    assert run.returncode == 0, run.stderr[-3000:]
    return config_of(path).run_folder


@pytest.mark.parametrize(
    "name", [name if "resets" in name else pytest.param(name, marks=pytest.mark.slow) for name in BRANCHES]
)
def test_two_fsdp2_ranks_start_from_another_run(sharded_trunks: Callable[[str], Path], write_yaml: Write, name: str) -> None:
    trunk, first, *_ = BRANCHES[name]
    keys = {**keys_of(name), "parallelism__strategy": "fsdp", "checkpoint__interval": f"{LAST}ba"}
    whole = train_on_two_ranks(write_yaml("whole", **keys))
    branch = train_on_two_ranks(write_yaml("branch", **keys, start_from=str(sharded_trunks(trunk))))
    assert start_of(branch) == first
    assert_equal(branch, whole, first)
