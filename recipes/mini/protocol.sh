#!/usr/bin/env bash
# Run some pretraining seeds of protocol.md (study `protocol`) or followup.md (`longer`, `ratios`), two seeds at a time.
#
#     recipes/mini/protocol.sh STUDY FOLDER SEED...
#
# FOLDER is that of run.sh, with text, rows and tasks, and with the public sets (public/README.md). The same command resumes after
# an interruption. What could show a score goes to log files in FOLDER/STUDY; recipes/mini/STUDY/seed-SEED.json has the records.
set -euo pipefail
if (($# < 3)) || [[ $1 != @(protocol|longer|ratios) ]]; then
    echo "usage: protocol.sh protocol|longer|ratios FOLDER SEED..." >&2
    exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
study=$1
export MINI=$2
shift 2
export OMP_NUM_THREADS=1
# Memory is kept and backed by huge pages: with models of this size a step takes a seventh to a sixth less time.
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_TOP_PAD_=268435456 GLIBC_TUNABLES=glibc.malloc.hugetlb=1
for needed in text data tasks public; do
    [[ -d $MINI/$needed ]] || { echo "$MINI: has no folder $needed; see recipes/mini/protocol.md" >&2; exit 2; }
done
mkdir -p "$MINI/$study"
for stage in pretrain export; do
    echo "== $stage: seeds $*"
    printf '%s\n' "$@" | xargs -n 1 -P 2 sh -c '
        MINI_SEED=$2 python src/main.py "recipes/mini/$0.yaml" --stage "$1" >> "$MINI/$0/seed$2.log" 2>&1 && exit
        echo "seed $2: $1 failed, and $MINI/$0/seed$2.log says why; the same command resumes" >&2
        exit 1
    ' "$study" "$stage" || exit 1
done
python recipes/mini/protocol_run.py finetune "$study" "$MINI" "$@"
python recipes/mini/protocol_run.py record "$study" "$MINI" "$@"
