#!/usr/bin/env bash
# The decay of a run on rows of 8,192 tokens: convert long documents, train, export.
#
#     recipes/long_context/run.sh NAME [key=value ...]
#
# NAME is the run's. Further keys are those of pretrain.yaml: with `start_from` only the last phase is trained. The short rows are
# those of yamls/data/fineweb_edu_100bt.yaml, converted before. The same command resumes after an interruption.
set -euo pipefail
(($# >= 1)) || { echo "usage: run.sh NAME [key=value ...]" >&2; exit 2; }
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
name=$1
shift

biphasic convert recipes/long_context/data.yaml
composer src/main.py recipes/long_context/pretrain.yaml run_name="$name" "$@"
biphasic export "${BUCKET:-runs}/$name/checkpoints" "encoders/$name" --force
