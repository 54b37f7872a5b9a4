#!/usr/bin/env bash
# Runs all tests in the pinned environment (.venv, made on the first run), a process for each of two cores.
# Arguments go to pytest, which then runs in one process: `bash scripts/test.sh tests/unit/data -x`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"

# The tests start hundreds of processes. Each would compile torch's modules anew if nothing kept them compiled.
unset PYTHONDONTWRITEBYTECODE
if [ "$python" = "$venv/bin/python" ] && [ ! -e "$venv/compiled" ]; then
    echo "Compiling the packages of .venv, once"
    "$python" -m compileall -q -j 0 "$venv"/lib >"$venv/compile.log" 2>&1 || true  # some packages hold templates that do not compile
    touch "$venv/compiled"
fi

if [ $# -eq 0 ]; then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    set -- --numprocesses 2 --dist loadfile --no-loadscope-reorder
fi
exec "$python" -m pytest "$@"
