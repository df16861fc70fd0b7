#!/bin/sh
# One measured step on a machine with GPUs that is lent for minutes: a limit, and the tail of its log.
#   OUT=folder SITE=folder tests/gpu/device.sh NAME SECONDS COMMAND...
# The whole log goes to $OUT/NAME.log. The status is always 0: one step must not cost the others.
# BESIDE=1: another step runs now, so what a failed one leaves on the GPUs stays there.
name=$1 limit=$2
shift 2
: "${OUT:?a folder for what is to be kept}" "${SITE:?a folder of packages}"
export PYTHONPATH="$PWD:$SITE" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
start=$(date +%s)
timeout -k 10 "$limit" "$@" >"$OUT/$name.log" 2>&1
status=$?
echo "== $name: status $status after $(($(date +%s) - start)) s of $limit"
tail -c 1500 "$OUT/$name.log"
if [ "$status" != 0 ] && [ -z "${BESIDE:-}" ]; then
    # A step that was cut off leaves servers behind, in sessions of their own.
    nvidia-smi --query-compute-apps=pid --format=csv,noheader | xargs -r kill -9
    sleep 3
fi
exit 0
