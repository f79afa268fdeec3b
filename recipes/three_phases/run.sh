#!/usr/bin/env bash
# Three phases with data of their own, and three candidates for the last: from text to losses, on two CPU cores.
#
#     recipes/three_phases/run.sh [FOLDER]
#
# FOLDER is runs/mini if it is left out: the text, the tokenizer and the short rows are those of recipes/mini. The same command
# resumes after an interruption.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=recipes/three_phases
export MINI="${1:-runs/mini}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [[ ! -e $MINI/data/conversion.json ]]; then
    python recipes/mini/make_text.py "$MINI/text"
    biphasic tokenizer recipes/mini/data.yaml --size 8192
fi
biphasic convert recipes/mini/data.yaml
biphasic convert $here/long.yaml
biphasic convert $here/docstrings.yaml
biphasic convert $here/docstrings.yaml sequence_length=256 'filters=[{column: split, any_of: [validation]}]' \
    output="$MINI/three_phases/validation"
python src/main.py $here/study.yaml --plan
python src/main.py $here/study.yaml
python $here/steps.py "$MINI/three_phases/study"
