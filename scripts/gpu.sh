#!/usr/bin/env bash
# Everything that needs a GPU, in one call, or the named parts of it where a call may take 10 minutes at most. In this order, so that the first ten minutes
# answer most:
#   smoke  a few iterations of every default path beside a CPU's: about 2 minutes
#   train  training speed of three models with our kernels, with torch's operators and of a plain loop with and without Liger's, beside what was predicted:
#          at most 8 minutes
#   kernels  the kernels beside PyTorch's and Liger's (where it is installed), against the device's limits: at most 9 minutes
#   tests  those marked gpu (parity of 2 to 4 ranks on one GPU among them), and those of the kernels, which run compiled where there is a GPU
#   sanitize  every kernel in small shapes under compute-sanitizer, which finds accesses out of bounds and races in shared memory: about 5 minutes at most
#   zero   ZeRO's memory and speed, offload, and others' experiments, on one GPU that plays one rank of 8: at most 8 minutes
#   runs   a 125M-parameter GPT for 40 iterations: dropout, recomputation, saves in the background and not; on two devices, where there are two, each way to
#          share it, with communication beside computation and without
#   tune   other configurations of the kernels than the frozen ones; only where it is named. It goes on with tuned.jsonl in FOLDER, which each call of
#          at most 9 minutes makes longer: kernels/tools/tune.py, which writes the table when asked
# Usage: bash scripts/gpu.sh [FOLDER for the results [PART ...]]. Takes the Python that has a CUDA torch: PYTHON=/path/to/python, default python3.
# What it lacks is said at once. Packages that a machine without a network lacks are downloaded elsewhere, for its Python, and carried in a folder
# (all of these: 4.4 MB; git ignores the folder):
#   python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
#     --platform manylinux_2_28_x86_64 -d .wheels liger-kernel==0.6.4 [xxhash PyYAML pytest pluggy iniconfig packaging Pygments hypothesis sortedcontainers]
# and unpacked there: python3 -m pip install -q --no-index --no-deps --target .wheels/site .wheels/*.whl && PYTHONPATH=$PWD/.wheels/site bash scripts/gpu.sh
# compute-sanitizer comes with CUDA's toolkit; where it is not on the PATH, its wheel for CUDA 13 (18 MB) has it, fetched and unpacked in the same way:
#   nvidia-cuda-sanitizer-api==13.5.25 with --platform manylinux_2_25_x86_64 added, then PATH=$PWD/.wheels/site/nvidia/cu13/bin:$PATH
# (for CUDA 12 nvidia-cuda-sanitizer-api-cu12==12.9.79, 9 MB: chmod +x .wheels/site/nvidia/cuda_sanitizer_api/bin/compute-sanitizer, and that folder).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
out="${1:-gpu-results}"
parts="${*:2}"
parts="${parts:-smoke train kernels tests sanitize zero runs}"
for part in $parts; do
  case "$part" in
    smoke | train | kernels | tests | sanitize | zero | runs | tune) ;;
    *) echo "$part: no part; they are smoke, train, kernels, tests, sanitize, zero, runs and tune" >&2 && exit 2 ;;
  esac
done
mkdir -p "$out"
"$python" - $parts <<'PYTHON' 2>&1 | tee "$out/versions.txt" || exit 2
import sys
from importlib.metadata import PackageNotFoundError, version
needed = ["torch", "triton", "numpy", "xxhash"] + ["pytest", "hypothesis", "PyYAML"] * bool({"smoke", "tests"} & set(sys.argv))
found, missing = [f"Python {sys.version.split()[0]}"], []
for name in [*needed, "liger-kernel"] if {"train", "kernels"} & set(sys.argv) else needed:
    try:
        found.append(f"{name} {version(name)}")
    except PackageNotFoundError:
        missing.append(name)
print(", ".join(found))
if missing == ["liger-kernel"]:
    print("no liger-kernel: it stays out of the tables (to have it, carry its wheel: see the top of scripts/gpu.sh)")
elif missing:
    sys.exit(f"{sys.executable} lacks {' '.join(missing)}: carry wheels, see the top of scripts/gpu.sh")
import torch
if not torch.cuda.is_available():
    sys.exit(f"no CUDA device: torch {torch.__version__} sees none")
