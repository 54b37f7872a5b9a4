#!/usr/bin/env bash
# Runs tests in the pinned environment (.venv, made on the first run):
#   bash scripts/test.sh                       what CI runs: 15 minutes on two cores
#   bash scripts/test.sh fast                  a few minutes, for every commit
#   bash scripts/test.sh full                  every row of every table: 40 minutes
#   bash scripts/test.sh floor                 compiled layers, kernels and the pretended GPU on the lowest supported versions (.venv-floor)
#   bash scripts/test.sh -m campaign           the rest of the longest tables, for hours
#   bash scripts/test.sh tests/unit/data -x    whatever pytest is asked for, in one process
set -euo pipefail
[ "$*" != floor ] || lowest_versions=yes
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"

# The tests start hundreds of processes. Each would compile torch's modules anew if nothing kept them compiled.
unset PYTHONDONTWRITEBYTECODE
if [ "$python" = "$venv/bin/python" ] && [ ! -e "$venv/compiled" ]; then
    echo "Compiling the packages of $(basename "$venv"), once"
    "$python" -m compileall -q -j 0 "$venv"/lib >"$venv/compile.log" 2>&1 || true  # some packages hold templates that do not compile
    touch "$venv/compiled"
fi

fast=(tests/architecture tests/oracle/test_oracle.py tests/unit/config tests/unit/data tests/unit/model
    tests/unit/observe tests/unit/training)
# what differs between versions of torch and Triton: torch.compile, fake tensors, the interpreter and the compiler of kernels
floor=("tests/parity/test_layouts.py::test_the_layout_is_the_same_run[fp64-traced-tp2-sp]" tests/unit/model/test_compile.py tests/kernels/test_{kernels_in_layers,interpreter,norm,rotary}.py
    tests/unit/parallel/test_graphs.py tests/pretended)
if [ "$*" = floor ]; then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    set -- "${floor[@]}"
elif [ $# -eq 0 ] || [ "$*" = fast ] || [ "$*" = full ]; then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    chosen=()
    [ "$*" != fast ] || chosen=("${fast[@]}")
    [ "$*" != full ] || chosen=(-m "not campaign")
    set -- --numprocesses 2 --dist loadfile --no-loadscope-reorder "${chosen[@]}"
fi
exec "$python" -m pytest "$@"
