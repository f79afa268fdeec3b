#!/usr/bin/env bash
# A run on machines that one can reach by ssh, with the repository and its .venv at the same place on each:
#
#     recipes/launch/ssh.sh HOST1 HOST2 ... -- FILE.yaml [key=value ...]
#
# HOST1 is the one that the others must reach (MASTER_ADDR says another name of it). BIPHASIC_HOME is the repository's
# folder there, this one's path if it isn't set. Ctrl-C or SIGTERM saves and stops the run; a second one only ends this
# script. Exit status: 2 if a host says so, else the first failure, else 75 if the run was preempted, else 0.
set -euo pipefail

hosts=()
while (($#)) && [[ $1 != -- ]]; do
    hosts+=("$1")
    shift
done
((${#hosts[@]} && $# >= 2)) || { echo "usage: ssh.sh HOST1 HOST2 ... -- FILE.yaml [key=value ...]" >&2; exit 2; }
shift
home=${BIPHASIC_HOME:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)}
master=${MASTER_ADDR:-${hosts[0]#*@}}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# A signal to ssh doesn't get to the other side, and a lost connection leaves the process there alone. The end of its
# input does get there, in either case: this script holds the only writing end, and letting it go means "save and stop".
mkfifo "$work/hold"
exec 9<>"$work/hold"

exec 8<"$work/hold"

# On one line, for login shells that are not bash. The watcher waits for the end of the input. `tee -p` goes on reading when
# the connection and so the output is gone: otherwise the first message would end the run before it saves.
# shellcheck disable=SC2016
there='cd "$1" && shift && exec 3<&0 || exit 2; recipes/launch/node.sh "$@" </dev/null 3<&- '
# shellcheck disable=SC2016
there+='> >(exec tee -p /dev/null 3<&-) 2> >(exec tee -p /dev/null 3<&- >&2) & node=$!; '
# shellcheck disable=SC2016
there+='{ while read -r _ <&3; do :; done; kill -TERM $node; } >/dev/null 2>&1 & watch=$!; '
# shellcheck disable=SC2016
there+='wait $node; status=$?; kill $watch 2>/dev/null; exit $status'

for index in "${!hosts[@]}"; do
    variables=("NODE_RANK=$index" "NNODES=${#hosts[@]}" "MASTER_ADDR=$master")
    for name in BUCKET MASTER_PORT NPROC GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME \
        BIPHASIC_RESTARTS BIPHASIC_PAUSE BIPHASIC_ON_PREEMPTION BIPHASIC_PREFLIGHT; do
        if [[ -n ${!name:-} ]]; then variables+=("$name=${!name}"); fi
    done
    command=$(printf '%q ' env "${variables[@]}" bash -c "$there" node "$home" "$@")
    (
        # A redirection of the whole subshell would keep a copy.
        exec 9>&-
        trap '' INT TERM HUP # Ctrl-C reaches the whole group: the connections have to stay
        status=0
        ssh -o ServerAliveInterval=30 "${hosts[index]}" "$command" <&8 8<&- || status=$?
        echo "$status" >"$work/status.new.$index"
        mv "$work/status.new.$index" "$work/status.$index"
    ) &
done

told=''
tell() {
    if [[ -n $told ]]; then exit 130; fi
    told=1
    echo "ssh.sh: telling all hosts to save and stop" >&2
    exec 9>&-
}
trap tell INT TERM HUP

statuses() { cat "$work"/status.[0-9]* 2>/dev/null || true; }
while [[ -n $(jobs -r) ]]; do
    wait -n || true
    # A host that has ended for good takes the others along: without it they would wait for it in vain.
    if statuses | grep -qv '^0$'; then exec 9>&-; fi
done

found=$(statuses)
if grep -qx 2 <<<"$found"; then exit 2; fi
failed=$(grep -vxE '0|75' <<<"$found" | head -n 1 || true)
if [[ -n $failed ]]; then exit "$failed"; fi
if grep -qx 75 <<<"$found"; then exit 75; fi
