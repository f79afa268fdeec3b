"""A sweep of small trials as a process of its own: python drive.py FILE.yaml [key=value ...]"""

from __future__ import annotations

import sys

from biphasic.config.load import load
from biphasic.config.sweep import SweepConfig
from biphasic.sweep.run import run

if __name__ == "__main__":
    config = load(sys.argv[1], sys.argv[2:])
    assert isinstance(config, SweepConfig)
    sys.exit(run(config, module="small_trials"))
