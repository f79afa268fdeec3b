#!/usr/bin/env bash
# transformers 4.57.6: a ModernBERT decoder that it has saved gets another window, 64, when it reads it again.
#
# Expected: ModernBertDecoderConfig(local_attention=8) has the same window after save_pretrained and from_pretrained: 4.
# Seen: save_pretrained writes `sliding_window: 4` and no `local_attention`. from_pretrained computes the window anew, from the default
# of `local_attention`, and doesn't use the number in the file. Nothing is logged or raised. A small decoder's logits differ
# by 0.6 after reading. transformers 5.23.0 reads the same file as 4.
#
# Configurations only, without torch or weights. Checked on 2026-11-29, Python 3.12, Linux x86-64.
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

"$work/four/bin/python" - >four.log 2>messages.log <<'PYTHON'
import transformers
from transformers import AutoConfig, ModernBertDecoderConfig

config = ModernBertDecoderConfig(local_attention=8)
config.save_pretrained("saved")
print(f"transformers {transformers.__version__}: {config.sliding_window}, read again: {AutoConfig.from_pretrained('saved').sliding_window}")
PYTHON
"$work/five/bin/python" - >five.log <<'PYTHON'
import transformers
from transformers import AutoConfig

print(f"transformers {transformers.__version__}, of the same file: {AutoConfig.from_pretrained('saved').sliding_window}")
PYTHON
cat four.log five.log
echo "expected: 4 each time, or a message; messages that mention the window: $(grep -ci "window\|local_attention" messages.log || true)"
grep -q ": 4, read again: 64$" four.log && grep -q ": 4$" five.log && ! grep -qi "window\|local_attention" messages.log
