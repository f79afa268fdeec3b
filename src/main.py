"""Run the job of a YAML: `composer src/main.py FILE.yaml`. Without the repository: `composer -m biphasic.main FILE.yaml`."""

from biphasic.main import main
from biphasic.processes import run_command

if __name__ == "__main__":
    run_command(main)
