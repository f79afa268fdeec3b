#!/usr/bin/env bash
# A Hugging Face decoder becomes an encoder: convert text with its tokenizer, continue with MLM, export.
#
#     recipes/continue_decoder/run.sh DECODER [STEPS] [key=value ...]
#
# DECODER is a hub id or a folder; STEPS is 12000, or 2000 or 22000 as in the paper. Further keys are those of pretrain.yaml. The
# same command resumes after an interruption.
set -euo pipefail
(($# >= 1)) || { echo "usage: run.sh DECODER [STEPS] [key=value ...]" >&2; exit 2; }
decoder=$1 steps=12000
if [[ -d $decoder ]]; then decoder=$(cd "$decoder" && pwd); fi # a folder is relative to where the command was given
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
shift
if [[ ${1:-} =~ ^[0-9]+$ ]]; then
    steps=$1
    shift
fi
name=$(basename "$decoder")
run=$name-mlm40-$steps
data=${BUCKET:-data}/fineweb-edu-$name-$steps

# BOS before each document if the decoder's tokenizer puts it before each text, as Llama's and Gemma's do.
bos=()
puts_bos=$(python - "$decoder" <<'END'
import sys

from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import UserError

try:
    print(load_tokenizer(sys.argv[1]).puts_bos)
except (UserError, OSError) as error:
    print(error, file=sys.stderr)
    sys.exit(2)
END
)
if [[ $puts_bos = True ]]; then
    bos=(add_bos=true)
fi
biphasic convert recipes/continue_decoder/data.yaml tokenizer="$decoder" output="$data" \
    max_tokens=$((steps * 2359296)) "${bos[@]}"
composer src/main.py recipes/continue_decoder/pretrain.yaml run_name="$run" model.init_from="$decoder" data.folder="$data" \
    max_duration="${steps}ba" "$@"
biphasic export "${BUCKET:-runs}/$run/checkpoints" "encoders/$run" --force
