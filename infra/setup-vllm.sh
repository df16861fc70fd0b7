#!/bin/sh
# Make .venv-vllm hold vLLM for the CPU, as infra/locks/vllm.txt names it. Linux only.
# An environment of its own: vLLM pins another torch and another transformers than ours.
set -eu
cd "$(dirname "$0")/.."
VENV=.venv-vllm
LOCK=infra/locks/vllm.txt
STAMP=$VENV/.rlstreams-setup
WANT=$(cat "$LOCK" infra/setup-vllm.sh infra/environment.sh | cksum)
. infra/environment.sh

if [ -x "$VENV/bin/python" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$WANT" ]; then exit 0; fi
START=$(date +%s)
TORCH=$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' "$LOCK")
# The lock is complete, and leaves out what vLLM names but a text model does not need.
STRICT=--no-deps ABOUT="about 4 GB" ABOUT_CPU="about 1 GB"
PATH="$PATH:$PWD/.venv/bin"

make_venv
find_uv
install_lock
printf '%s\n' "$WANT" >"$STAMP"
say "installed vLLM into $VENV in $(($(date +%s) - START)) s"
