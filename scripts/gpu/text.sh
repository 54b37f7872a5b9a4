#!/usr/bin/env bash
# A 125M GPT trained on 33M tokens of text, at most 8 minutes: Python sources that are installed on the machine, the first steps again on
# its CPU in fp32 and how far the two are apart, generated text, and the page of the run. Usage and environment: common.sh.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
begin text "$@"
megabytes=140 vocab=50304 iterations=2014
[ -z "$rehearse" ] || megabytes=1 vocab=512 iterations=20
text="$W/gpu-checkpoints"  # which does not travel back
model 125M 1
model+=(--train-iters "$iterations" --log-interval 19 --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --lr-warmup-fraction 0.05
  --weight-decay 0.1 --adam-beta2 0.95 --no-mock-data --data-path "$text/text_text_document" --split 98,2,0 --eval-iters 10
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$text/tokenizer.json" --vocab-size "$vocab")
first=(--exit-interval 3 --log-interval 1)
stage corpus 57 "$python" scripts/gpu/corpus.py "$text" "$megabytes" "$vocab"
stage tokens 45 "$python" tools/preprocess_data.py --input "$text/text.jsonl" --output-prefix "$text/text" --append-eod \
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$text/tokenizer.json"
# an exit in time saves, too
pretrain train 170 --save "$text/run" --exit-duration-in-mins 2.2
# shellcheck disable=SC2016  # expanded by the inner shell; a JSON object for the record
in_json='"$0" -c "import json, sys; print(json.dumps({\"text\": sys.stdin.read()}))"'
for start in def class; do
  # shellcheck disable=SC2016
  stage "generate-$start" 19 bash -o pipefail -c "\"\$0\" tools/generate.py \"\$@\" | $in_json" "$python" --load "$text/run" \
    --prompt "$start " --num-tokens 120 --temperature 0.8
done
stage report 10 "$python" tools/report.py "$W/train.rows.jsonl" --output "$W/report.html"
pretrain first-steps 30 "${first[@]}"
# shellcheck disable=SC2016  # one word, so that stages.py does not predict it as a run on a GPU
stage on-cpu 100 bash -c 'CUDA_VISIBLE_DEVICES= exec "$0" pretrain_gpt.py "$@"' "$python" "${model[@]}" --no-bf16 "${first[@]}" \
  --metrics-file "$W/on-cpu.rows.jsonl"
stage compare 10 "$python" tools/compare_runs.py "$W/first-steps.rows.jsonl" "$W/on-cpu.rows.jsonl" --rtol 0.02
finish
