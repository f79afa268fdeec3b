"""The same as `biphasic verify`."""

import sys

from biphasic.commands import main
from biphasic.processes import run_command

if __name__ == "__main__":
    run_command(lambda: main(["verify", *sys.argv[1:]]))
