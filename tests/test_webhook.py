"""Events of runs, posted to a server, without ever failing or delaying a run, or showing the URL."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from composer.core import Callback, State
from composer.loggers import Logger

from biphasic import webhook
from biphasic.errors import ConfigError, UserError
from biphasic.webhook import Webhook
from conftest import Write
from helpers.chat_server import SECRET, VARIABLE, ChatServer, chat_server
from helpers.ports import free_port
from helpers.tiny import add_callback, config_of, launch, start, train, wait_for_batch


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    with chat_server() as server:
        monkeypatch.setenv(VARIABLE, server.url)
        yield server


class Spoil(Callback):
    """Multiplies the loss of some batches."""

    def __init__(self, factors: dict[int, float]):
        self.factors = factors

    def before_loss(self, state: State, logger: Logger) -> None:
        total, count = state.outputs
        state.outputs = (total * self.factors.get(int(state.timestamp.batch), 1.0), count)


def files_with(text: str, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_a_spike_a_skipped_batch_and_the_end(
    write_yaml: Write,
    chat: ChatServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    nan = float("nan")
    add_callback(Spoil({30: 4.0, 31: 4.0, 34: nan}), monkeypatch.setattr)
    keys: dict[str, Any] = {"max_duration": "40ba", "checkpoint__interval": "50ba", "webhook": VARIABLE}
    path = write_yaml("spoiled", objective__phases=[{"name": "clm"}], optimizer__max_skipped_batches=1, **keys)
    train(config_of(path))
    assert chat.events() == ["spike", "skipped", "finished"]
    spike, skipped, finished = chat.messages
    assert {key: spike[key] for key in ("run", "batch", "host")} == {
        "run": "spoiled", "batch": 30, "host": socket.gethostname()
    }  # fmt: skip
    assert spike["message"].startswith("anomaly: spike, loss: ") and ", median: " in spike["message"]
    assert spike["text"] == f"spoiled: spike at batch 30 on {socket.gethostname()}: {spike['message']}"
    assert skipped["batch"] == 34 and skipped["message"].startswith("anomaly: not finite, quantity: loss")
    assert finished["batch"] == 40 and finished["message"] == "trained to 40ba"
    # A start of a finished run reports nothing.
    train(config_of(path))
    assert len(chat.messages) == 3
    # One more such batch than allowed.
    monkeypatch.undo()
    monkeypatch.setenv(VARIABLE, chat.url)
    add_callback(Spoil({2: nan}), monkeypatch.setattr)
    with pytest.raises(UserError, match="not a finite number"):
        train(config_of(write_yaml("failing", **keys)))
    assert chat.events()[3:] == ["skipped", "failed"]
    assert chat.messages[-1]["message"].startswith("batch 2: the loss is not a finite number")
    assert files_with(VARIABLE, tmp_path / "runs") and not files_with(SECRET, tmp_path)
    output = capfd.readouterr()
    assert SECRET not in output.out + output.err


def test_a_preempted_run_that_resumes(write_yaml: Write, chat: ChatServer, tmp_path: Path) -> None:
    path = write_yaml("stopped", max_duration="80ba", webhook=VARIABLE)
    folder = config_of(path).run_folder
    run = start(path, processes=2)
    wait_for_batch(folder, 9, run)
    for pid in run.ranks:
        os.kill(pid, signal.SIGTERM)
    ended = run.wait()
    assert ended.returncode == 75, ended.stderr[-3000:]
    [preempted] = chat.messages  # one, of two ranks
    assert preempted["event"] == "preempted"
    assert preempted["message"].startswith(f"SIGTERM: saved at batch {preempted['batch']},")
    # Killed in the middle, then trained to the end.
    run = start(path)
    wait_for_batch(folder, preempted["batch"] + 5, run)
    run.kill()
    ended = launch(path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert chat.events() == ["preempted", "resumed", "resumed", "finished"]
    first, second = chat.messages[1:3]
    assert first["message"] == f"from ba{preempted['batch']}-rank0.pt" and first["batch"] == preempted["batch"]
    assert second["message"].endswith("; the attempt before this one ended without a message")
    assert not files_with(SECRET, tmp_path)


def test_another_ranks_fault_is_reported_by_the_first_rank(write_yaml: Write, chat: ChatServer) -> None:
    fault = """
