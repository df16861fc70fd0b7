#!/bin/sh
# Resolve anew: one lock for every platform and Python, with hashes and without any index in it.
set -eu
cd "$(dirname "$0")/../.."
PATH="$PATH:$PWD/.venv/bin"
compile() {
    uv pip compile --quiet --upgrade --universal --generate-hashes --python-version 3.11 \
        --no-annotate --no-header "$@"
}
# Not the extra `gym`: parts of it exist as sources only, and need a C compiler.
compile --extra monitor --extra tensorboard --extra mlflow --extra trackio --extra wandb --extra hub --extra math --extra json-schema --extra megatron --group dev pyproject.toml -o infra/locks/core.txt
echo 'uv>=0.9' | compile - -o infra/locks/uv.txt
compile --override infra/locks/vllm-overrides.txt infra/locks/vllm.in -o infra/locks/vllm.txt
