#!/bin/bash
#SBATCH --job-name=rlstreams
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@600
# A run over the nodes of a Slurm job: RUN=demo sbatch infra/hosts/slurm.sh CONFIG... [--section.field=VALUE]
# The first node has the broker, the trainer and what else `up` starts; rollout workers on the others
# join it (infra/docs/several-hosts.md). With JOIN=ADDRESS:PORT all nodes join that run: a second,
# preemptible job. SIGTERM, ten minutes before the end of time, drains; the job is queued again and goes on.
# NOT RUN on Slurm; tests/e2e/test_slurm.py runs a whole job with stubs for Slurm's commands.
set -u
run=${RUN:?the id of the run}
dir=${DIR:-$PWD/runs}        # a folder that all nodes see
keep=${KEEP:-$PWD/infra/hosts/keep.sh}
servers=${SERVERS:-0}        # model servers of each joining node, one to a GPU; 0: the built-in engine
password=$dir/$run/broker/password
secret=${SECRET:-file:$dir/$run.secret} # with servers: of weights that come over the network
steps=()
asked=

say() { echo "slurm.sh: $1" >&2; }
begin() { # NODE COMMAND...: a step of this job, in the background
    local node=$1
    shift
    srun --nodes=1 --ntasks=1 --nodelist="$node" --overlap "$@" &
    steps+=($!)
}
drain() { kill -TERM "${steps[@]}" 2>/dev/null; } # srun passes it on to its task
ended() { # PID: until it is; a signal ends a wait, and not the step. Sets `status`
    wait "$1"
    status=$?
    while kill -0 "$1" 2>/dev/null; do wait "$1"; status=$?; done
}
trap 'asked=1; drain' TERM INT

own=()
if [ "$servers" != 0 ]; then
    if [ -z "${SECRET:-}" ] && [ ! -s "$dir/$run.secret" ]; then
        mkdir -p "$dir"
        (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$dir/$run.secret")
    fi
    own=(--weights.secret="$secret")
fi
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
broker=${JOIN:-}
if [ -z "$broker" ]; then
    address=${ADDRESS:-$(getent ahostsv4 "${nodes[0]}" | awk '{ print $1; exit }')}
    broker=$address:${PORT:-19092}
    begin "${nodes[0]}" rlstreams up "$@" --resume --no-live --run.id="$run" --run.dir="$dir/$run" \
        --broker.host="$address" --broker.port="${broker##*:}" --weights.host="$address" ${own[@]+"${own[@]}"}
    nodes=("${nodes[@]:1}")
    until [ -s "$password" ] || [ -n "$asked" ] || ! kill -0 "${steps[0]}" 2>/dev/null; do sleep 1; done
    set -- # the configuration is the claim's
fi
# A worker drains for less than the job has left; `keep.sh` starts one again that fails, as one does
# whose broker or trainer is not there yet.
join=(--join "$broker" --run "$run" --password-file "$password" --deadlines.drain_s="${DRAIN_S:-60}"
    ${own[@]+"${own[@]}"} "$@")
for node in ${nodes[@]+"${nodes[@]}"}; do
    [ -z "$asked" ] || break
    urls=()
    for ((n = 0; n < servers; n++)); do
        begin "$node" sh "$keep" server "${join[@]}" \
            --engine.port=$((8000 + n)) --engine.env.CUDA_VISIBLE_DEVICES="$n"
        urls+=("\"http://127.0.0.1:$((8000 + n))\"")
    done
    [ "$servers" = 0 ] || urls=("--engine.urls=[$(IFS=,; echo "${urls[*]}")]")
    begin "$node" sh "$keep" rollout "${join[@]}" ${urls[@]+"${urls[@]}"}
done
[ -z "$asked" ] || drain # those that began meanwhile

ended "${steps[0]}"
first=$status
if [ -z "${JOIN:-}" ]; then drain; fi # `up` has ended: nobody answers its workers any more
for step in "${steps[@]:1}"; do ended "$step"; done
if [ -n "$asked" ]; then
    say "drained, and is queued again"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$first"