import os
from composer.core import Callback
from helpers.tiny import add_callback
class Fault(Callback):
    def batch_start(self, state, logger):
        if os.environ["RANK"] == "1" and int(state.timestamp.batch) == 3:
            raise ValueError("out of luck")
add_callback(Fault())
"""
    run = launch(write_yaml("faulty", webhook=VARIABLE), processes=2, code=fault)
    assert run.returncode == 1, run.stderr[-3000:]
    [failed] = chat.messages
    assert failed["event"] == "failed" and "out of luck" in failed["message"], failed


@pytest.mark.usefixtures("hub_is_offline")
def test_a_start_that_fails_is_reported(write_yaml: Write, chat: ChatServer) -> None:
    path = write_yaml("missing", webhook=VARIABLE, tokenizer="nowhere/tokenizer")
    with pytest.raises(UserError):
        train(config_of(path))
    [failed] = chat.messages
    assert failed["event"] == "failed" and failed["batch"] is None and "nowhere/tokenizer" in failed["message"]


def test_an_unreachable_server_is_one_warning(
    write_yaml: Write, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, f"http://127.0.0.1:{free_port()}/{SECRET}")
    add_callback(Spoil({30: 4.0}), monkeypatch.setattr)
    keys: dict[str, Any] = {"max_duration": "35ba", "checkpoint__interval": "50ba", "webhook": VARIABLE}
    train(config_of(write_yaml("alone", objective__phases=[{"name": "clm"}], **keys)))
    warnings = [record.getMessage() for record in caplog.records if "webhook" in record.getMessage()]
    assert warnings == ["webhook: 'spike' can't be delivered (ConnectionRefusedError)"]


def test_a_server_that_refuses_or_does_not_answer(
    chat: ChatServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat.status = 404
    messages = Webhook(VARIABLE, "run")
    messages.send("resumed", "from ba3-rank0.pt", 3)
    messages.send("failed", "out of memory", 4)
    messages.close()
    assert chat.requests == 2
    assert [record.getMessage() for record in caplog.records] == ["webhook: 'resumed' can't be delivered (status 404)"]
    chat.status, chat.seconds = 200, 8.0
    monkeypatch.setattr(webhook, "_TIMEOUT_SECONDS", 2.0)
    messages, begin = Webhook(VARIABLE, "run"), time.monotonic()
    messages.send("finished", "trained to 5ba", 5)
    sent = time.monotonic() - begin
    messages.close()
    # Sending doesn't wait, and closing waits for these seconds instead of the answer.
    assert sent < 2.0 <= time.monotonic() - begin < 4.5
    messages.send("failed", "after the end", 5)
    assert chat.requests == 3


def test_messages_about_batches_are_rare(chat: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = Webhook(VARIABLE, "run")
    for batch in range(5):
        messages.send("spike", "loss 9", batch)
    messages.send("skipped", "the loss is NaN or Inf", 5)
    monkeypatch.setattr(webhook, "_QUIET_SECONDS", {"spike": 0.0})
    messages.send("spike", "loss 8", 6)
    messages.close()
    assert [(message["event"], message["batch"]) for message in chat.messages] == [
        ("spike", 0), ("skipped", 5), ("spike", 6)
    ]  # fmt: skip


def test_the_url_is_not_part_of_the_configuration(
    write_yaml: Write, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="needs the name of an environment variable") as raised:
        config_of(write_yaml("open", webhook=f"https://hooks.example/{SECRET}"))
    assert SECRET not in str(raised.value) and "https" not in str(raised.value)
    monkeypatch.delenv(VARIABLE, raising=False)
    Webhook(VARIABLE, "run").send("failed", "out of memory")
    monkeypatch.setenv(VARIABLE, f"hooks.example/{SECRET}")
    Webhook(VARIABLE, "run").send("failed", "out of memory")
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert [record.getMessage() for record in caplog.records] == [
        f"webhook: the environment variable {VARIABLE} isn't set to a URL: no message is sent"
    ] * 2
