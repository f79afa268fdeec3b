"""The command `biphasic`: everything but training. Its subcommands are functions in `data`, `models` and `tools`."""

import os
import sys
from inspect import cleandoc

from biphasic.commands import data, models, tools  # noqa: F401  they register their commands
from biphasic.commands.parser import COMMANDS, Parser
from biphasic.errors import UserError
from biphasic.ranks import run_rank


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status, as `run_rank` does; also 1 as the subcommand says."""
    return run_rank(lambda: _main(sys.argv[1:] if arguments is None else arguments))


def _main(arguments: list[str]) -> int:
    parser, parsers = command_parsers()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for the completions of an unfinished command line
        import argcomplete

        argcomplete.autocomplete(parser)
        return 0
    if not arguments:
        raise UserError(parser.format_help().rstrip())
    if arguments[0] not in COMMANDS:
        parser.parse_args(arguments)
        return 0
    # parser.parse_args doesn't read options between overrides in subparsers.
    return COMMANDS[arguments[0]].run(parsers[arguments[0]].parse_intermixed_args(arguments[1:]))


def command_parsers() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of the whole command line, and the parsers of the subcommands by name."""
    parser = Parser(prog="biphasic", description="Everything but training, which is: composer src/main.py FILE.yaml")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parsers = {}
    for name, command in COMMANDS.items():
        description = cleandoc(command.run.__doc__ or "")
        parsers[name] = subparsers.add_parser(name, help=command.line, description=description)
        parsers[name].add(*command.arguments)
    return parser, parsers
