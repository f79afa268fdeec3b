"""Print the completion script of a shell. In ~/.bashrc or ~/.zshrc:

eval "$(biphasic completion bash)"
eval "$(biphasic completion zsh)"
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `biphasic completion`."""
    parser.add_argument("shell", choices=("bash", "zsh"), help="your shell")


def run(options: argparse.Namespace) -> int:
    """Print the script and return the exit status."""
    import argcomplete

    print(argcomplete.shellcode(["biphasic"], shell=options.shell))  # pyright: ignore[reportPrivateImportUsage]
    return 0
