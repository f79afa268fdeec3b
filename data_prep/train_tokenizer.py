"""The same as `biphasic tokenizer`."""

import sys

from biphasic.commands import main

if __name__ == "__main__":
    sys.exit(main(["tokenizer", *sys.argv[1:]]))
