"""The same as `biphasic show`."""

import sys

from biphasic.commands import main

if __name__ == "__main__":
    sys.exit(main(["show", *sys.argv[1:]]))
