#!/usr/bin/env bash
# Builds sdist and wheel into dist/, installs the wheel into a fresh environment and tries its commands in another folder:
#   bash scripts/package.sh            downloads torch and the other dependencies
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# 1. The wheel is built from the sdist, so a file that the sdist lacks is missed here.
python3 -m venv "$work/builder"
"$work/builder/bin/pip" install --quiet build
rm -rf "$root/dist"
"$work/builder/bin/python" -m build --outdir "$root/dist" "$root" >"$work/build.log" || { cat "$work/build.log"; exit 1; }
ls "$root/dist"

# 2. Nothing of the checkout is on the path of the fresh environment.
python3 -m venv "$work/fresh"
grep -o '^[^ #]*==[^ ]*' "$root/requirements/pinned.txt" >"$work/versions.txt"
install=("$work/fresh/bin/pip" install --quiet --constraint "$work/versions.txt" "$root"/dist/*.whl)
"${install[@]}" || "${install[@]}" --extra-index-url https://download.pytorch.org/whl/cpu  # see install_pins in scripts/environment.sh
PATH=$work/fresh/bin:$PATH
cd "$work"

# 3. A plan, a run on one process, the same run continued on two, and its checkpoint.
flags=(--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --global-batch-size 4
    --lr 1e-3 --eval-iters 0 --mock-data --vocab-size 500 --log-interval 1 --save run --load run --override-opt-param-scheduler)
mgpt-plan memory "${flags[@]}" --train-iters 4 --world-size 2
mgpt-pretrain "${flags[@]}" --train-iters 2
torchrun --nproc-per-node 2 -m pretrain_gpt "${flags[@]}" --train-iters 4 --zero-stage 2
mgpt-inspect-checkpoint run --verify
mgpt-report run
echo "package: sdist and wheel work"
