"""The same as `biphasic tasks`."""

import sys

from biphasic.commands import main

if __name__ == "__main__":
    sys.exit(main(["tasks", *sys.argv[1:]]))
