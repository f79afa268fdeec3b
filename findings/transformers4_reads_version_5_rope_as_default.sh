#!/usr/bin/env bash
# transformers 4.57.6 and a configuration saved by transformers 5.23.0: the rotary base becomes 10,000, without a message.
#
# Expected: version 4 reads a Llama configuration of version 5 with the same rotary positions, or says that it can't. Both write
# a `transformers_version`, and a checkpoint has no other mark of its format.
# Seen: version 5 writes `rope_parameters` (base and scaling together) and no `rope_theta`. Version 4 keeps it as an unknown key, and
# `rope_theta` takes its default, so that a model with a base of 500,000 computes other hidden states. Only reading a configuration
# that has `rope_theta` too gives the right base. No warning is logged or raised.
#
# Configurations only, without torch or weights. Checked on 2026-11-28, Python 3.12, Linux x86-64.
# Exit status: 0 as described here, 1 if transformers behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
install() { # NAME VERSION
    if command -v uv >/dev/null; then
        uv venv --quiet --python "$(command -v python3)" "$work/$1"
        uv pip install --quiet --python "$work/$1/bin/python" "transformers==$2"
    else
        python3 -m venv "$work/$1"
        "$work/$1/bin/python" -m pip install --quiet --disable-pip-version-check "transformers==$2"
    fi
}
install five 5.23.0
install four 4.57.6
export TRANSFORMERS_VERBOSITY=warning HF_HUB_OFFLINE=1

"$work/five/bin/python" - <<'PYTHON'
import transformers
from transformers import AutoConfig, LlamaConfig

config = LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
config.save_pretrained("saved")
print(f"transformers {transformers.__version__} saves:", AutoConfig.from_pretrained("saved").rope_parameters)
PYTHON
"$work/four/bin/python" - >read.log 2>messages.log <<'PYTHON'
import json

import transformers
from transformers import AutoConfig

read = AutoConfig.from_pretrained("saved").rope_theta
content = json.load(open("saved/config.json"))
json.dump({**content, "rope_theta": content["rope_parameters"]["rope_theta"]}, open("saved/config.json", "w"))
both = AutoConfig.from_pretrained("saved").rope_theta
print(f"transformers {transformers.__version__} reads: rope_theta {read}, and {both} if config.json has rope_theta too")
PYTHON
cat read.log
echo "expected: rope_theta 500000.0, or a message; messages that mention the positions: $(grep -ci rope messages.log || true)"
grep -q "reads: rope_theta 10000.0, and 500000.0 if" read.log && ! grep -qi rope messages.log
