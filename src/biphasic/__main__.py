"""`python -m biphasic` is the command `biphasic`."""

from typing import NoReturn

from biphasic.commands import main
from biphasic.processes import run_command


def run() -> NoReturn:
    """Run the command line as this process."""
    run_command(main)


if __name__ == "__main__":
    run()
