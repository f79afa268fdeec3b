"""The same as `biphasic verify`."""

import sys

from biphasic.commands import main

if __name__ == "__main__":
    sys.exit(main(["verify", *sys.argv[1:]]))
