"""Run the job of a YAML: `composer src/main.py FILE.yaml`. Without the repository: `composer -m biphasic.main FILE.yaml`."""

import sys

from biphasic.main import main

if __name__ == "__main__":
    sys.exit(main())
