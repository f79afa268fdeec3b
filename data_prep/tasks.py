"""The same as `biphasic tasks`."""

import sys

from biphasic.commands import main
from biphasic.processes import run_command

if __name__ == "__main__":
    run_command(lambda: main(["tasks", *sys.argv[1:]]))
