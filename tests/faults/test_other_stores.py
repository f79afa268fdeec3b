"""Signals in the saves of a run to stores of other kinds than the S3 server of the other tests."""

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from biphasic.checkpointing.run_lock import KILLED, read_attempts
from biphasic.storage import open_store
from conftest import MakeBucket, Write
from helpers.chain_faults import signal_at
from helpers.store_servers import SERVERS
from helpers.tiny import config_of, launch, losses, weights

POINTS = [("upload:2", signal.SIGTERM), ("upload:4", signal.SIGKILL), ("manifest:6", signal.SIGHUP),
          ("manifest:6", signal.SIGKILL), ("delete:8", signal.SIGUSR1), ("delete:10", signal.SIGKILL)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", SERVERS)
def test_signals_in_saves_lose_nothing(kind: str, use_store: Callable[[str], MakeBucket], write_yaml: Write) -> None:
    place = f"{use_store(kind)('signals')}/{kind}"
    uninterrupted = write_yaml("uninterrupted", max_duration="16ba")
    assert launch(uninterrupted).returncode == 0
    path = write_yaml(
        "signalled", max_duration="16ba", checkpoint__folder=place, checkpoint__interval="2ba", checkpoint__keep=2
    )
    reasons = []
    for point, number in POINTS:
        run = launch(path, code=signal_at(point, number))
        killed = number == signal.SIGKILL
        assert run.returncode == (-number if killed else 75), (point, number, run.stdout[-2000:], run.stderr[-3000:])
        reasons.append(KILLED if killed else rf"{number.name}: saved at batch \d+, [\d.]+ s after the request")
    assert launch(path).returncode == 0
    folders: list[Path] = [config_of(each).run_folder for each in (path, uninterrupted)]
    assert losses(folders[0]) == losses(folders[1])
    actual, expected = (weights(folder, 16) for folder in folders)
    assert all(torch.equal(weight, expected[name]) for name, weight in actual.items())
    attempts = [attempt["reason"] for attempt in read_attempts(open_store(place))]
    for reason, pattern in zip(attempts, [*reasons, "finished"], strict=True):
        assert reason == pattern or re.fullmatch(pattern, reason), attempts
