"""Every command that a page prints can be started: bash reads it, the program's own parser reads its arguments, and the
reader of configurations its YAML and overrides. test_running.py runs commands."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from biphasic.commands import COMMANDS, command_parsers
from biphasic.config import load as reader
from biphasic.errors import ConfigError, UserError
from helpers.documented_commands import EXTERNAL, OURS, ROOT, Call, calls, commands, pages

if TYPE_CHECKING:
    from biphasic.config.load import Config

PAGES = pages()
# A YAML that stands for `FILE.yaml`, and for one of yours.
STAND_INS = {
    "FILE.yaml": "yamls/210m_biphasic.yaml",
    "runs/my-run/config.yaml": "yamls/210m_biphasic.yaml",
    "recipes/NAME/FILE.yaml": "recipes/clm_detour/pretrain.yaml",
}
JOBS_OF = {"convert": {"convert"}, "tasks": {"tasks"}, "tokenizer": {"convert"}, "show": {"pretrain"}}
LAUNCHER_OPTIONS = {"-n", "--world_size", "--node_rank", "--master_addr", "--master_port"}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
FOLDERS = ("src/", "yamls/", "recipes/", "docs/", "tests/", "benchmarks/", "data_prep/")


@pytest.fixture(scope="module")
def calls_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], list[Call]]:
    """What a page starts; read once for all tests."""
    return cache(lambda page: calls(page, tmp_path_factory.mktemp("reading")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_can_be_started(
    page: Path, calls_of: Callable[[Path], list[Call]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = []
    for call in calls_of(page):
        monkeypatch.setenv("BUCKET", call.bucket)
        if not call.bucket:
            monkeypatch.delenv("BUCKET")
        try:
            check(call.words)
        except (AssertionError, ConfigError, UserError) as error:
            wrong.append(f"{call}\n    {error}")
        except SystemExit as shown:  # --help, --keys
            wrong += [f"{call}\n    status {shown.code}"] if shown.code else []
    assert not wrong, "\n".join([f"{page.relative_to(ROOT)} has commands that can't be started:", *wrong])


def test_no_command_is_missed() -> None:
    """What looks like a command of ours is a command of the page, by the rules of documented_commands.py."""
    command = re.compile(rf"(?:composer|python) src/main\.py|biphasic (?:{'|'.join(COMMANDS)}) \S*(?:yaml|/)")
    missed = {}
    for page in PAGES:
        read = "\n".join(commands(page))
        missed[page.name] = len(command.findall(page.read_text())) - len(command.findall(read))
    assert not {name: count for name, count in missed.items() if count}


def test_the_pages_have_commands(calls_of: Callable[[Path], list[Call]]) -> None:
    """If commands were written in another way, the tests above would find none."""
    found = [call for page in PAGES for call in calls_of(page)]
    assert len(found) >= 200
    assert {call.words[0] for call in found} >= {*OURS, "recipes/continue_decoder/run.sh"}


def check(words: tuple[str, ...]) -> None:
    """Check one started program.

    Raises:
        AssertionError, ConfigError, UserError: what is wrong with it.
    """
    program, *arguments = words
    for argument in arguments:
        require_file(argument)
    if program == "composer":
        while arguments[0] in LAUNCHER_OPTIONS:
            arguments = arguments[2:]
        program = "python"
        assert arguments[0] in ("src/main.py", "-m"), f"composer starts {arguments[0]}"
    if program == "python":
        check_python(arguments)
    elif program == "biphasic":
        check_biphasic(arguments)
    elif program == "make":
        targets = [argument for argument in arguments if "=" not in argument and "…" not in argument]
        assert set(targets) <= TARGETS, f"Makefile has no {set(targets) - TARGETS}"
    elif program not in EXTERNAL:
        assert (ROOT / program).stat().st_mode & 0o100, f"{program} is not executable"


def require_file(argument: str) -> None:
    """Check that a file of the repository that a command names is there."""
    if argument.startswith(FOLDERS) and argument not in STAND_INS and "NAME" not in argument:
        assert list(ROOT.glob(argument.split("::")[0].rstrip("/"))), f"{argument}: no such file"


def check_python(arguments: list[str]) -> None:
    """Check what Python starts."""
    script, *options = arguments
    if script == "src/main.py":
        check_main(options)
    elif script == "-c":
        ast.parse(options[0])
    elif script == "-m":
        assert options[0] in ("pytest", "biphasic"), f"there is the command `biphasic` for {options[0]}"
        check_biphasic(options[1:]) if options[0] == "biphasic" else None
    elif script != "-":
        source = (ROOT / script).read_text()
        # A recipe's parser may be in a module that recipes share.
        if "from dense_ranking import" in source:
            source += (ROOT / "recipes/quickstart/dense_ranking.py").read_text()
        named = [option for option in options if option.startswith("--")]
        # Added by its name, or from a dataclass's field.
        missing = [option for option in named if not re.search(rf'"--{option[2:]}"|^ +{option[2:]}: ', source, re.M)]
        assert not missing, f"{script} has no {missing}"


def check_main(arguments: list[str]) -> None:
    """Parse a command line of src/main.py by its own parser, read its YAML, and stop where the job would start."""
    if not arguments:
        return
    from biphasic import main

    jobs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "load", lambda file, overrides=(), ranks=1: read(file, tuple(overrides), ranks))
        for name in ("_study", "_sweep", "print_plan"):
            patch.setattr(main, name, lambda *_: 0)
        # It looks for exports on the disk.
        patch.setattr("biphasic.study.stages.sweep_config", lambda config: config)
        patch.setattr(main, "_run", lambda config: jobs.append(config.job))
        main._main(arguments)
    assert set(jobs) <= {"pretrain", "finetune", "evaluate"}, f"src/main.py does not run job: {jobs[0]}"


def check_biphasic(arguments: list[str]) -> None:
    """Parse a command line of `biphasic` by the subcommand's own parser, and read its YAML."""
    name, *rest = arguments
    if name == "--help":
        return
    assert name in COMMANDS, f"biphasic has no {name}"
    parser = command_parsers()[1][name]
    if all(argument.startswith("--") for argument in rest):  # A sentence that names the command, or an option of it.
        missing = set(rest) - set(parser._option_string_actions)
        assert not missing, f"biphasic {name} has no {missing}"
        return
    options = parser.parse_intermixed_args(rest)
    file = options.checkpoint if getattr(options, "initial", False) else getattr(options, "file", None)
    if file is None or not file.endswith(".yaml"):  # the text that `biphasic predict` reads
        return
    overrides = tuple(word for word in getattr(options, "overrides", ()) if "=" in word)
    stand_in = {"convert": "yamls/data/own_text.yaml", "tokenizer": "yamls/data/own_text.yaml"}
    config = read(stand_in.get(name, file) if file == "FILE.yaml" else file, overrides)
    assert config.job in JOBS_OF.get(name, {config.job}), f"biphasic {name} is not for job: {config.job}"
    if name == "tasks":
        tasks = [word for word in getattr(options, "overrides", ()) if "=" not in word]
        assert set(tasks) <= set(config.tasks), f"{file} has no {tasks}"  # pyright: ignore[reportAttributeAccessIssue]


