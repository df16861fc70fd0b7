# Shared by setup.sh and setup-vllm.sh, which set VENV, LOCK, START and TORCH: find a Python and uv, make a
# virtual environment, choose the build of torch.
CONNECT_S=10
# Containers often forbid Python to keep what it compiled: each process would compile torch anew.
unset PYTHONDONTWRITEBYTECODE

say() { printf 'setup: %s\n' "$*" >&2; }

find_python() {
    # Under pyenv `python3` is what .python-version names, or fails if that is not installed.
    for name in "${PYTHON:-python3.12}" python3 python3.13 python3.11; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    say "no Python 3.11 or newer found; install one, or name it: make setup PYTHON=/path/to/python"
    exit 78
}

# One that is found need not run: pyenv's shim of a uv that another Python has ends with 127.
has_uv() { uv --version >/dev/null 2>&1; }

make_venv() {
    [ -x "$VENV/bin/python" ] && return
    python=$(find_python)
    if has_uv; then
        uv venv --quiet --python "$("$python" -c 'import sys; print(sys.executable)')" "$VENV"
    else
        "$python" -m venv "$VENV"
    fi
}

find_uv() {
    if has_uv; then UV=uv; return; fi
    UV=$VENV/bin/uv
    [ -x "$UV" ] && return
    say "downloading uv, the installer (about 20 MB)"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
        --require-hashes -r infra/locks/uv.txt
}

# uv would list every package. A terminal sees that time passes.
install() {
    ticker= status=0
    if [ -t 2 ]; then tick & ticker=$!; fi
    "$UV" pip install --quiet --python "$VENV/bin/python" "$@" || status=$?
    [ -z "$ticker" ] || { kill "$ticker"; printf '\r\033[K' >&2; }
    return "$status"
}

tick() { # while the script lives: what runs behind it does not hear Ctrl-C
    while sleep 1 && kill -0 $$ 2>/dev/null; do
        printf '\rsetup: %d s' $(($(date +%s) - START)) >&2
    done
}

# In the line of an editable install a Python may read the path in the locale's encoding, which need not
# have its characters. Four folders above it are the same place.
name_by_relative_path() {
    for line in "$VENV"/lib/python3.*/site-packages/_editable_impl_rlstreams.pth; do
        printf '../../../..\n' >"$line"
    done
}

has_nvidia() { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

# PyTorch's index of CPU builds is not PyPI: it may be out of reach where PyPI is near.
reaches_cpu_builds() {
    UV_HTTP_TIMEOUT=$CONNECT_S UV_HTTP_RETRIES=0 timeout "$CONNECT_S" \
        "$UV" pip install --python "$VENV/bin/python" --quiet --dry-run --no-deps --reinstall \
        --torch-backend=cpu "$TORCH" >/dev/null 2>&1
}

has_torch() {
    "$VENV/bin/python" -c 'import importlib.metadata as m, sys
sys.exit(m.version("torch").split("+")[0] != sys.argv[1])' "${TORCH#torch==}" 2>/dev/null
}

# The lock without torch and what only its CUDA build needs.
without_cuda() {
    awk '/^[^ ]/ { skip = /^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z-]+)(\[[a-z,]+\])?==/ } !skip' "$LOCK"
}

# Packages of LOCK, with the build of torch that suits the machine. ABOUT, ABOUT_CPU: sizes to tell.
install_lock() {
    if has_nvidia; then
        say "NVIDIA GPU found: installing the packages of $LOCK with CUDA ($ABOUT unless cached)"
        install $STRICT --require-hashes -r "$LOCK"
        return
    fi
    probe_start=$(date +%s)
    if reaches_cpu_builds; then
        say "no NVIDIA GPU: installing the packages of $LOCK with the CPU build of $TORCH ($ABOUT_CPU unless cached)"
        without_cuda >"$VENV/lock-cpu.txt"
        install $STRICT --require-hashes -r "$VENV/lock-cpu.txt"
        # The lock's hashes are those of the default build.
        has_torch || install --no-deps --torch-backend=cpu "$TORCH"
        return
    fi
    waited_s=$(($(date +%s) - probe_start + 1))
    say "no NVIDIA GPU, and the index of CPU builds gave no answer within $waited_s s: installing the packages of $LOCK with the default build of torch ($ABOUT unless cached)"
    install $STRICT --require-hashes -r "$LOCK"
}
