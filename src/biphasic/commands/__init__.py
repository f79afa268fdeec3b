"""The command `biphasic`: everything but training.

Each subcommand is a module of this package with `add_arguments(parser)` and `run(options)`, which returns the exit status
and raises `UserError` or `ConfigError` for what the user can correct. Only the module of the chosen subcommand is imported,
and it imports what takes long when it runs, so that help and mistakes are shown at once.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from biphasic.commands.parser import Parser
from biphasic.errors import UserError
from biphasic.faults import run_rank

COMMANDS = {
    "convert": "convert text to MDS shards of packed rows",
    "verify": "check a conversion against its record",
    "tokenizer": "train a byte-level BPE tokenizer on own text",
    "tasks": "prepare the downstream datasets",
    "keys": "print the keys of YAMLs: types, defaults, what they are",
    "preflight": "check whether the machines can run a job",
    "runs": "show a run's checkpoints and attempts",
    "show": "print the text of rows by their ids",
    "export": "write a checkpoint as a folder that other libraries load",
    "predict": "predict or embed new text with a model",
    "report": "write the report of a sweep, a study or the recipes",
    "completion": "print a shell's completion script",
}
"""The subcommands in the order of their use, each with one line of help."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status.

    0: done. 1: done with faults, as the subcommand says. 2: something must be changed first. 130: interrupted with Ctrl-C.
    141: nobody reads the output any more.
    """
    return run_rank(lambda: _main(sys.argv[1:] if arguments is None else arguments))


def _main(arguments: list[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:
        return _complete()
    chosen = arguments[0] if arguments and arguments[0] in COMMANDS else None
    parser, subparser = command_parser(chosen)
    if chosen is None or subparser is None:
        if not arguments:
            raise UserError(parser.format_help().rstrip())
        parser.parse_args(arguments)
        return 0
    # Not parser.parse_args, because subparsers don't read options between overrides.
    options = subparser.parse_intermixed_args(arguments[1:])
    return import_module(f"biphasic.commands.{chosen}").run(options)


def command_parser(chosen: str | None) -> tuple[Parser, Parser | None]:
    """Return the parser of the whole command line, and that of the chosen subcommand; the others have no arguments."""
    parser = Parser(prog="biphasic", description="Everything but training, which is: composer src/main.py FILE.yaml")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    chosen_parser = None
    for name, line in COMMANDS.items():
        if name != chosen:
            subparsers.add_parser(name, help=line)
            continue
        module = import_module(f"biphasic.commands.{name}")
        chosen_parser = subparsers.add_parser(name, help=line, description=module.__doc__)
        module.add_arguments(chosen_parser)
    return parser, chosen_parser


def _complete() -> int:
    """Print the completions of the unfinished command line that the shell has put into the environment."""
    import argcomplete

    words = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])].split()
    # The last word is unfinished, unless a space follows.
    chosen = next((word for word in words[1:] if word in COMMANDS), None)
    parser, _ = command_parser(chosen)
    argcomplete.autocomplete(parser)
    return 0
