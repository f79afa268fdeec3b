"""The same as `biphasic convert`."""

import sys

from biphasic.commands import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
