"""The command `biphasic`: what it imports for help, its exit statuses, closed pipes, Ctrl-C and completion."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from biphasic.commands import COMMANDS, main
from helpers.tiny import ROOT

BIPHASIC = [sys.executable, "-m", "biphasic"]


def test_help_of_every_command_imports_nothing_heavy() -> None:
    code = (
        "import sys, contextlib, io\n"
        "from biphasic.commands import COMMANDS, main\n"
        "for arguments in [['--help'], *([name, '--help'] for name in COMMANDS)]:\n"
        "    text = io.StringIO()\n"
        "    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):\n"
        "        main(arguments)\n"
        "    assert text.getvalue().startswith('usage: biphasic'), arguments\n"
        "assert main([]) == main(['unknown']) == main(['verify']) == main(['runs', 'a', '--bogus']) == 2\n"
        "sys.path.insert(0, 'src')\n"
        "import main as script\n"
        "with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):\n"
        "    script.main(['--help'])\n"
        "heavy = {'torch', 'composer', 'streaming', 'transformers', 'numpy', 'ray', 'pydantic', 'omegaconf', 'yaml'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr and "invalid choice: 'unknown'" in ran.stderr


def test_the_scripts_of_data_prep_call_the_commands() -> None:
    for script in (ROOT / "data_prep").glob("*.py"):
        name = {"train_tokenizer": "tokenizer"}.get(script.stem, script.stem)
        ran = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True)
        assert ran.stdout.startswith(f"usage: biphasic {name} "), ran.stderr


def test_a_closed_pipe_ends_without_a_traceback(tmp_path: Path) -> None:
    """Also if the output is short, so that it is written only when Python ends."""
    for arguments in (["tasks", str(ROOT / "yamls/data/tasks.yaml"), "--plan"], ["runs", "--help"]):
        read, write = os.pipe()
        os.close(read)
        ran = subprocess.run([*BIPHASIC, *arguments], stdout=write, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        os.close(write)
        assert ran.stderr == "" and ran.returncode in (0, 141)


@pytest.mark.parametrize(
    ("number", "status", "line"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 75, "SIGTERM: stopped"),
        (signal.SIGUSR1, 75, "SIGUSR1: stopped"),
        (signal.SIGHUP, 75, "SIGHUP: stopped"),
    ],
)
def test_a_signal_ends_a_command_with_a_line(tmp_path: Path, number: int, status: int, line: str) -> None:
    """Also while its main thread waits in a system call, as in a collective of a library."""
    fifo = tmp_path / "wait.yaml"
    os.mkfifo(fifo)
    started = subprocess.Popen([*BIPHASIC, "preflight", str(fifo)], stderr=subprocess.PIPE, text=True)
    writer = os.open(fifo, os.O_WRONLY)  # Returns when the command has opened the file to read it.
    time.sleep(0.05)
    started.send_signal(number)
    _, errors = started.communicate(timeout=30)
    os.close(writer)
    assert started.returncode == status
    kept = "what is finished is kept, and the same command does the rest"
    assert re.fullmatch(rf"{line}[:;] {kept} \(status {status}\)\n", errors)


@pytest.mark.parametrize("signals", [1, 2])
def test_composer_s_handler_of_sigterm_does_not_choose_the_status(signals: int) -> None:
    """It ends the main thread within Python code at once, before the command's own line is written.

    Composer's launcher, if it receives the first signal too, sends a second one.
    """
    code = """
import os, signal, sys, threading
from composer.core import engine
from biphasic.processes import run_command

def main():
    signal.signal(signal.SIGTERM, engine.sigterm_handler)
    if sys.argv[1] == "2":
        threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGTERM)).start()
    os.kill(os.getpid(), signal.SIGTERM)
    return 0

run_command(main)
"""
    ended = subprocess.run([sys.executable, "-c", code, str(signals)], capture_output=True, text=True, timeout=120)
    kept = "what is finished is kept, and the same command does the rest"
    assert (ended.returncode, ended.stderr) == (75, f"SIGTERM: stopped; {kept} (status 75)\n")


def test_a_signal_in_the_moment_before_a_run_has_its_own_handler_is_not_lost() -> None:
    code = """
import os, signal, time
from biphasic.processes import run_command

def main():
    os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    time.sleep(5)
    return 0

run_command(main)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    kept = "what is finished is kept, and the same command does the rest"
    assert (ended.returncode, ended.stderr) == (75, f"SIGTERM: stopped; {kept} (status 75)\n")


def test_a_signal_in_the_last_moment_of_a_command_changes_nothing() -> None:
    """The command has done its work before the signal is acted on, and Python takes a while to end."""
    code = """
import atexit, os, signal, time
from biphasic.processes import run_command

def main():
    os.kill(os.getpid(), signal.SIGTERM)
    return 0

atexit.register(time.sleep, 1)
run_command(main)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")


def completions(line: str, shell: str = "bash") -> set[str]:
    """What a shell offers for an unfinished command line."""
    environment = {
        **os.environ, "_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": shell, "_ARGCOMPLETE_IFS": "\n", "COMP_TYPE": "9",
        "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": "/dev/stdout",
        "_ARGCOMPLETE_COMP_WORDBREAKS": "", "COMP_WORDBREAKS": "",
    }  # fmt: skip
    ran = subprocess.run(BIPHASIC, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    return {word.split(":")[0].strip() for word in ran.stdout.split("\n")}


def test_completion_of_commands_and_options() -> None:
    assert completions("biphasic ") - {"-h", "--help"} == set(COMMANDS)
    assert completions("biphasic ver") == {"verify"}
    assert completions("biphasic verify --s") == {"--sample", "--split"}
    assert completions("biphasic completion ", "zsh") >= {"bash", "zsh"}


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#compdef biphasic")  # one script that both shells run
    if shutil.which(shell):
        checked = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True)
        assert checked.returncode == 0, checked.stderr
