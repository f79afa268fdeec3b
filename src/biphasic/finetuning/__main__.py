"""`python -m biphasic.finetuning FILE.yaml` fine-tunes as `src/main.py` does, which an installed package doesn't have."""

import sys

from biphasic.devices import set_allocators
from biphasic.ranks import run_rank


def main() -> int:
    """Run the fine-tuning of the YAML that the command line names, and return the exit status, as `run_rank` does."""
    from biphasic.config.finetune import FinetuneConfig
    from biphasic.config.load import load_job
    from biphasic.finetuning.run import run

    run(load_job(FinetuneConfig, sys.argv[1]))
    return 0


if __name__ == "__main__":
    set_allocators()  # before PyTorch is imported
    sys.exit(run_rank(main))
