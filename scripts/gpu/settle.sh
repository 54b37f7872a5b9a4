#!/usr/bin/env bash
# What the first window left open, at most 8 minutes: operators that it found wrong under compute-sanitizer; torch.compile and CUDA
# graphs; 1.3B and 125M parameters; the kernels that memory bounds and what `auto` takes after them; all kernels under
# compute-sanitizer. Fix what the first window found wrong before it. Usage and environment: common.sh.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin settle "$@"
stage failed 38 "$python" scripts/gpu/checks.py --failed docs/results/gpu/first.json --seconds 28
model 8B-layers
pretrain compiled 70 --torch-compile
pretrain any-order 45 --no-deterministic-mode
model 1.3B
pretrain 1.3B 45
model 125M
pretrain 125M 35
pretrain 125M-graphs 35 "${graphs[@]}"
stage kernels 82 "$python" benchmarks/kernels.py --parts limits memory --minutes 1.15 --out "$W" ${rehearse:+--tiny}
# shellcheck disable=SC2016  # expanded by the inner shell
stage adopt 10 bash -c '"$0" kernels/tools/adopt.py "$1/kernels.json" && cp kernels/measured.json "$1"' "$python" "$W"
for tool in memcheck racecheck; do
  checked=(compute-sanitizer --tool "$tool" --error-exitcode 9)
  [ -z "$rehearse" ] || checked=()
  # an allocation for each tensor: the tool then sees the ends of tensors, not those of the allocator's blocks
  stage "$tool" 50 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${checked[@]}" "$python" kernels/tools/sanitize.py
done
finish
