#!/usr/bin/env bash
# Does CLM first help? The paper's study, small, from text to tables: on two CPU cores, a night.
#
#     recipes/mini/run.sh [FOLDER]
#
# FOLDER is runs/mini if it is left out. The same command resumes after an interruption. FOLDER/times.txt has the seconds of each
# step, recipes/mini/results the tables.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=recipes/mini
export MINI="${1:-runs/mini}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # a process on each core is faster than two threads, for models of this size
mkdir -p "$MINI"

step() {
    local name=$1 start=$SECONDS
    shift
    echo "== $name: $*"
    "$@"
    echo "$(date -u +%FT%TZ) $name: $((SECONDS - start)) s" | tee -a "$MINI/times.txt"
}

if [[ ! -e $MINI/data/conversion.json ]]; then
    step text python $here/make_text.py "$MINI/text"
    step examples python $here/make_tasks.py "$MINI/text"
    step tokenizer biphasic tokenizer $here/data.yaml --size 8192
fi
step convert biphasic convert $here/data.yaml
step tasks biphasic tasks $here/tasks.yaml
step baselines python $here/baselines.py "$MINI/tasks"
step untrained biphasic export-initial $here/pretrain.yaml "$MINI/untrained/encoder" --force
step "finetune, untrained" python src/main.py $here/sweep.yaml
step plan python src/main.py $here/study.yaml --plan
step pretrain python src/main.py $here/study.yaml
step export python src/main.py $here/study.yaml --stage export
step finetune python src/main.py $here/study.yaml --stage finetune
for seed in 1 2; do  # the main objectives again
    export MINI_SEED=$seed
    step "pretrain, seed $seed" python src/main.py $here/seeds.yaml
    step "export, seed $seed" python src/main.py $here/seeds.yaml --stage export
    step "finetune, seed $seed" python src/main.py $here/seeds.yaml --stage finetune
done
for seed in 42 1 2; do  # and longer
    export MINI_SEED=$seed
    step "pretrain, long, seed $seed" python src/main.py $here/long.yaml
    step "export, long, seed $seed" python src/main.py $here/long.yaml --stage export
    step "finetune, long, seed $seed" python src/main.py $here/long.yaml --stage finetune
done
step report biphasic report "$MINI/study"
step against python recipes/paper/against.py "$MINI/study" --models $here/paper_models.yaml
step results python $here/results.py "$MINI"
