#!/bin/sh
# Tests that MARKS chooses (all, if empty), dealt out by the file: two workers begin with what needs a
# broker, for that waits more than it computes; the others with what needs none (`tests/conftest.py`).
#   infra/tests.sh MARKS [--no-broker] [PYTEST ARGUMENTS]
set -eu
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
MARKS=${1:-}
WORKERS=$(($(getconf _NPROCESSORS_ONLN) + 1)) # one more than cores: many tests wait for processes
[ "$WORKERS" -le 4 ] || WORKERS=4
shift
if [ "${1:-}" = --no-broker ]; then
    MARKS="not (broker or e2e or docker or vllm)${MARKS:+ and ($MARKS)}"
    shift
fi
exec .venv/bin/pytest -m "$MARKS" --numprocesses "$WORKERS" --dist loadfile \
    --no-loadscope-reorder "$@"
