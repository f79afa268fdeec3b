"""The same as `biphasic convert`."""

import sys

from biphasic.commands import main
from biphasic.processes import run_command

if __name__ == "__main__":
    run_command(lambda: main(["convert", *sys.argv[1:]]))
