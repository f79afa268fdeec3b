"""`import biphasic` imports nothing else."""

from __future__ import annotations

import subprocess
import sys


def test_importing_biphasic_is_light() -> None:
    code = "import sys; before = set(sys.modules); import biphasic; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["biphasic"]), done.stderr
