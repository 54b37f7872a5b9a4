#!/usr/bin/env bash
# Memory, at most 8 minutes: a background save of an 8B model's layers against a copy of its shard to the host, recomputation, offload of
# activations and of the optimizer, every stage of ZeRO against the plan. The peak of every run is held against the plan.
# Usage and environment: common.sh.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin memory "$@"
model 8B-layers
stage limits 25 "$python" scripts/gpu/timed.py limits
# two layers, since two checkpoints of 20 GB must fit; into memory where it takes them, so that no disk is measured
folder="$W"
free=$(df --output=avail -B G /dev/shm 2>/dev/null | tail -n 1 | tr -dc 0-9)
[ -n "$rehearse" ] || [ "${free:-0}" -lt 60 ] || folder=/dev/shm
whole=("${model[@]}")
model=("${whole[@]}" --num-layers 2)
pretrain save 80 --save "$folder/gpu-checkpoints" --save-interval 10 --save-keep-last 1 --async-save
[ -n "${LIST:-}" ] || rm -rf "$folder/gpu-checkpoints"
model=("${whole[@]}")
pretrain recompute-full 45 "${full_recompute[@]}"
pretrain recompute-selective 45 --recompute-granularity selective
pretrain activation-offload 45 --activation-offload
pretrain activation-offload-full 45 "${full_recompute[@]}" --activation-offload
pretrain optimizer-offload 55 --optimizer-cpu-offload
stage zero 95 "$python" benchmarks/zero_gpu.py --parts stages --minutes 0.75 --patience 40 --out "$W" ${rehearse:+--tiny}
stage report 15 "$python" tools/report.py "$W/recompute-full.rows.jsonl" --output "$W/report.html"
finish
