"""`python -m biphasic` is the command `biphasic`."""

import sys

from biphasic.commands import main

if __name__ == "__main__":
    sys.exit(main())
