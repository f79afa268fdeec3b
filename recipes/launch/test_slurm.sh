#!/usr/bin/env bash
# A real Slurm on this machine, a real preemption: a job of a partition with priority takes the node from a run, which
# saves, goes back into the queue, resumes from the batch it saved at, and trains no batch twice. If Debian's faketime is
# installed, the resumed run's clock is one hour behind. Then the same for a time limit, a job that is cancelled, which
# must not come back, and a study of a trunk and two branches.
#
# Needs root and Debian's slurm-wlm and munge; nothing outside a temporary folder is touched. Takes four to eight minutes.
# Exit status: 0 as promised, 1 not, 3 Slurm isn't installed.
set -euo pipefail

for program in munged slurmctld slurmd sbatch scontrol; do
    if ! PATH=$PATH:/usr/sbin command -v "$program" >/dev/null; then
        echo "test_slurm.sh: $program is not installed: apt-get install -y --no-install-recommends slurm-wlm munge" >&2
        exit 3
    fi
done
if [[ $(id -u) != 0 ]]; then echo "test_slurm.sh: the daemons have to start as root" >&2; exit 3; fi
PATH=$PATH:/usr/sbin
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
if [[ -x .venv/bin/python ]]; then PATH=$root/.venv/bin:$PATH; fi
export PYTHONPATH=$root/tests OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=''
batches=${BATCHES:-600}

