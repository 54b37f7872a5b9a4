# Sourced by train.sbatch. `preset NAME` sets three variables, or prints which names there are and returns 1:
#   model       flags of pretrain_gpt.py: the published shape, and learning rate and batch as far as they are published
#   vocabulary  tokens of the published tokenizer
#   fits        micro-batch, parallel sizes and recompute with which it fits GPUs of 80 GB (LAYOUT in train.sbatch replaces them)
#
# GPT-3: Brown et al. 2020, table 2.1 and appendix B (Adam 0.9/0.95, clipping at 1, cosine to a tenth, 375M of 300B tokens of warm-up, weight
# decay 0.1, sequences of 2048). Two rows of that table do not multiply out: XL has 16 heads of 128 here (24 there), 13B a width of 5120 (5140 there).
# Activation and dropout are not published: GELU's tanh form as in GPT-2, no dropout.
# Llama: config.json of Llama-3.2-1B and of Llama-3.1-8B, -70B, -405B; peak learning rates from Dubey et al. 2024, table 3 (the 1B model was
# distilled: its rate is ours), schedule and first batch of 4M tokens from section 3.4. Their rotary scaling came in with long sequences:
# --no-use-rope-scaling trains as they began, at 8192.
# Speedrun: the model, batch and schedule that modded-nanogpt's track 3 holds fixed, as far as flags can express them, for a run of 5,625 steps of
# 524,288 tokens; docs/recipe.md lists what they cannot.

gpt3_common=(--seq-length 2048 --activation gelu-tanh --hidden-dropout 0 --attention-dropout 0 --bf16
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1 --lr-decay-style cosine --lr-warmup-fraction 0.00125)
llama_common=(--seq-length 8192 --max-position-embeddings 131072 --position-embedding-type rope --rotary-base 500000 --use-rope-scaling
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear --group-query-attention --num-query-groups 8
    --hidden-dropout 0 --attention-dropout 0 --bf16 --global-batch-size 512
    --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1 --lr-decay-style cosine --lr-warmup-fraction 0.0067)

speedrun_124m=(--num-layers 12 --hidden-size 768 --num-attention-heads 6 --seq-length 1024 --normalization RMSNorm --qk-layernorm
    --activation squared-relu --position-embedding-type rope --rotary-percent 0.5 --rotary-base 1280 --untie-embeddings-and-output-weights
    --final-logit-softcapping 15 --hidden-dropout 0 --attention-dropout 0 --bf16 --global-batch-size 512
    --lr 1.5e-3 --min-lr 0 --lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-samples 2016000 --lr-warmup-samples 128000
    --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-15 --weight-decay 0.1 --clip-grad 1)

# gpt3 LAYERS HIDDEN HEADS BATCH LR MIN_LR
gpt3() {
    vocabulary=50257
    model=(--num-layers "$1" --hidden-size "$2" --num-attention-heads "$3" "${gpt3_common[@]}" --global-batch-size "$4" --lr "$5" --min-lr "$6")
}

# llama LAYERS HIDDEN FFN HEADS ROPE_FACTOR LR MIN_LR
llama() {
    vocabulary=128256
    model=(--num-layers "$1" --hidden-size "$2" --ffn-hidden-size "$3" --num-attention-heads "$4" "${llama_common[@]}"
        --rope-scaling-factor "$5" --lr "$6" --min-lr "$7")
}

# split TP PP MICRO_BATCH [full]: tensor and sequence parallelism over TP ranks, PP pipeline ranks with stages of equal cost, and full recompute.
# ZeRO-1 takes no more memory and no more bytes on the wire than none.
split() {
    fits=(--micro-batch-size "$3" --tensor-model-parallel-size "$1" --zero-stage 1)
    [ "$1" -eq 1 ] || fits+=(--sequence-parallel)
    [ "$2" -eq 1 ] || fits+=(--pipeline-model-parallel-size "$2" --pipeline-model-parallel-layout auto)
    [ -z "${4:-}" ] || fits+=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1)
}

preset() {
    case $1 in
        gpt3-125m) gpt3 12 768 12 256 6e-4 6e-5 && split 1 1 8 ;;
        gpt3-350m) gpt3 24 1024 16 256 3e-4 3e-5 && split 1 1 8 ;;
        gpt3-760m) gpt3 24 1536 16 256 2.5e-4 2.5e-5 && split 1 1 4 ;;
        gpt3-1.3b) gpt3 24 2048 16 512 2e-4 2e-5 && split 1 1 4 ;;
        gpt3-2.7b) gpt3 32 2560 32 512 1.6e-4 1.6e-5 && split 1 1 2 ;;
        gpt3-6.7b) gpt3 32 4096 32 1024 1.2e-4 1.2e-5 && split 2 1 2 ;;
        gpt3-13b) gpt3 40 5120 40 1024 1e-4 1e-5 && split 4 1 2 ;;
        gpt3-175b) gpt3 96 12288 96 1536 6e-5 6e-6 && split 8 8 1 ;;
        llama-1b) llama 16 2048 8192 32 32 3e-4 3e-6 && split 1 1 1 && model+=(--rope-low-freq-factor 1 --rope-high-freq-factor 4) ;;
        llama-8b) llama 32 4096 14336 32 8 3e-4 3e-6 && split 4 1 1 && model+=(--untie-embeddings-and-output-weights) ;;
        llama-70b) llama 80 8192 28672 64 8 1.5e-4 1.5e-6 && split 8 4 1 && model+=(--untie-embeddings-and-output-weights) ;;
        llama-405b) llama 126 16384 53248 128 8 8e-5 8e-7 && split 8 16 1 full && model+=(--untie-embeddings-and-output-weights) ;;
        speedrun-124m) vocabulary=50257 model=("${speedrun_124m[@]}") && split 1 1 64 ;;
        *)
            echo "no preset $1: choose gpt3-125m, -350m, -760m, -1.3b, -2.7b, -6.7b, -13b, -175b, llama-1b, -8b, -70b, -405b or speedrun-124m" >&2
            return 1 ;;
    esac
}
