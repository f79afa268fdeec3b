#!/usr/bin/env bash
# torchdata 0.11.0, StatefulDataLoader with shuffle=True, num_workers=0 and a generator: a resumed run has another order in later epochs.
#
# Expected: after load_state_dict, the rest of the epoch and every later epoch are those of the undisturbed run: for that the loader's state
# is saved. So it is with num_workers=1, and without a generator.
# Seen: with num_workers=0 the interrupted epoch is finished in its order, and the next epoch has another one. Resuming at the end of an
# epoch changes the next one too. The examples are complete in each epoch, so that only a comparison of the two runs shows it.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" torchdata==0.11.0 torch==2.11.0 numpy==2.3.5
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check torchdata==0.11.0 torch==2.11.0 numpy==2.3.5
fi
cat >"$work/resume.py" <<'PYTHON'
import sys

import torch
import torchdata
from torchdata.stateful_dataloader import StatefulDataLoader


def loader(workers: int, generator: bool) -> StatefulDataLoader:
    torch.manual_seed(3)
    own = torch.Generator().manual_seed(7) if generator else None
    return StatefulDataLoader(list(range(8)), batch_size=1, shuffle=True, num_workers=workers, generator=own)


def epoch(batches) -> list[int]:
    return [int(batch) for batch in batches]


if __name__ == "__main__":
    print("torchdata", torchdata.__version__)
    print("expected: both epochs of the resumed run equal those of the undisturbed run")
    equal = {}
    for workers, generator in ((0, True), (1, True), (0, False)):
        undisturbed = loader(workers, generator)
        expected = [epoch(undisturbed), epoch(undisturbed)]
        interrupted = loader(workers, generator)
        batches = iter(interrupted)
        before = [int(next(batches)) for _ in range(3)]
        state = interrupted.state_dict()
        resumed = loader(workers, generator)
        resumed.load_state_dict(state)
        seen = [before + epoch(resumed), epoch(resumed)]
        equal[workers, generator] = [one == other for one, other in zip(seen, expected)]
        print(f"num_workers={workers}, {'a' if generator else 'no'} generator: undisturbed {expected}, resumed {seen}")
    sys.exit(equal != {(0, True): [True, False], (1, True): [True, True], (0, False): [True, True]})
PYTHON
CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/resume.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
