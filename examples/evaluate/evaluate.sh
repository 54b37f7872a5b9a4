#!/usr/bin/env bash
# Evaluates a checkpoint with EleutherAI's lm-eval on a task made of your text, offline:
#   bash examples/evaluate/evaluate.sh CHECKPOINT TEXT.jsonl [OUT]
# TEXT.jsonl has one JSON object a line with the text under "text".
set -euo pipefail
load=$1 text=$(realpath "$2") out=${3:-evaluated}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1

# 1. The model as a folder that transformers loads.
rm -rf "$out/model"  # it may be another checkpoint's
python "$root/tools/convert_checkpoint.py" --load "$load" --to-huggingface "$out/model"

# 2. A task: the log-likelihood of each document.
mkdir -p "$out/tasks"
cat >"$out/tasks/own_text.yaml" <<END
task: own_text
dataset_path: json
dataset_kwargs: {data_files: {test: "$text"}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
END

# 3. lm-eval; more tasks of its catalog need their data on this machine.
python -m lm_eval --model hf --model_args "pretrained=$out/model,dtype=float32" \
    --include_path "$out/tasks" --tasks own_text --batch_size 1 --device "${DEVICE:-cpu}" --output_path "$out"
