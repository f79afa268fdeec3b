#!/usr/bin/env bash
# One node's part of a run: every launcher calls this, once on each node.
#
#     recipes/launch/node.sh FILE.yaml [key=value ...]
#
# Which node this is comes from the environment (README.md has the variables). Exit status: 0 done, 75 preempted (start the
# same command again), 2 something must be changed first, 130 interrupted without saving, anything else failed.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^set /{s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit 0
fi
if (($# == 0)) || [[ $1 == -* ]]; then
    echo "usage: node.sh FILE.yaml [key=value ...]; node.sh --help" >&2
    exit 2
fi
# ssh and batch scripts come without the environment that an interactive shell has activated.
if [[ -z ${VIRTUAL_ENV:-} && -x $root/.venv/bin/python ]]; then PATH=$root/.venv/bin:$PATH; fi

# A study's run comes with its YAML.
if [[ -n ${RUN_YAML:-} ]]; then base64 -d <<<"$RUN_YAML" >"$1"; fi

say() { echo "node.sh: node ${node:-?}: $*" >&2; }

gpus() {
    # nvidia-smi lists what the machine has, not what this job was given, hence last.
    local count=${NPROC:-${SKYPILOT_NUM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-${LOCAL_WORLD_SIZE:-}}}}
    if [[ -z $count && -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        count=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true)
    fi
    if [[ -z $count ]]; then count=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true); fi
    # GPUs of AMD, and containers without nvidia-smi.
    if ((count == 0)) && [[ -e /dev/kfd || -e /dev/nvidiactl || -e /dev/dxg ]]; then
        count=$(python -c 'import torch; print(torch.cuda.device_count())' || echo 0)
    fi
    # Without a GPU one process runs on the CPU.
    ((count > 0)) || count=1
    echo "$count"
}

nproc=$(gpus)
port=${MASTER_PORT:-7501}
on_preemption='restart'
if [[ -n ${NODE_RANK:-} && -n ${NNODES:-} ]]; then # what was said by hand comes first: ssh.sh, or a person
    node=$NODE_RANK nodes=$NNODES first=${MASTER_ADDR:-}
elif [[ -n ${SKYPILOT_NODE_RANK:-} ]]; then
    node=$SKYPILOT_NODE_RANK nodes=${SKYPILOT_NUM_NODES:-1} first=${MASTER_ADDR:-$(head -n 1 <<<"${SKYPILOT_NODE_IPS:-}")}
    on_preemption='exit' # a managed job recovers
elif [[ -n ${SLURM_NODEID:-} ]]; then
    node=$SLURM_NODEID nodes=${SLURM_NNODES:-1} first=${MASTER_ADDR:-}
    if [[ -z $first ]] && ((nodes > 1)); then
        names=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
        first=${names%%$'\n'*}
    fi
    # Two jobs may share a node.
    port=${MASTER_PORT:-$((20000 + ${SLURM_JOB_ID:-0} % 10000))}
    on_preemption='exit' # slurm.sbatch requeues
elif [[ -n ${JOB_COMPLETION_INDEX:-} ]]; then
    node=$JOB_COMPLETION_INDEX nodes=${NNODES:?set NNODES to the completions of the Job} first=${MASTER_ADDR:-}
elif [[ -n ${NODE_RANK:-} && -n ${WORLD_SIZE:-} ]]; then # mcli: the launcher's own variables
    node=$NODE_RANK nodes=$((WORLD_SIZE / nproc)) first=${MASTER_ADDR:-}
else
    node=0 nodes=1 first=
fi

arguments=(-n "$nproc")
if ((nodes > 1)); then
    [[ -n $first ]] || { say "$nodes nodes, and MASTER_ADDR is not set"; exit 2; }
    arguments+=(--world_size $((nodes * nproc)) --node_rank "$node" --master_addr "$first" --master_port "$port")
fi
# The launcher reads these too, and would take those of the machine for its own.
unset WORLD_SIZE NODE_RANK BASE_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT

on_preemption=${BIPHASIC_ON_PREEMPTION:-$on_preemption}
restarts=${BIPHASIC_RESTARTS:-20}
pause=${BIPHASIC_PAUSE:-10}
launcher='' told=''

# The ranks are told, never the launcher: it would leave them half a minute for what may be a long upload. While it has
# none yet there is nobody to tell, so wait for them as long as it lives: its imports from a slow disk may take minutes.
tell_ranks() {
    told=$1
    say "SIG$1: telling the ranks to save and stop"
    # A bare `return` in a trap would return what was there before it, the interrupted wait's failure.
    while [[ -n $launcher ]] && kill -0 "$launcher" 2>/dev/null; do
        if pkill -USR1 -P "$launcher"; then return 0; fi
        sleep 0.2 || true # what signals everything signals this too
    done
    return 0
}
for name in TERM USR1 USR2 INT HUP; do
    # shellcheck disable=SC2064
    trap "tell_ranks $name" "$name"
done

# Sets `status`. A signal ends `wait` early, with a status of its own: ask again until the process is gone, and once more.
finish() {
    while true; do
        status=0
        wait "$1" || status=$?
        kill -0 "$1" 2>/dev/null || break
    done
    if ((status > 128)); then
        local again=0
        wait "$1" 2>/dev/null || again=$?
        if ((again != 127)); then status=$again; fi # 127: it was the process's own, and is forgotten
    fi
}

launch() {
    python "$here/../../src/biphasic/launcher.py" "${arguments[@]}" "$@" &
    launcher=$!
    # A signal may have come before there was a number to send it to.
    if [[ -n $told ]]; then tell_ranks "$told"; fi
    finish "$launcher"
    launcher=''
}

attempt() {
    status=0
    if [[ ${BIPHASIC_PREFLIGHT:-1} != 0 ]]; then launch -m biphasic preflight "$@"; fi
    if ((status != 0)); then return 0; fi
    if [[ -n $told ]]; then status=75; else launch "$root/src/main.py" "$@"; fi
}

say "of $nodes, $nproc processes: launcher.py ${arguments[*]} src/main.py $*"
failures=0
while true; do
    attempt "$@"
    if ((status == 0 || status == 2 || status == 130)); then exit "$status"; fi
    if [[ -n $told ]]; then
        # This node is going away, whatever became of the ranks.
        if ((status == 75)); then say preempted; else say "preempted before it could save (status $status)"; fi
        exit 75
    fi
    if ((status == 75)); then
        # Another node was told, or a rank of this one: this node stays.
        if [[ $on_preemption == exit ]]; then exit 75; fi
        say "preempted: starts again in ${pause} s"
    else
        failures=$((failures + 1))
        if ((failures > restarts)); then say "failed with status $status, $restarts restarts used"; exit "$status"; fi
        say "failed with status $status: restart $failures of $restarts in ${pause} s"
    fi
    # When the reader of the output is gone (`node.sh FILE.yaml | head`), every further attempt would fail at its first line.
    if [[ -p /dev/stdout ]]; then echo || exit 141; fi
    # All nodes come here: when a rank is gone the collectives of the others fail. They meet at the same address again.
    for ((second = 0; second < pause; second++)); do
        if [[ -z $told ]]; then sleep 1 || true; fi
    done
    if [[ -n $told ]]; then exit 75; fi
done
