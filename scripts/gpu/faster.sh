#!/usr/bin/env bash
# Where the step of an 8B model's layers can become faster, at most 8 minutes: its profile, the rates of its GEMMs and attention, one
# micro-batch instead of four, attention against torch's kernels and what `auto` takes after it, other configurations of attention. To
# continue these in a later window, unpack tuned.jsonl of all.tgz into WORK. Try one change a window. Usage and environment: common.sh.
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
# the rows of Llama 3 8B; each takes up to a minute, most of it to compile
stage tune 150 "$python" kernels/tools/tune.py --only "128 causal" --out "$W/tuned.jsonl" --minutes 1.4 ${rehearse:+--tiny}
finish
