#!/usr/bin/env bash
# A model trained on rows of 2,048 tokens is trained further on rows of 8,192: convert long documents, train, export.
#
#     recipes/long_context/run.sh MODEL NAME [key=value ...]
#
# MODEL is an exported folder, a checkpoint on this machine, or a hub id; NAME is the new run's. Further keys are those of
# pretrain.yaml. The same command resumes after an interruption.
set -euo pipefail
(($# >= 2)) || { echo "usage: run.sh MODEL NAME [key=value ...]" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
model=$1 name=$2
shift 2

# An exported folder has its tokenizer; otherwise data.yaml names the paper's.
tokenizer=()
if [[ -e $model/tokenizer.json ]]; then tokenizer=(tokenizer="$model"); fi

biphasic convert recipes/long_context/data.yaml "${tokenizer[@]}"
composer src/main.py recipes/long_context/pretrain.yaml run_name="$name" model.init_from="$model" "$@"
biphasic export "${BUCKET:-runs}/$name/checkpoints" "encoders/$name" --force
