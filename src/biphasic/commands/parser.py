"""Parsing of all command lines: those of `biphasic` and of src/main.py."""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from biphasic.errors import UserError
from biphasic.storage.files import is_remote, without_password

Argument = tuple[tuple[str, ...], dict[str, Any]]
"""Names and options for argparse's `add_argument`."""


class Command(NamedTuple):
    """A subcommand of `biphasic`: its line of help, its arguments, and its function, which returns the exit status."""

    line: str
    arguments: tuple[Argument, ...]
    run: Callable[[argparse.Namespace], int]


COMMANDS: dict[str, Command] = {}
"""The subcommands by name."""


def argument(*names: str, **options: Any) -> Argument:
    """Return an argument of a command line."""
    return names, options


def command(line: str, *arguments: Argument) -> Callable[[Callable[[argparse.Namespace], int]], Any]:
    """Register a function as a subcommand; its name and docstring are the subcommand's name and description.

    The function itself has the slow imports, so that help and usage errors appear at once.
    """

    def register(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
        COMMANDS[run.__name__.replace("_", "-")] = Command(line, arguments, run)
        return run

    return register


class Parser(argparse.ArgumentParser):
    """A parser that raises its errors, so that a job of several ranks prints them once. Abbreviations are errors."""

    def __init__(self, **options: object):
        layout = partial(argparse.RawDescriptionHelpFormatter, max_help_position=32)
        defaults = {"allow_abbrev": False, "formatter_class": layout}
        super().__init__(**{**defaults, **options})  # pyright: ignore[reportArgumentType]

    def add(self, *arguments: Argument) -> None:
        """Add arguments."""
        for names, options in arguments:
            self.add_argument(*names, **options)

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        for text in sys.argv[1:] if args is None else args:
            without_password(text)
        return super().parse_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.format_usage()}{self.prog}: error: {message}")


def count(text: str, least: int = 0) -> int:
    """Parse an integer of at least `least`."""
    if not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a number of at least {least}; got {text!r}")
    return int(text)


positive = partial(count, least=1)
"""Parse an integer of at least 1."""


def local_path(text: str) -> Path:
    """Parse a path on this machine, with `~` for the home folder."""
    if is_remote(text):
        raise argparse.ArgumentTypeError(f"expected a local path; got {text!r}")
    return Path(os.path.expanduser(text))


def file_arguments(job: str) -> tuple[Argument, Argument]:
    """Return the arguments for a job's YAML and its overrides, for `biphasic.config.load`."""
    overrides = "replace a value, e.g. seed=1; `biphasic keys` lists the keys"
    return (
        argument("file", metavar="FILE.yaml", help=f"the YAML of {job}"),
        argument("overrides", nargs="*", default=[], metavar="key=value", help=overrides),
    )