work=$(mktemp -d -t biphasic-slurm-XXXXXX)
chmod 755 "$work"
export SLURM_CONF=$work/slurm.conf
daemons=()
passed=''
stop() {
    scancel --quiet --user root 2>/dev/null || true
    sleep 2
    # slurmd first: its steps end with it.
    for ((i = ${#daemons[@]} - 1; i >= 0; i--)); do kill "${daemons[i]}" 2>/dev/null || true; done
    wait || true
    if [[ -n $passed ]]; then rm -rf "$work"; else echo "logs and the run are in $work" >&2; fi
}
trap stop EXIT

say() { printf '%4d s  %s\n' "$SECONDS" "$*"; }
# until_true SECONDS WHAT COMMAND...
until_true() {
    local end=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        if ((SECONDS >= end)); then
            say "not within the time: $what"
            squeue --all || true
            tail -n 40 "$work"/*.out "$work"/slurmctld.log || true
            exit 1
        fi
        sleep 0.3
    done
    say "$what"
}
free_ports() {
    python -c "
import socket
held = [socket.create_server(('127.0.0.1', 0)) for _ in range(2)]
print(*(one.getsockname()[1] for one in held))"
}

read -r control node <<<"$(free_ports)"
mkdir "$work/state" "$work/spool"
head -c 1024 /dev/urandom >"$work/munge.key"
chmod 600 "$work/munge.key"
# cred_expire: a job that was requeued waits so long before it may start again, two minutes by default.
cat >"$SLURM_CONF" <<END
ClusterName=biphasic
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$control
SlurmdPort=$node
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$work/munge.sock,cred_expire=5
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=0
KillWait=30
ReturnToService=2
JobRequeue=1
MailProg=/bin/true
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=$(hostname -s) NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 PreemptMode=REQUEUE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
END

start() {
    "$@" >"$work/$1.console" 2>&1 &
    daemons+=($!)
}
start munged --foreground --force --key-file="$work/munge.key" --socket="$work/munge.sock" --pid-file="$work/munged.pid" \
    --log-file="$work/munged.log" --seed-file="$work/munged.seed"
until_true 20 "munge answers" munge -S "$work/munge.sock" -n
start slurmctld -D -c
start slurmd -D -c
is_up() { sinfo --noheader --partition=low --format=%T | grep -qx idle; }
until_true 30 "Slurm $(slurmctld -V | cut -d' ' -f2) is up" is_up

yaml=$(python tests/launch/tiny_run.py write "$work" "$batches")
run=$work/runs/run
# The node's Python, whose clock differs from this machine's by what is in the file `clock`.
mkdir "$work/bin"
echo +0 >"$work/clock"
faked=''
if command -v faketime >/dev/null; then faked="faketime -f \"\$(cat $work/clock)\""; fi
printf '#!/bin/sh\nNO_FAKE_STAT=1 exec %s %s "$@"\n' "$faked" "$(command -v python)" >"$work/bin/python"
chmod +x "$work/bin/python"
# With VIRTUAL_ENV node.sh takes the Python of PATH.
job=$(VIRTUAL_ENV=$work PATH=$work/bin:$PATH NPROC=2 BIPHASIC_RESTARTS=0 sbatch --parsable --partition=low --output="$work/%x-%j.out" recipes/launch/slurm.sbatch "$yaml")
trained() { grep -c loss/train/total "$run/metrics.jsonl" 2>/dev/null || true; }
trains() { (($(trained) > ${1:-20})); }
state() { scontrol --oneliner show job "$1" | tr ' ' '\n' | sed -n 's/^JobState=//p'; }
restarts() { scontrol --oneliner show job "$1" | tr ' ' '\n' | sed -n 's/^Restarts=//p'; }
is() { [[ $(state "$1") == "$2" ]]; }
until_true 240 "job $job trains" trains

urgent=$(sbatch --parsable --partition=high --exclusive --output="$work/urgent.out" --wrap 'sleep 3')
requeued() { [[ $(restarts "$job") == 1 ]] && { is "$job" PENDING || is "$job" RUNNING; }; }
until_true 90 "job $urgent of the partition with priority has made job $job go back into the queue" requeued
say "at batch $(trained) of $batches"
echo -1h >"$work/clock"
until_true 60 "job $urgent has run" is "$urgent" COMPLETED
until_true 300 "job $job has completed" is "$job" COMPLETED
python tests/launch/tiny_run.py check "$work" "$batches"
attempts=("$run"/checkpoints/attempts/*.json)
since() { grep -o '"since": *"[^"]*"' "$1"; }
if [[ -n $faked && ! $(since "${attempts[1]}") < $(since "${attempts[0]}") ]]; then say "the clock was not behind"; exit 1; fi

# Time runs out: only the batch script is told (--signal=B:USR1), here by hand.
yaml=$(mkdir "$work/second" && python tests/launch/tiny_run.py write "$work/second" 100000)
run=$work/second/runs/run
job=$(NPROC=2 BIPHASIC_RESTARTS=0 sbatch --parsable --partition=low --output="$work/%x-%j.out" recipes/launch/slurm.sbatch "$yaml")
until_true 240 "job $job trains" trains
scancel --batch --signal=USR1 "$job"
until_true 60 "job $job has gone back into the queue before its time is over" requeued
before=$(trained)
until_true 240 "job $job trains again" trains "$before"
# Somebody who cancels a job doesn't want it back.
scancel "$job"
cancelled() { is "$job" CANCELLED; }
until_true 30 "job $job is cancelled" cancelled
ended() { (($(grep -c "node.sh: node 0: preempted" "$work/biphasic-$job.out") == 2)); }
until_true 60 "its node.sh has ended" ended
# As long as a job that came back would need to be seen.
sleep 8
if ! cancelled; then say "job $job came back"; exit 1; fi

# A study of a trunk and two branches, each of which waits for the trunk's job. The trunk is preempted, then killed.
yaml=$(mkdir "$work/third" && python tests/launch/tiny_run.py study "$work/third" 300)
run=$work/third/study/trunk
study() { NPROC=2 BIPHASIC_RESTARTS=0 BIPHASIC_PREFLIGHT=0 python src/main.py "$yaml"; }
queue() { squeue --noheader --format='%j %T %E %i' | grep '^study\.' | sort; }
job_of() { queue | sed -n "s/^study\.$1\.[0-9a-f]* .* //p"; }
waiting() { (($(queue | grep -c "^study\.\(early\|late\)\.[0-9a-f]* PENDING afterok:$job"'\b') == $1)); }
study
job=$(job_of trunk)
until_true 5 "the branches wait for the trunk's job $job" waiting 2
# Started again, it submits nothing twice.
study
if (($(queue | wc -l) != 3)); then queue; say "a run was submitted twice"; exit 1; fi
until_true 240 "job $job trains" trains
urgent=$(sbatch --parsable --partition=high --exclusive --output="$work/urgent.out" --wrap 'sleep 3')
until_true 90 "job $urgent of the partition with priority has made job $job go back into the queue" requeued
before=$(trained)
until_true 5 "the branches still wait for job $job" waiting 2
until_true 240 "job $job trains again" trains $((before + 20))
# A machine fails: nothing is saved, and Slurm releases neither the branches nor their dependency.
scontrol listpids "$job" | awk 'NR > 1 && $1 > 1 { print $1 }' | xargs kill -KILL
until_true 60 "job $job has failed" is "$job" FAILED
# The same command submits what is missing. A branch whose batch the trunk has saved waits for nothing.
unsaved=0
for batch in 100 200; do
    if [[ ! -e $run/checkpoints/ba$batch.json ]]; then unsaved=$((unsaved + 1)); fi
done
study
queue
job=$(job_of trunk)
until_true 90 "$unsaved new jobs of the branches wait for the trunk's new job $job" waiting $unsaved
study_done() { (($(python src/main.py "$yaml" --plan --json | grep -c '"state": "done"') == 3)); }
until_true 400 "the study's runs are done" study_done
python tests/launch/tiny_run.py check-study "$work/third" 300
passed=1
say "passed"
