#!/usr/bin/env bash
# Own text and tokenizer, from text to scores, small: on two CPU cores.
#
#     recipes/your_language/run.sh [LANGUAGE]
#
# LANGUAGE is a folder's name in /usr/share/locale, French if it is left out. The same command resumes after an interruption;
# another language needs runs/your_language to be removed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=recipes/your_language work=runs/your_language
language=${1:-$(cat $work/language 2>/dev/null || echo fr)}
if [[ -e $work/language && $(<$work/language) != "$language" ]]; then
    echo "$work has the language $(<$work/language): remove this folder for $language" >&2
    exit 2
fi

if [[ ! -e $work/data/conversion.json ]]; then
    python $here/gather.py "$language"
    mkdir -p $work
    echo "$language" >$work/language  # only now: a name that was mistyped isn't kept
    biphasic tokenizer $here/data.yaml --size 8192
fi
biphasic convert $here/data.yaml
composer src/main.py $here/pretrain.yaml
biphasic export $work/pretrain/checkpoints $work/encoder --force
biphasic export-initial $here/pretrain.yaml $work/untrained --force
for model in encoder untrained; do
    composer src/main.py $here/finetune.yaml run_name=$model-finetuned model.path=$work/$model
    python src/main.py $here/evaluate.yaml run_name=$model-scores model.path=$work/$model-finetuned/model
done
