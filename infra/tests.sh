#!/bin/sh
# Tests that MARKS chooses (all, if empty), in two parts: what needs no broker shares the cores;
# what needs one, whole runs and containers run on two workers by the file, whole runs first, for
# they wait more than they compute. Each worker that begins reads all tests and their imports, some
# ten seconds: hence two parts and no more. Ends with how each part went.
#   infra/tests.sh MARKS [--no-broker] [PYTEST ARGUMENTS]
set -u
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
CHOSEN=${1:+and ($1)}
FLEETS="e2e or docker or vllm"
WORKERS=$(($(getconf _NPROCESSORS_ONLN) + 1)) # one more than cores: many tests wait for processes
[ "$WORKERS" -le 4 ] || WORKERS=4
SAID=
STATUS=0
shift

part() { # NAME, MARKS, pytest's arguments
    name=$1 marks=$2 start=$(date +%s) status=0
    shift 2
    printf '== %s\n' "$name"
    .venv/bin/pytest -m "$marks $CHOSEN" "$@" || status=$?
    how="exit status $status"
    case $status in 0) how=passed ;; 1) how=FAILED ;; 5) how="none chosen" status=0 ;; esac
    SAID="$SAID
== $name: $how, $(($(date +%s) - start)) s"
    [ "$status" = 0 ] || STATUS=$status
    [ "$status" -lt 2 ] || { printf '%s\n' "$SAID"; exit "$status"; } # interrupted, or wrong usage
}

if [ "${1:-}" = --no-broker ]; then BROKER=false; shift; else BROKER=true; fi
part "tests without a broker, on all cores" "not (broker or $FLEETS)" \
    --numprocesses "$WORKERS" --dist worksteal "$@"
if $BROKER; then
    part "tests with a broker, whole runs and containers, two at a time" "(broker or $FLEETS)" \
        --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"
fi
printf '%s\n' "$SAID"
exit "$STATUS"
