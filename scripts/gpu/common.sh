# shellcheck shell=bash
# Shared by the scripts of this folder. A script sources this file, calls `begin NAME "$@"`, then `stage` or `pretrain` once for each
# stage, most valuable first, and `finish`. Every stage is a separate process with a limit in seconds; one that fails or is killed stops
# no other, and the results of a stage are in OUT before the next begins.
#   OUT         folder of results (gpu-results/NAME): report.txt to read, rows.jsonl, NAME.json, all.tgz with logs, traces and JSON files
#   WORK        folder of logs and scratch files (a new one in TMPDIR)
#   PYTHON      the interpreter whose torch sees the GPU (python3)
#   REHEARSE=1  tiny sizes on a CPU and limits 8 times as long, to try the scripts
#   LIST=1      print name, limit and command of every stage, separated by tabs, and run nothing
# A stage's results are the JSON objects it prints, one a line, and the rows of its metrics file.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
python="${PYTHON:-python3}"
rehearse="${REHEARSE:-}"
MAX_ARCHIVE=$((15 << 20))  # bytes; traces are left out of a larger all.tgz

begin() {  # NAME [STAGE ...]: only these stages, default all
  script=$1
  chosen=" ${*:2} "
  OUT="${OUT:-gpu-results/$script}"
  if [ -n "${LIST:-}" ]; then
    W=WORK
    stage facts 20 "$python" scripts/gpu/facts.py
    return
  fi
  W="${WORK:-$(mktemp -d "${TMPDIR:-/tmp}/gpu-$script.XXXXXX")}"
  mkdir -p "$OUT" "$W"
  OUT="$(cd "$OUT" && pwd)"
  rm -f "$OUT/$script.json"
  : >"$OUT/report.txt"
  : >"$OUT/rows.jsonl"
  export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/gpu-triton}"
  export PYTHONPATH="$PWD:$PWD/.wheels/site${PYTHONPATH:+:$PYTHONPATH}" OUT W
  export CUBLAS_WORKSPACE_CONFIG="${CUBLAS_WORKSPACE_CONFIG:-:4096:8}"  # as pretrain_gpt.py sets it
  watcher=
  if [ -z "$rehearse" ] && command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu --format=csv -lms 500 >"$W/smi.csv" 2>&1 &
    watcher=$!
    trap 'kill "$watcher" 2>/dev/null' EXIT
  fi
  stage facts 20 "$python" scripts/gpu/facts.py
}

stage() {  # NAME LIMIT COMMAND...
  local name=$1 limit=$2 begun=$SECONDS code
  shift 2
  if [ -n "${LIST:-}" ]; then
    printf '%s\t%s' "$name" "$limit"
    printf '\t%s' "$@"
    printf '\n'
    return
  fi
  [[ "$chosen" =~ ^\ *$ || "$name" == facts || "$chosen" == *" $name "* ]] || return 0
  [ -z "$rehearse" ] || limit=$((limit * 8))
  timeout -k 3 "$limit" "$@" >"$W/$name.log" 2>&1
  code=$?
  outcome "$name" "$limit" "$code" $((SECONDS - begun))
}

outcome() {  # NAME LIMIT CODE SECONDS: one line in the report, with the last lines of a failure; rows and archive
  local name=$1 limit=$2 code=$3 seconds=$4 state="exit code $3" rows
  [ "$code" -ne 0 ] || state="done"
  [ "$code" -ne 124 ] && [ "$code" -ne 137 ] || state="killed: over its limit of $limit s"
  {
    echo "== $name: $state after $seconds s, at $SECONDS s"
    grep -hE "MFU|the check at start failed" "$W/$name.log" | tail -n 3 | cut -c1-400
    grep -h '^[{#|]' "$W/$name.log" | tail -n 50 | cut -c1-240
    [ "$code" -eq 0 ] || tail -n 12 "$W/$name.log" | cut -c1-300
  } | tee -a "$OUT/report.txt"
  echo "{\"stage\": \"$name\", \"exit_code\": $code, \"seconds\": $seconds, \"limit\": $limit}" >>"$OUT/rows.jsonl"
  for rows in "$W/$name.log" "$W/$name.rows.jsonl"; do
    [ ! -e "$rows" ] || sed -n "s/^{\(.*}\)$/{\"stage\": \"$name\", \"row\": {\1}/p" "$rows" >>"$OUT/rows.jsonl"
  done
  pack
}

