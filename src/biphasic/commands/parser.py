"""How every command line of this repository is parsed: those of `biphasic` and that of src/main.py."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any, NoReturn

from biphasic.errors import UserError
from biphasic.storage.paths import without_password


class Parser(argparse.ArgumentParser):
    """A parser whose errors are raised, so that a job of several ranks shows them once. Abbreviations are errors."""

    def __init__(self, **options: object):
        layout = partial(argparse.RawDescriptionHelpFormatter, max_help_position=32)
        defaults = {"allow_abbrev": False, "formatter_class": layout}
        super().__init__(**{**defaults, **options})  # pyright: ignore[reportArgumentType]

    def parse_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse the arguments. Raises a UserError, which doesn't show it, if one is a URL with a password."""
        for argument in sys.argv[1:] if args is None else args:
            without_password(argument)
        return super().parse_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise a UserError with the usage and the message."""
        raise UserError(f"{self.format_usage()}{self.prog}: error: {message}")


def positive(text: str) -> int:
    """Parse a number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1; got {text!r}")
    return int(text)


def add_file(parser: argparse.ArgumentParser, job: str) -> None:
    """Add the YAML and the overrides of its keys, which `biphasic.config.load` reads."""
    parser.add_argument("file", metavar="FILE.yaml", help=f"the YAML of {job}")
    overrides: Any = parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="replace a value, e.g. seed=1; `biphasic keys` lists the keys"
    )
    overrides.completer = _complete_key


def _complete_key(parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Return the keys of the YAML's job, for a shell's completion."""
    from biphasic.config.jobs import JOBS
    from biphasic.config.read import read_tree
    from biphasic.config.reference import sections_of

    job = str(read_tree(parsed_args.file, []).content().get("job"))
    sections = sections_of(job) if job in JOBS else []
    keys = (section.path(key) for section in sections for key in section.keys)
    return [f"{key}=" for key in dict.fromkeys(keys) if not {"N", "NAME"} & set(key.split("."))]


def count(text: str) -> int:
    """Parse a number of at least 0."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a number of at least 0; got {text!r}")
    return int(text)
