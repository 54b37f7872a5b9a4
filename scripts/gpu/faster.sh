#!/usr/bin/env bash
# Where the step of an 8B model's layers can become faster, at most 8 minutes: its profile, the rates of its GEMMs and attention, one
# micro-batch instead of four, attention against torch's kernels and what `auto` takes after it, other configurations of attention (a
# later call with the same WORK continues tuned.jsonl). Try one change a window. Usage and environment: common.sh.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin faster "$@"
model 8B-layers
profile before 90
stage timed 50 "$python" scripts/gpu/timed.py gemms attention
model 8B-layers 1
pretrain one-micro-batch 40
stage attention 90 "$python" benchmarks/kernels.py --parts limits attention --minutes 1.2 --out "$W" ${rehearse:+--tiny}
# shellcheck disable=SC2016  # expanded by the inner shell
stage adopt 10 bash -c '"$0" kernels/tools/adopt.py "$1/kernels.json" && cp kernels/measured.json "$1"' "$python" "$W"
for kernel in forward dq dkv; do
  stage "tune-$kernel" 50 "$python" kernels/tools/tune.py --only "attention $kernel" --out "$W/tuned.jsonl" --minutes 0.6 ${rehearse:+--tiny}
done
finish
