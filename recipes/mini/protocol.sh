#!/usr/bin/env bash
# Run protocol.md for some pretraining seeds, two at a time, a core each.
#
#     recipes/mini/protocol.sh FOLDER SEED...
#
# FOLDER is that of run.sh, with text, rows and tasks. The same command resumes after an interruption. What could show a score goes
# to log files in FOLDER/protocol; recipes/mini/protocol/seed-SEED.json has the records.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export MINI=$1
shift
export OMP_NUM_THREADS=1
# Memory is kept and backed by huge pages: with models of this size a step takes about a tenth less time.
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_TOP_PAD_=268435456 GLIBC_TUNABLES=glibc.malloc.hugetlb=1
mkdir -p "$MINI/protocol"
for stage in pretrain export; do
    echo "== $stage: seeds $*"
    printf '%s\n' "$@" | xargs -n 1 -P 2 sh -c '
        MINI_SEED=$1 python src/main.py recipes/mini/protocol.yaml --stage "$0" >> "$MINI/protocol/seed$1.log" 2>&1
    ' "$stage"
done
python recipes/mini/protocol_run.py finetune "$MINI" "$@"
python recipes/mini/protocol_run.py record "$MINI" "$@"
