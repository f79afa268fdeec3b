"""Evaluation from a mirror of the hub's data sets, without a network."""

import socket
from pathlib import Path
from typing import Any

import pytest

from biphasic.errors import UserError
from biphasic.evaluation.run import run
from biphasic.evaluation.tasks import _local_only, plan_tasks
from helpers.mteb_mirror import config_of, values_of, write_set


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **more: Any) -> Any:
        raise AssertionError(f"a socket to {arguments[1:]}")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
def test_no_socket_is_opened(mirror: Path, model: Path, tmp_path: Path) -> None:
    folder = run(config_of(model, tmp_path, mirror=str(mirror), tasks=["NanoNQRetrieval"]))
    assert len(values_of(folder)) == 2
    names = {task.name for task in plan_tasks(config_of(model, tmp_path, benchmarks=["NanoBEIR"]))}
    assert len(names) == 13 and "NanoNQRetrieval" in names


def test_without_a_mirror_the_network_is_used(
    no_network: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    with pytest.raises((AssertionError, UserError)):
        run(config_of(model, tmp_path, tasks=["NanoNQRetrieval"]))


def test_a_changed_mirror_is_read_again(model: Path, tmp_path: Path) -> None:
    """`datasets` itself identifies a folder by its last name and card, and would return the first one's rows."""
    versions = []
    for seed in (1, 2):
        root = tmp_path / ".hidden" / str(seed)
        write_set(root / "mteb" / "nq", seed, ["test"])
        [planned] = plan_tasks(config_of(model, tmp_path, mirror=str(root), tasks=["NQ"]))
        versions.append((planned.fingerprint, planned.load().dataset["default"]["test"]["corpus"]["text"]))
    assert versions[0][0] != versions[1][0]
    assert versions[0][1] != versions[1][1]


def test_hub_is_offline_while_a_mirror_is_read(tmp_path: Path) -> None:
    from datasets import config
    from huggingface_hub import constants

    before = config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE, config.HF_DATASETS_CACHE
    with _local_only(tmp_path):
        assert config.HF_HUB_OFFLINE and constants.HF_HUB_OFFLINE
    assert before == (config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE, config.HF_DATASETS_CACHE)
