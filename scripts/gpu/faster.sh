#!/usr/bin/env bash
# One experiment at a time on the step of an 8B model's layers, at most 8 minutes: its profile, then the rates of GEMMs and attention,
# then other configurations of attention (a later call continues tuned.jsonl where WORK is the same). Each attempt and its result goes
# into docs/results/gpu/attempts.md. Usage and environment: common.sh.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin faster "$@"
model 8B-layers
profile before 90
stage timed 50 "$python" scripts/gpu/timed.py gemms attention
model 8B-layers 1
pretrain one-micro-batch 40
for kernel in forward dq dkv; do
  stage "tune-$kernel" 85 "$python" kernels/tools/tune.py --only "attention $kernel" --out "$W/tuned.jsonl" --minutes 1.2 ${rehearse:+--tiny}
done
finish
