"""A sweep of small trials as its own process: python -m helpers.drive_sweep FILE.yaml [key=value ...]"""

import sys

from biphasic.checkpointing import run_lock
from biphasic.config.load import load
from biphasic.config.sweep import SweepConfig
from biphasic.ranks import run_rank
from biphasic.sweep.run import run

if __name__ == "__main__":
    run_lock.HEARTBEAT_SECONDS = 0.2
    config = load(sys.argv[1], sys.argv[2:])
    assert isinstance(config, SweepConfig)
    sys.exit(run_rank(lambda: run(config, module="helpers.small_trials")))
