#!/usr/bin/env bash
# What only a GPU shows of the other features, at most 8 minutes: 8-bit floats against bf16 in speed and in loss, equal bits of two runs,
# experts, latent attention, two context-parallel ranks that share the GPU, host time of a layer. Usage and environment: common.sh.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin features "$@"
model 8B-layers
for recipe in tensorwise rowwise blockwise; do
  pretrain "fp8-$recipe" 40 "${fp8[@]}" --fp8-recipe "$recipe"
done
model 10M 1
pretrain 10M-bf16 25 "${many_steps[@]}"
pretrain 10M-fp8 25 "${many_steps[@]}" "${fp8[@]}"
model 125M 1
pretrain 125M-bf16 35 "${many_steps[@]}"
pretrain 125M-fp8 35 "${many_steps[@]}" "${fp8[@]}"
pretrain 125M-again 35 "${many_steps[@]}"
stage equal-bits 10 "$python" tools/compare_runs.py "$W/125M-bf16.rows.jsonl" "$W/125M-again.rows.jsonl"
# one sample of 128 tokens a step: the host is slower than the GPU
host=(--seq-length 128 --micro-batch-size 1 --global-batch-size 1 --train-iters 60)
pretrain host 25 "${host[@]}"
pretrain host-graphs 25 "${host[@]}" "${graphs[@]}"
model experts
pretrain experts 35
model mla
pretrain mla 35
model 1.3B 1
stage cp2 45 "$python" -m torch.distributed.run --standalone --nproc-per-node 2 pretrain_gpt.py "${model[@]}" --context-parallel-size 2 \
  --distributed-backend gloo --metrics-file "$W/cp2.rows.jsonl"
finish
