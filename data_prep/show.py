"""The same as `biphasic show`."""

import sys

from biphasic.commands import main
from biphasic.processes import run_command

if __name__ == "__main__":
    run_command(lambda: main(["show", *sys.argv[1:]]))