pack() {  # logs, traces and JSON files into all.tgz
  local small=(--exclude='*.pyc' --exclude='*.pt' --exclude=gpu-checkpoints)
  tar -C "$W" "${small[@]}" -czf "$OUT/all.tgz" . 2>/dev/null
  [ "$(stat -c %s "$OUT/all.tgz")" -le "$MAX_ARCHIVE" ] || tar -C "$W" "${small[@]}" --exclude='*trace*' -czf "$OUT/all.tgz" . 2>/dev/null
}

finish() {  # the record NAME.json of all results in OUT
  [ -z "${LIST:-}" ] || return 0
  "$python" scripts/gpu/record.py "$script" "$OUT" 2>&1 | tee -a "$OUT/report.txt"
  echo "done after $SECONDS s; results in $OUT" | tee -a "$OUT/report.txt"
}

llama=(--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
  --hidden-dropout 0 --attention-dropout 0 --mock-data --tokenizer-type NullTokenizer --bf16 --lr 1e-4 --eval-iters 0)
# flags for the scripts that source this file
# shellcheck disable=SC2034
{
  torch_operators=(--norm-backend torch --rotary-backend torch --activation-backend torch --dropout-backend torch
    --cross-entropy-backend torch --grad-norm-backend torch --attention-backend sdpa --adam-implementation torch-fused)
  full_recompute=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1)
  fp8=(--fp8-format hybrid --fp8-min-width 256)
  graphs=(--cuda-graphs)
  many_steps=(--train-iters 300 --log-interval 10)
}
[ -z "$rehearse" ] || fp8[3]=32 graphs=() many_steps=(--train-iters 15 --log-interval 5)

model() {  # NAME [MICRO_BATCHES]: the flags of a model and of 15 steps of 4 micro-batches, in the array `model`
  local layers hidden ffn heads groups vocab seq samples count=${2:-4} more=()
  case "$1" in
    10M) layers=6 hidden=256 ffn=688 heads=8 groups=8 vocab=8191 seq=512 samples=8 ;;
    125M) layers=12 hidden=768 ffn=2048 heads=12 groups=12 vocab=50303 seq=1024 samples=16 ;;
    1.3B) layers=24 hidden=2048 ffn=5504 heads=16 groups=16 vocab=50303 seq=2048 samples=4 ;;
    8B-layers) layers=6 hidden=4096 ffn=14336 heads=32 groups=8 vocab=128255 seq=8192 samples=1 ;;  # of Llama 3 8B, with its head
    experts)  # of Qwen3 30B-A3B
      layers=2 hidden=2048 ffn=6144 heads=32 groups=4 vocab=50303 seq=4096 samples=2
      more=(--kv-channels 128 --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768)
      ;;
    mla)  # of DeepSeek V2 Lite, dense
      layers=12 hidden=2048 ffn=10944 heads=16 groups=16 vocab=50303 seq=4096 samples=2
      more=(--multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128)
      ;;
    *) echo "model $1 is not one of 10M, 125M, 1.3B, 8B-layers, experts and mla" >&2 && exit 2 ;;
  esac
  if [ -n "$rehearse" ]; then
    layers=2 hidden=128 ffn=256 heads=4 groups=2 vocab=127 seq=128 samples=1  # fp8 takes multiples of 128
    [ "$1" != experts ] || more=(--num-experts 4 --moe-ffn-hidden-size 32)
  fi
  [ "$1" = mla ] || more+=(--group-query-attention --num-query-groups "$groups")
  model=("${llama[@]}" --num-layers "$layers" --hidden-size "$hidden" --ffn-hidden-size "$ffn" --num-attention-heads "$heads"
    "${more[@]}" --vocab-size "$vocab" --seq-length "$seq" --micro-batch-size "$samples" --global-batch-size $((samples * count))
    --train-iters 15 --log-interval 5)
}

pretrain() {  # NAME LIMIT FLAGS...: a run of `model`
  local name=$1 limit=$2
  shift 2
  stage "$name" "$limit" "$python" pretrain_gpt.py "${model[@]}" --metrics-file "$W/$name.rows.jsonl" "$@"
}

profile() {  # NAME LIMIT FLAGS...: a run whose last steps are profiled, then its kernels by time
  local name=$1 limit=$2
  shift 2
  pretrain "$name" "$limit" --profile --profile-step-start 12 --profile-step-end 14 --profile-dir "$W/$name.trace" "$@"
  stage "$name-kernels" 15 "$python" scripts/gpu/kernel_table.py "$W/$name.trace/rank-0.trace.json" 2
}