def read(file: str, overrides: tuple[str, ...], ranks: int = 1) -> Config:
    """Read a YAML of the repository; `FILE.yaml` is one of them."""
    return _read(file, overrides, ranks, os.environ.get("BUCKET"))


@cache
def _read(file: str, overrides: tuple[str, ...], ranks: int, bucket: str | None) -> Config:
    return _load(ROOT / STAND_INS.get(file, file), list(overrides), ranks)


_load = reader.load


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("    frobnicate now\n", "frobnicate: command not found"),
        ("    composer src/main.py yamls/210m_biphasic.yaml optimizer.rate=1\n", "optimizer.rate"),
        ("    composer src/main.py yamls/missing.yaml\n", "no such file"),
        ("    biphasic export CHECKPOINT OUT --onxx\n", "--onxx"),
        ("`make quickstrat`", "quickstrat"),
        ("```\nls\n```\n", "a fence without a language"),
    ],
)
def test_a_wrong_command_is_found(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    monkeypatch.setattr("helpers.documented_commands.ROOT", tmp_path)
    (tmp_path / "folder").mkdir()

    def check_page() -> None:
        for call in calls(page, tmp_path / "folder"):
            check(call.words)

    with pytest.raises((AssertionError, ConfigError, UserError), match=re.escape(message)):
        check_page()


def test_make_says_that_a_python_is_no_command(tmp_path: Path) -> None:
    """Not that the environment has another Python, and has to be removed."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / ".ready").touch()
    command = ["make", "env", "PYTHON=python9", f"VENV={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "make env: PYTHON=python9 is not a command" and "clean" not in done.stderr
