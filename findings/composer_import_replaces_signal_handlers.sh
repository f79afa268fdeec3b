#!/usr/bin/env bash
# Composer 0.32.1: importing it replaces the process's handlers of SIGTERM and SIGINT, also those that the program has set.
#
# Expected: an import changes no signal handler, and Ctrl-C stays a KeyboardInterrupt until a Trainer takes the signals over.
# Seen: after `import composer`, both signals raise SystemExit with 128 plus the signal's number. A handler that was set before is
# gone without a message, and `except KeyboardInterrupt` around the program's own loop doesn't run.
#
# Checked on 2026-11-28, Python 3.12, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" mosaicml==0.32.1 numpy==2.1.3
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check mosaicml==0.32.1 numpy==2.1.3
fi
cat >"$work/handlers.py" <<'PYTHON'
import os
import signal
import sys


def save_and_stop(number, frame):
    print("saving")


signal.signal(signal.SIGTERM, save_and_stop)
before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
import composer  # noqa: E402

after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
ends = []
for number in (signal.SIGTERM, signal.SIGINT):
    try:
        os.kill(os.getpid(), number)
        ends.append("the program goes on")
    except BaseException as error:
        ends.append(f"{type(error).__name__}({error})")
print("composer", composer.__version__)
print("before the import:", *[getattr(handler, "__name__", handler) for handler in before])
print("after it:         ", *[getattr(handler, "__name__", handler) for handler in after])
print("expected: SIGTERM: the program goes on, SIGINT: KeyboardInterrupt()")
print(f"seen:     SIGTERM: {ends[0]}, SIGINT: {ends[1]}")
sys.exit(ends != ["SystemExit(143)", "SystemExit(130)"] or before == after)
PYTHON
CUDA_VISIBLE_DEVICES="" "$work/venv/bin/python" "$work/handlers.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
