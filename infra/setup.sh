#!/bin/sh
# Make .venv hold what infra/locks/core.txt names, from a bare Python 3.11 or newer.
# Says what it downloads and how big it is before it starts; does nothing when nothing changed.
set -eu
cd "$(dirname "$0")/.."
VENV=.venv
LOCK=infra/locks/core.txt
STAMP=$VENV/.rlstreams-setup
WANT=$(cat "$LOCK" pyproject.toml infra/setup.sh infra/environment.sh | cksum)
. infra/environment.sh

if [ -x "$VENV/bin/rlstreams" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$WANT" ]; then exit 0; fi
START=$(date +%s)

install_packages() {
    TORCH=$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' "$LOCK")
    STRICT= ABOUT="about 4.5 GB" ABOUT_CPU="about 400 MB"
    if [ "$(uname -s)" != Linux ]; then
        say "installing the packages of $LOCK (about 300 MB unless cached)"
        install --require-hashes -r "$LOCK"
        return
    fi
    install_lock
}

make_venv
find_uv
install_packages
install --no-deps --editable .
name_by_relative_path
# Compile once what every role imports, not in each of six processes that start together.
"$VENV/bin/python" -c 'import confluent_kafka, fastavro, kafka, rich.live, torch, transformers' >/dev/null
printf '%s\n' "$WANT" >"$STAMP"
say "installed in $(($(date +%s) - START)) s"