print(f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
PYTHON

wanted() { [[ " $parts " == *" $1 "* ]]; }
failed=0
if wanted smoke; then
  "$python" -m pytest -m gpu tests/gpu/test_default_paths.py 2>&1 | tee "$out/smoke.txt" || failed=1
fi
if wanted train; then
  "$python" benchmarks/training_gpu.py --out "$out" 2>&1 | tee "$out/train.txt" || failed=1
fi
if wanted kernels; then
  "$python" benchmarks/kernels.py --out "$out" 2>&1 | tee "$out/kernels.txt" || failed=1
  echo "to let auto take what has won: $python kernels/tools/adopt.py $out/kernels.json"
fi
if wanted tests; then
  # shellcheck disable=SC2046  # only the files that hold such tests: the others' imports cost half a minute
  "$python" -m pytest -m gpu $(grep -rl --include='test_*.py' 'mark\.gpu' tests) 2>&1 | tee "$out/tests.txt" || failed=1
  # every launch that is new is compiled: several processes at once, each with its part of the tests
  shards=$(($(nproc) > 3 ? $(nproc) / 2 : 1))
  seq "$shards" | xargs -P "$shards" -I '{}' sh -c '"$1" -m pytest tests/kernels --shard "{}/$2" >"$3/tests-kernels-{}.txt" 2>&1' - "$python" "$shards" "$out" || failed=1
  grep -hE "^(FAILED|ERROR)|passed|failed" "$out"/tests-kernels-*.txt | tee "$out/tests-kernels.txt"
fi
if wanted sanitize; then
  if ! command -v compute-sanitizer >/dev/null; then
    echo "sanitize: skipped, no compute-sanitizer on the PATH (see the top of scripts/gpu.sh)" | tee "$out/sanitize.txt"
  elif ! "$python" kernels/tools/sanitize.py >"$out/sanitize.txt" 2>&1; then  # compiles what the two below run, too
    tail "$out/sanitize.txt"
    failed=1
  else
    for case in memcheck racecheck "memcheck gluon"; do
      echo "== $case"
      read -r tool which <<<"$case"
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 150 compute-sanitizer --tool "$tool" "$python" kernels/tools/sanitize.py ${which:+"$which"}
    done 2>&1 | tee -a "$out/sanitize.txt"
    if grep -q "Device not supported" "$out/sanitize.txt"; then
      echo "sanitize: skipped, compute-sanitizer does not take this machine's GPU" | tee -a "$out/sanitize.txt"
    elif grep -q "SUMMARY: [1-9]" "$out/sanitize.txt" || [ "$(grep -c "calls on cuda" "$out/sanitize.txt")" != 4 ]; then
      failed=1  # something was found, or a run did not come to its end
    fi
  fi
fi
if wanted tune; then
  "$python" kernels/tools/tune.py --out "$out/tuned.jsonl" 2>&1 | tee -a "$out/tune.txt" || failed=1
fi
if wanted zero; then
  "$python" benchmarks/zero_gpu.py --out "$out" 2>&1 | tee "$out/zero.txt" || failed=1
fi
wanted runs || exit "$failed"

model=(--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --micro-batch-size 16 --global-batch-size 32 --mock-data
  --tokenizer-type NullTokenizer --vocab-size 50256 --bf16 --lr 6e-4 --train-iters 40 --log-interval 10 --eval-iters 0)
for case in "dropout-0 --hidden-dropout 0 --attention-dropout 0" "dropout-0.1" \
  "recompute --hidden-dropout 0 --attention-dropout 0 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"; do
  read -r name flags <<<"$case"
  # shellcheck disable=SC2086  # the flags of a case are words
  "$python" pretrain_gpt.py "${model[@]}" ${flags:-} --metrics-file "$out/$name.jsonl" 2>&1 | tee "$out/$name.txt" || failed=1
done
for mode in "" --async-save; do  # the log says how long training waited for each save
  # shellcheck disable=SC2086
  "$python" pretrain_gpt.py "${model[@]}" --hidden-dropout 0 --attention-dropout 0 --save "$out/checkpoints" --save-interval 10 --save-keep-last 1 ${mode:-} \
    --metrics-file "$out/save$mode.jsonl" 2>&1 | tee "$out/save$mode.txt" || failed=1
  rm -rf "$out/checkpoints"
done

[ "$("$python" -c 'import torch; print(torch.cuda.device_count())')" -ge 2 ] || exit "$failed"
for case in "dp2" "dp2-serial --no-overlap-grad-reduce" "tp2 --tensor-model-parallel-size 2" "tp2-sp --tensor-model-parallel-size 2 --sequence-parallel" \
  "tp2-serial --tensor-model-parallel-size 2 --no-tp-comm-overlap" \
  "tp2-sp-serial --tensor-model-parallel-size 2 --sequence-parallel --no-tp-comm-overlap" \
  "pp2 --pipeline-model-parallel-size 2 --micro-batch-size 4" "pp2-zero-bubble --pipeline-model-parallel-size 2 --micro-batch-size 4 --pipeline-schedule zero-bubble" \
  "pp2-v --pipeline-model-parallel-size 2 --micro-batch-size 4 --pipeline-schedule zero-bubble-v" \
  "pp2-interleaved --pipeline-model-parallel-size 2 --micro-batch-size 4 --num-virtual-stages-per-pipeline-rank 2"; do
  read -r name flags <<<"$case"
  # shellcheck disable=SC2086
  "$python" -m torch.distributed.run --nproc-per-node 2 pretrain_gpt.py "${model[@]}" --hidden-dropout 0 --attention-dropout 0 ${flags:-} \
    --pipeline-timeline "$out/$name.timeline.json" --metrics-file "$out/$name.jsonl" 2>&1 | tee "$out/$name.txt" || failed=1
done
exit "$failed"
