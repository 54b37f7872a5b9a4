#!/usr/bin/env bash
# The first window on a GPU, at most 8 minutes: the speed of an 8B model's layers with a profile, then every kernel against its
# definition, operators at the widths of an 8B layer, ceilings with GEMMs and attention, torch's operators, a plain PyTorch loop, and
# smoke tests. Usage and environment: common.sh.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin first "$@"
setting="8B-layers on a GPU"
[ -z "$rehearse" ] || setting="rehearsal of a GPU"
model 8B-layers
profile ours 90
stage checks 75 "$python" scripts/gpu/checks.py ${rehearse:+adamw:fp32}
stage shapes 35 "$python" scripts/gpu/shapes.py
stage timed 50 "$python" scripts/gpu/timed.py
pretrain torch 45 "${torch_operators[@]}"
stage plain 95 "$python" benchmarks/training.py --settings "$setting" --against "plain loop" \
  --pairs 1 --window 55 --peers .wheels --out "$W/plain.json"
smoke=(tests/gpu/test_default_paths.py tests/gpu/test_cuda.py)
for file in tests/gpu/test_gradients*.py; do
  [ ! -e "$file" ] || smoke+=("$file")
done
# a test that hangs in CUDA can be ended only with its process; pytest-xdist then starts another
workers=14 limit_each=()
[ -z "$rehearse" ] || workers=2
[ -n "${LIST:-}" ] || ! "$python" -c "import pytest_timeout" 2>/dev/null ||
  limit_each=(--timeout 40 --timeout-method thread)
# -vv, against -q of pyproject.toml: the name and result of every test as it ends, with the reason of a failure (tests/conftest.py)
OMP_NUM_THREADS=1 PRINT_FAILURES=1 stage smoke 55 "$python" -m pytest -m gpu -n "$workers" --max-worker-restart 16 -p no:cacheprovider -vv --tb=short \
  -rfE ${limit_each[@]+"${limit_each[@]}"} "${smoke[@]}"
finish
