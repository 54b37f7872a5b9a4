"""Launch scripts of other projects' runs and of forks as data, in addition to `launch_scripts.py`.

Paths are replaced by small ones, lists of data files cut to three, and a DeepSpeed file has the
usual sections.
"""

from __future__ import annotations

from typing import Any

from launch_scripts import LLAMA_FILE, Script, template

TIMERS = "--log-timers-to-tensorboard: "
STATES = "--log-optimizer-states-to-tensorboard: "
LOSS_SCALE = "--deepspeed_config deepspeed.json: fp16.loss_scale = 0: contradicts --loss-scale 12"
BLOOM: dict[str, Any] = {
    "refused": (
        "--position-embedding-type alibi: ALiBi is not supported",
        "--embed-layernorm: a norm or a scale after the embedding is not supported",
        "--train-weighted-split-paths-path data.txt: give --train-data-path",
        "--valid-weighted-split-paths-path data.txt: give --train-data-path",
        "--data-path PREFIX is required",
    ),
    "drop": "--position-embedding-type --embed-layernorm --train-weighted-split-paths-path "
    "--valid-weighted-split-paths-path",
    "add": "--data-path corpus_text_document",
    "reason": "ALiBi, a norm after the embedding, and ranges of a file's documents",
}


def bf16(batch: int, stage: int) -> dict[str, Any]:
    """The DeepSpeed file of a run in bf16."""
    sizes = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": 1}
    return LLAMA_FILE | sizes | {"zero_optimization": {"stage": stage}}


# the same in NVIDIA's repository and in ROCm's
MIXTRAL = """
        --use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings
        32768 --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads
        32 --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization
        RMSNorm --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights
        --group-query-attention --num-query-groups 8 --no-masked-softmax-fusion
        --no-position-embedding --rotary-base 1000000 --num-experts 8 --moe-router-topk 2
        --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
        --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce
        --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --data-path
        corpus_text_document --split 99990,8,2 --micro-batch-size 1 --global-batch-size 256 --lr
        1e-4 --train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr
        1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0 --bf16
        --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4
        --expert-model-parallel-size 8 --use-distributed-optimizer --sequence-parallel
        --log-interval 1 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --save ckpt
        --load ckpt --tensorboard-dir tb --no-load-optim --no-load-rng
        """
PUBLISHED = (
    Script(
        "argonne-lcf: ALCF/helpers.sh",
        """
        --use-checkpoint-opt_param-scheduler --lr 0.0002 --lr-decay-style cosine
        --lr-warmup-fraction 0.05 --swiglu --hidden-dropout 0 --attention-dropout 0
        --normalization rmsnorm --disable-bias-linear --no-query-key-layer-scaling
        --use-rotary-position-embeddings --untie-embeddings-and-output-weights
        --num-key-value-heads 8 --ffn-hidden-size 11008 --use-flash-attn-builder
        --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model
        --log-timers-to-tensorboard --log-optimizer-states-to-tensorboard --tensorboard-dir tb
        --deepspeed --no-pipeline-parallel --deepspeed_config deepspeed.json --zero-stage 1
        --bf16 --accumulate-allreduce-grads-in-fp32 --adjust-word-embedding-init --adam-beta1
        0.9 --adam-beta2 0.95 --adam-eps 0.00001 --clip-grad 1.0 --data-cache-path cache
        --data-file-list data.txt --distributed-backend ccl --ds-sequence-parallel-size 1
        --eval-interval 100 --eval-iters 20 --global-batch-size 128 --hidden-size 4096
        --init-method-std .009848 --log-interval 1 --load ckpt --max-position-embeddings 65536
        --micro-batch-size 1 --no-bias-gelu-fusion --no-bias-dropout-fusion
        --no-masked-softmax-fusion --no-gradient-accumulation-fusion --num-layers 32
        --num-attention-heads 32 --optimizer adamw --pipeline-model-parallel-size 1
        --rotary-position-embeddings-theta 50000 --save ckpt --seq-length 4096 --split 990,10,0
        --shuffle-sample-in-corpus --save-interval 50 --train-iters 8914528
        --tensor-model-parallel-size 1 --timing-log-level 1 --weight-decay 0.1
        --word-embedding-init-std 0.632455532
        """,
        8,
        bf16(128, 1),
        refused=("--adjust-word-embedding-init: ", "--word-embedding-init-std 0.632455532: "),
        drop="--adjust-word-embedding-init --word-embedding-init-std",
        reason="a standard deviation for the embedding alone",
        not_done=(STATES,),
    ),
    Script(
        "bigcode-project: examples/pretrain_gpt_1B_santacoder.sh",
        """
        --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --recompute-activations
        --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --attention-head-type
        multiquery --init-method-std 0.022 --seq-length 2048 --max-position-embeddings 2048
        --attention-dropout 0.1 --hidden-dropout 0.1 --micro-batch-size 2 --global-batch-size
        192 --lr 0.0002 --train-iters 300000 --lr-decay-iters 600000 --lr-decay-style cosine
        --lr-warmup-fraction 0.02 --weight-decay .1 --adam-beta2 .95 --clip-grad 1.0 --fp16
        --log-interval 10 --save-interval 4000 --eval-interval 200 --eval-iters 10
        --initial-loss-scale 65536 --fim-rate 0.5 --tokenizer-type TokenizerFromFileWithFIM
        --tokenizer-file tokenizer.model --save ckpt --load ckpt --data-path
        corpus_text_document --tensorboard-dir tb
        """,
        8,
        refused=("--tokenizer-type TokenizerFromFileWithFIM: ", "--fim-rate 0.5: "),
        drop="--tokenizer-type --fim-rate",
        add="--tokenizer-type HuggingFaceTokenizer",
        reason="fill-in-the-middle",
    ),
    Script(
        "bigscience-workshop: train/tr1-13B-base/tr1-13B-round1.slurm",
        """
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --num-layers 40
        --hidden-size 5120 --ffn-hidden-size 20480 --num-attention-heads 32 --seq-length 2048
        --max-position-embeddings 2048 --micro-batch-size 1 --rampup-batch-size 16 16 5_000_000
        --global-batch-size 1024 --train-samples 300_000_000 --vocab-file gpt2-vocab.json
        --merge-file gpt2-merges.txt --loss-scale 12 --clip-grad 1.0 --fp16
        --checkpoint-activations --seed 42 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.999
        --adam-eps 1e-8 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-decay-samples
        126_953_125 --lr-warmup-samples 216_320 --clip-grad 1.0 --weight-decay 1e-1
        --exit-duration-in-mins 1190 --log-interval 10 --save-interval 1500 --eval-interval 1000
        --eval-iters 5 --codecarbon-dir tb --tensorboard-dir tb --tensorboard-queue-size 5
        --log-timers-to-tensorboard --log-batch-size-to-tensorboard
        --log-validation-ppl-to-tensorboard --save ckpt --load ckpt --data-path
        corpus_text_document --data-impl mmap --split 949,50,1 --distributed-backend nccl
        --deepspeed --deepspeed_config deepspeed.json --zero-stage 1
        --deepspeed-activation-checkpointing
        """,
        8,
        template(1024, 1, micro=1, power=12),
        refused=(LOSS_SCALE,),
        drop="--loss-scale",
        reason="a static loss scale in the flags and a dynamic one in the file",
        not_done=("--codecarbon-dir: ", TIMERS),
    ),
    Script(
        "bigscience-workshop: train/tr11-176B-ml/smaller_models/tr11b-1B3-ml.slurm",
        """
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --pp-partition-method
        'type:transformer|embedding' --num-layers 24 --hidden-size 2048 --num-attention-heads 16
        --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1
        --rampup-batch-size 192 16 9_765_625 --global-batch-size 512 --train-samples 220_000_000
        --tokenizer-type PretrainedFromHF --tokenizer-name-or-path tokenizer.model
        --init-method-std 0.0048 --embed-layernorm --fp16 --seed 42 --position-embedding-type
        alibi --checkpoint-activations --abort-on-unmet-fused-kernel-constraints
        --pad-vocab-size-to 250880 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95
        --adam-eps 1e-8 --lr 2e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-decay-samples
        200_000_000 --lr-warmup-samples 183_105 --clip-grad 1.0 --weight-decay 1e-1
        --exit-duration-in-mins 5990 --log-interval 1 --save-interval 250 --eval-interval 1000
        --eval-iters 1 --tensorboard-dir tb --tensorboard-queue-size 5
        --log-timers-to-tensorboard --log-batch-size-to-tensorboard
        --log-validation-ppl-to-tensorboard --save ckpt --load ckpt
        --train-weighted-split-paths-path data.txt --valid-weighted-split-paths-path data.txt
        --data-impl mmap --distributed-backend nccl --deepspeed --deepspeed_config
        deepspeed.json --zero-stage 0 --deepspeed-activation-checkpointing
        """,
        8,
        template(512, 0, micro=1, power=12),
        **BLOOM,
        not_done=(TIMERS,),
    ),
    Script(
        "bigscience-workshop: train/tr13-mtf/smaller_models/tr13f-6B3-mtf.slurm",
        """
        --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --pp-partition-method
        'type:transformer|embedding' --num-layers 30 --hidden-size 4096 --num-attention-heads 32
        --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 4
        --global-batch-size 2048 --train-samples 6_348_800 --tokenizer-type PretrainedFromHF
        --tokenizer-name-or-path tokenizer.model --init-method-std 0.0048 --embed-layernorm
        --fp16 --seed 42 --position-embedding-type alibi --checkpoint-activations
        --abort-on-unmet-fused-kernel-constraints --kill-switch-path stop --pad-vocab-size-to
        250880 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --lr 2e-5
        --lr-decay-style constant --lr-warmup-samples 0 --clip-grad 1.0 --weight-decay 1e-4
        --exit-duration-in-mins 5990 --log-interval 1 --save-interval 1000 --eval-interval 1000
        --eval-iters 10 --tensorboard-dir tb --tensorboard-queue-size 5
        --log-timers-to-tensorboard --log-batch-size-to-tensorboard
        --log-validation-ppl-to-tensorboard --save ckpt --load ckpt
        --train-weighted-split-paths-path data.txt --valid-weighted-split-paths-path data.txt
        --dataloader-type single --data-impl mmap --distributed-backend nccl --deepspeed
        --deepspeed_config deepspeed.json --zero-stage 1 --deepspeed-activation-checkpointing
        """,
        8,
        template(2048, 1, micro=4, power=12),
        **BLOOM,
        not_done=("--kill-switch-path: ", TIMERS),
    ),
    Script(
        "HabanaAI: scripts/run_llama.sh",
        """
        --deepspeed --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers
        32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --seq-length 8192
        --micro-batch-size 1 --global-batch-size 2048 --train-iters 937500 --log-interval 10
        --eval-iters 100 --eval-interval 1000 --data-path corpus_text_document --optimizer
        fusedadamw --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-5 --lr 3e-4 --min-lr 3e-6
        --lr-decay-style cosine --lr-warmup-iters 8000 --clip-grad 1.0 --weight-decay 0.1
        --tensorboard-dir tb --log-validation-ppl-to-tensorboard --log-batch-size-to-tensorboard
        --log-timers-to-tensorboard --load ckpt --deepspeed_config deepspeed.json
        --use-torch-compile 0 --use-torch-compiled-autograd 0 --compiled-autograd-fallback-mode
        nothing --zero-stage 0 --exit-interval 0 --no-masked-softmax-fusion
        --no-bias-gelu-fusion --no-bias-dropout-fusion --no-gradient-accumulation-fusion --bf16
        --max-position-embeddings 8192 --untie-embeddings-and-output-weights --swiglu
        --normalization rmsnorm --disable-bias-linear --no-query-key-layer-scaling
        --attention-dropout 0.0 --hidden-dropout 0.0 --use-fused-sdpa 1
        --use-fused-sdpa-with-recompute 0 --use-fused-rmsnorm 1 --use-rotary-position-embeddings
        --rotary-position-embeddings-theta 500000 --tokenizer-type Llama3Tokenizer
        --tokenizer-model tokenizer.model --num-key-value-heads 8 --sequence-parallel --save
        ckpt --save-interval 2000 --verify-checkpoint --verify-checkpoint-model-type LLAMA
        """,
        8,
        bf16(2048, 0),
        vocabulary=128256,
        not_done=(TIMERS,),
    ),
    Script(
        "llm-jp: pretrain/scripts/v3-172b-exp2-sakura/train.sh",
        """
        --tensor-model-parallel-size 4 --pipeline-model-parallel-size 16 --context-parallel-size
        1 --sequence-parallel --use-distributed-optimizer --distributed-timeout-minutes 15
        --num-layers 96 --hidden-size 12288 --ffn-hidden-size 38464 --num-attention-heads 96
        --group-query-attention --num-query-groups 16 --seq-length 4096
        --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 1728
        --train-iters 292812 --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model
        --load ckpt --save ckpt --data-path 14486363187 corpus_text_document 12799385151
        corpus_text_document 17282923545 corpus_text_document --split 1000,0,0 --data-cache-path
        cache --distributed-backend nccl --init-method-std 0.02 --lr 8e-5 --min-lr 8e-6
        --lr-decay-style cosine --lr-decay-iters 290812 --weight-decay 0.1 --clip-grad 1
        --lr-warmup-iters 2000 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps
        1e-8 --log-interval 1 --eval-interval 292812 --eval-iters 0 --bf16
        --untie-embeddings-and-output-weights --position-embedding-type rope
        --disable-bias-linear --use-mcore-models --normalization RMSNorm --norm-epsilon 1e-5
        --no-masked-softmax-fusion --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu
        --use-flash-attn --recompute-activations --recompute-granularity selective
        --attention-softmax-in-fp32 --transformer-impl transformer_engine --use-mpi --use-z-loss
        --log-throughput --wandb-name run --wandb-project run --wandb-entity run
        """,
        64,
    ),
    Script(
        "llm-jp: pretrain/scripts/v4-32b-a3.8b-phase1/base/params.sh",
        """
        --num-layers 32 --hidden-size 2560 --moe-ffn-hidden-size 960 --ffn-hidden-size 960
        --num-attention-heads 40 --group-query-attention --num-query-groups 4 --kv-channels 128
        --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope
        --rotary-base 500000 --untie-embeddings-and-output-weights --swiglu --normalization
        RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --qk-layernorm --tokenizer-type
        Llama2Tokenizer --tokenizer-model tokenizer.model --optimizer adam --lr 4e-4 --min-lr
        4e-5 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --clip-grad 1.0 --weight-decay
        0.1 --init-method-std 0.006 --attention-dropout 0.0 --hidden-dropout 0.0 --manual-gc
        --manual-gc-interval 10 --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
        --moe-permute-fusion --moe-router-dtype fp32 --moe-router-load-balancing-type aux_loss
        --moe-router-topk 8 --moe-token-dispatcher-type alltoall --moe-z-loss-coeff 1e-3
        --num-experts 128 --train-iters 12000000 --lr-warmup-iters 2000 --lr-decay-iters
        12000000 --lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters 1
        --eval-interval 999999999 --eval-iters 0 --micro-batch-size 2 --global-batch-size 1024
        --context-parallel-size 1 --expert-model-parallel-size 4 --pipeline-model-parallel-size
        1 --sequence-parallel --tensor-model-parallel-size 1 --use-distributed-optimizer
        --distributed-backend nccl --distributed-timeout-minutes 120 --use-mpi --data-path 1.0
        corpus_text_document 2.0 corpus_text_document --data-cache-path cache --split 1,0,0
        --bf16 --use-mcore-models --no-masked-softmax-fusion --use-flash-attn
        --overlap-grad-reduce --overlap-param-gather --attention-softmax-in-fp32
        --transformer-impl transformer_engine --attention-backend flash
        --accumulate-allreduce-grads-in-fp32 --cross-entropy-fusion-impl native
        --cross-entropy-loss-fusion
        """,
        8,
    ),
    Script(
        "llm-jp: pretrain/scripts/v4-8b-phase2/base/params.sh",
        """
        --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
        --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings
        4096 --position-embedding-type rope --rotary-base 500000
        --untie-embeddings-and-output-weights --swiglu --normalization RMSNorm --norm-epsilon
        1e-6 --disable-bias-linear --tokenizer-type Llama2Tokenizer --tokenizer-model
        tokenizer.model --optimizer adam --lr 3e-4 --min-lr 3e-5 --adam-beta1 0.9 --adam-beta2
        0.95 --adam-eps 1e-8 --clip-grad 1.0 --weight-decay 0.1 --init-method-std 0.02
        --attention-dropout 0.0 --hidden-dropout 0.0 --train-iters 1000000 --lr-warmup-iters
        2000 --lr-decay-iters 1000000 --lr-decay-style WSD --lr-wsd-decay-style linear
        --lr-wsd-decay-iters 1 --eval-interval 999999999 --eval-iters 0 --micro-batch-size 1
        --global-batch-size 2048 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
        --context-parallel-size 1 --sequence-parallel --use-distributed-optimizer
        --distributed-backend nccl --distributed-timeout-minutes 120 --use-mpi --data-path 1.0
        corpus_text_document 2.0 corpus_text_document --data-cache-path cache --split 1,0,0
        --bf16 --use-mcore-models --no-masked-softmax-fusion --use-flash-attn
        --overlap-grad-reduce --overlap-param-gather --attention-softmax-in-fp32
        --transformer-impl transformer_engine --attention-backend fused
        """,
        8,
    ),
    Script(
        "LumiOpen: launch_scripts/pretrain_71B.sh",
        """
        --num-layers 80 --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672
        --seq-length 5120 --max-position-embeddings 5120 --micro-batch-size 1
        --global-batch-size 32 --train-samples 585937500 --tokenizer-type GPT2BPETokenizer
        --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --bf16 --disable-bias-linear
        --init-method-std 0.0048 --make-vocab-size-divisible-by 128
        --no-gradient-accumulation-fusion --normalization RMSNorm --seed 42
        --untie-embeddings-and-output-weights --use-flash-attn --swiglu --attention-dropout 0
        --hidden-dropout 0 --no-query-key-layer-scaling --use-rotary-position-embeddings
        --no-bias-dropout-fusion --group-query-attention --num-query-groups 8 --optimizer adam
        --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-5 --lr 3.2e-4 --min-lr 3e-5
        --lr-decay-style cosine --lr-decay-samples 585937500 --lr-warmup-samples 2000
        --clip-grad 1.0 --weight-decay 1e-1 --use-distributed-optimizer
        --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --sequence-parallel
        --num-layers-per-virtual-pipeline-stage 2 --save ckpt --load ckpt --log-interval 1
        --save-interval 1000 --eval-interval 4000 --eval-iters 100 --tensorboard-dir tb
        --tensorboard-queue-size 5 --log-timers-to-tensorboard --log-batch-size-to-tensorboard
        --log-validation-ppl-to-tensorboard --train-data-path 0.5 corpus_text_document 0.5
        corpus_text_document --valid-data-path 1.0 corpus_text_document --dataloader-type single
        --num-workers 1 --recompute-activations
        """,
        64,
        not_done=(TIMERS,),
    ),
    Script(
        "LumiOpen: launch_scripts/pretrain_viking_7B.sh",
        """
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1
        --use-distributed-optimizer --num-layers 32 --hidden-size 4096 --num-attention-heads 32
        --ffn-hidden-size 11008 --seq-length 4096 --max-position-embeddings 4096
        --micro-batch-size 1 --global-batch-size 1024 --train-samples 488281250 --tokenizer-type
        GPT2BPETokenizer --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --bf16
        --disable-bias-linear --init-method-std 0.0048 --make-vocab-size-divisible-by 128
        --no-gradient-accumulation-fusion --normalization RMSNorm --seed 42 --swiglu
        --untie-embeddings-and-output-weights --use-flash-attn --use-rotary-position-embeddings
        --attention-dropout 0 --hidden-dropout 0 --no-query-key-layer-scaling
        --no-masked-softmax-fusion --sequence-parallel --optimizer adam --adam-beta1 0.9
        --adam-beta2 0.95 --adam-eps 1e-5 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine
        --lr-decay-samples 488281250 --lr-warmup-samples 2048000 --clip-grad 1.0 --weight-decay
        1e-1 --log-interval 10 --save-interval 1000 --save ckpt --load ckpt --eval-interval 4000
        --eval-iters 100 --tensorboard-dir tb --tensorboard-queue-size 5
        --log-timers-to-tensorboard --log-batch-size-to-tensorboard
        --log-validation-ppl-to-tensorboard --train-data-path 0.07370182629 corpus_text_document
        0.3302641761 corpus_text_document 0.330497442 corpus_text_document --valid-data-path
        0.07370182629 corpus_text_document 0.3302641761 corpus_text_document 0.330497442
        corpus_text_document --dataloader-type single --num-workers 0
        """,
        8,
        not_done=(TIMERS,),
    ),
    Script(
        "deepspeedai: examples_deepspeed/MoE/ds_pretrain_gpt_1.3B_MoE128.sh",
        """
        --override-opt_param-scheduler --adam-beta1 0.9 --adam-beta2 0.95
        --tensor-model-parallel-size 1 --moe-expert-parallel-size 64 --num-experts 128
        --moe-loss-coeff 0.01 --moe-train-capacity-factor 1.0 --moe-eval-capacity-factor 1.0
        --moe-min-capacity 4 --init-method-std 0.014 --lr-decay-tokens 300000000000
        --lr-warmup-tokens 375000000 --micro-batch-size 8 --exit-duration-in-mins 30000000
        --global-batch-size 512 --num-layers 24 --hidden-size 2048 --num-attention-heads 16
        --seq-length 2048 --max-position-embeddings 2048 --train-tokens 300000000000
        --train-iters 858306 --lr 1.2e-4 --min-lr 1.0e-6 --lr-decay-style cosine --split 98,2,0
        --log-interval 10 --eval-interval 100 --eval-iters 10 --save-interval 10000
        --weight-decay 0.1 --clip-grad 1.0 --hysteresis 2 --num-workers 0 --fp16 --load ckpt
        --save ckpt --tensorboard-queue-size 1 --log-timers-to-tensorboard
        --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard --tensorboard-dir tb
        --checkpoint-activations --create-moe-param-group --vocab-file gpt2-vocab.json
        --merge-file gpt2-merges.txt --data-path corpus_text_document --data-impl mmap
        --deepspeed --deepspeed_config deepspeed.json --pipeline-model-parallel-size 1
        --no-pipeline-parallel --deepspeed-activation-checkpointing
        """,
        64,
        template(512, 0, micro=8),
        refused=("--num-experts 128: is not supported with --add-bias-linear",),
        add="--disable-bias-linear",
        reason="biases of experts",
        not_done=(TIMERS,),
    ),
    Script(
        "deepspeedai: examples_deepspeed/curriculum_learning/ds_pretrain_gpt_1.3B_rope_slw.sh",
        """
        --override-opt_param-scheduler --adam-beta1 0.9 --adam-beta2 0.95
        --tensor-model-parallel-size 4 --init-method-std 0.013 --lr-decay-tokens 300000000000
        --lr-warmup-tokens 3000000000 --micro-batch-size 2 --exit-duration-in-mins 30000000
        --global-batch-size 512 --num-layers 24 --hidden-size 2048 --num-attention-heads 16
        --seq-length 2048 --max-position-embeddings 2048 --train-tokens 300000000000
        --train-samples 292968750 --lr 2.0e-4 --min-lr 1.0e-6 --lr-decay-style cosine --split
        949,50,1 --log-interval 10 --eval-interval 100 --eval-iters 10 --save-interval 100
        --weight-decay 0.1 --clip-grad 1.0 --hysteresis 2 --num-workers 0 --fp16 --seed 1234
        --load ckpt --save ckpt --no-async-tensor-model-parallel-allreduce
        --use-rotary-position-embeddings --rotary-percent 0.25 --tensorboard-queue-size 1
        --log-timers-to-tensorboard --log-batch-size-to-tensorboard
        --log-validation-ppl-to-tensorboard --tensorboard-dir tb --checkpoint-activations
        --log-optimizer-states-to-tensorboard --vocab-file gpt2-vocab.json --merge-file
        gpt2-merges.txt --data-path corpus_text_document --data-impl mmap --deepspeed
        --deepspeed_config deepspeed.json --zero-stage 1 --pipeline-model-parallel-size 8
        --deepspeed-activation-checkpointing
        """,
        32,
        template(512, 1) | {"curriculum_learning": {"enabled": True, "curriculum_type": "seqlen"}},
        refused=("--deepspeed_config deepspeed.json: curriculum_learning: a sequence length that",),
        edit={"curriculum_learning": None},
        reason="a sequence length that grows",
        not_done=(TIMERS, STATES),
    ),
    Script(
        "deepspeedai: examples/pretrain_gpt3_175B.sh",
        """
        --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-layers 96
        --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings
        2048 --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375
        --train-samples 146484375 --lr-decay-samples 126953125 --lr-warmup-samples 183105 --lr
        6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --log-interval 10 --eval-iters 40
        --eval-interval 1000 --data-path 0.2 corpus_text_document 0.3 corpus_text_document 0.5
        corpus_text_document --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt
        --save-interval 1000 --save ckpt --load ckpt --split 98,2,0 --clip-grad 1.0
        --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006
        --tensorboard-dir tb --fp16 --activations-checkpoint-method uniform
        """,
        128,
    ),
    Script(
        "deepspeedai: examples/pretrain_gpt.sh",
        """
        --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024
        --max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size 8 --lr 0.00015
        --train-iters 500000 --lr-decay-iters 320000 --lr-decay-style cosine --min-lr 1.0e-5
        --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --fp16 --data-path
        corpus_text_document --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt
        --data-impl mmap --split 949,50,1 --log-interval 100 --save-interval 10000
        --eval-interval 1000 --eval-iters 10 --save ckpt --load ckpt
        """,
        1,
    ),
    Script(
        "deepspeedai: examples_deepspeed/sequence_parallel/ds_pretrain_gpt_6.7B_fpdt_32k.sh",
        """
        --override-opt_param-scheduler --adam-beta1 0.9 --adam-beta2 0.95
        --tensor-model-parallel-size 1 --ds-sequence-parallel-fpdt
        --ds-sequence-parallel-fpdt-chunk-size 65536 --ds-sequence-parallel-fpdt-offloading
        --ds-sequence-parallel-size 4 --init-method-std 0.009 --lr-decay-tokens 300000000000
        --lr-warmup-tokens 3000000000 --micro-batch-size 2 --exit-duration-in-mins 30000000
        --global-batch-size 1024 --num-layers 32 --hidden-size 4096 --num-attention-heads 32
        --seq-length 262144 --max-position-embeddings 262144 --train-tokens 300000000000
        --train-samples 2288818 --lr 1.2e-4 --min-lr 1.0e-6 --lr-decay-style cosine --split
        949,50,1 --log-interval 10 --eval-interval 100 --eval-iters 10 --save-interval 100
        --weight-decay 0.1 --attention-dropout 0.0 --hidden-dropout 0.0 --clip-grad 1.0
        --hysteresis 2 --num-workers 0 --fp16 --seed 1234 --load ckpt --save ckpt
        --no-async-tensor-model-parallel-allreduce --use-flash-attn-v2 --tensorboard-queue-size
        1 --use-rotary-position-embeddings --rotary-percent 0.25
        --rotary-position-embeddings-theta 100000000 --log-timers-to-tensorboard
        --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard --tensorboard-dir tb
        --checkpoint-activations --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt
        --data-path corpus_text_document --data-impl mmap --deepspeed --deepspeed_config
        deepspeed.json --zero-stage 3 --pipeline-model-parallel-size 1 --no-pipeline-parallel
        --deepspeed-activation-checkpointing --checkpoint-in-cpu
        """,
        8,
        template(1024, 3),
        refused=("--ds-sequence-parallel-fpdt: ",),
        drop="--ds-sequence-parallel-fpdt",
        reason="chunks of a sequence that take turns on the device",
        not_done=(TIMERS,),
    ),
    Script(
        "NVIDIA: examples/mixtral/train_mixtral_8x7b_distributed.sh",
        MIXTRAL,
        32,
        vocabulary=32000,
    ),
    Script(
        "alibaba: examples/llama2/run_pretrain_mcore_llama.sh",
        """
        --save ckpt --train-data-path corpus_text_document --data-path corpus_text_document --lr
        1e-5 --min-lr 1e-6 --lr-decay-style linear --adam-beta1 0.9 --adam-beta2 0.95
        --weight-decay 0.1 --clip-grad 1.0 --init-method-std 0.006 --attention-dropout 0.0
        --hidden-dropout 0.0 --lr-decay-iters 97 --lr-warmup-iters 9 --train-iters 97 --split
        99,1,0 --micro-batch-size 1 --global-batch-size 8 --num-layers 32 --hidden-size 4096
        --num-attention-heads 32 --ffn-hidden-size 11008 --seq-length 128
        --max-position-embeddings 4096 --max-padding-length 128 --log-interval 1 --eval-interval
        10000 --eval-iters 10 --save-interval 100000 --tensorboard-queue-size 1
        --tensorboard-dir tb --log-timers-to-tensorboard --log-batch-size-to-tensorboard
        --log-validation-ppl-to-tensorboard --tensor-model-parallel-size 1
        --pipeline-model-parallel-size 1 --no-load-optim --no-load-rng --num-workers 0 --seed
        1234 --extra-vocab-size 0 --patch-tokenizer-type LLamaTokenizer --dataset
        LLama-Pretrain-Idxmap --swiglu --normalization RMSNorm --use-rotary-position-embeddings
        --no-rope-fusion --position-embedding-type rope --untie-embeddings-and-output-weights
        --disable-bias-linear --transformer-impl transformer_engine --bf16 --load ckpt
        --transformer-impl transformer_engine --recompute-activations
        --use-distributed-optimizer --use-flash-attn
        """,
        8,
        vocabulary=32000,
        refused=("--data-path: contradicts --train-data-path; keep one kind of data",),
        drop="--train-data-path",
        reason="the same data by two flags",
        not_done=(TIMERS,),
    ),
    Script(
        "alibaba: examples/mistral/run_mcore_mistral.sh",
        """
        --save ckpt --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --weight-decay 0.1
        --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.008
        --attention-dropout 0.0 --hidden-dropout 0.0 --lr-decay-iters 9765 --lr-warmup-iters 97
        --train-iters 9765 --micro-batch-size 1 --global-batch-size 8 --num-layers 32
        --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336 --seq-length 128
        --max-position-embeddings 32768 --max-padding-length 128 --sliding-window 4096
        --log-interval 1 --log-throughput --eval-interval 10000 --eval-iters 10 --save-interval
        100000 --tensorboard-queue-size 1 --tensorboard-dir tb --log-timers-to-tensorboard
        --log-validation-ppl-to-tensorboard --tensor-model-parallel-size 4
        --pipeline-model-parallel-size 1 --context-parallel-size 1 --no-load-optim --no-load-rng
        --no-save-optim --num-workers 8 --extra-vocab-size 0 --patch-tokenizer-type
        MixtralTokenizer --swiglu --normalization RMSNorm --norm-epsilon 1e-5
        --use-rotary-position-embeddings --position-embedding-type rope --rotary-base 1000000
        --disable-bias-linear --ckpt-format torch --data-path corpus_text_document --split
        99,1,0 --dataset MMAP --bf16 --load ckpt --transformer-impl transformer_engine
        --recompute-activations --use-distributed-optimizer --sequence-parallel
        --group-query-attention --num-query-groups 8 --tp-comm-overlap --overlap-grad-reduce
        --overlap-param-gather --train-mode pretrain --moe-router-topk 2 --num-experts 8
        --moe-aux-loss-coeff 1e-2 --expert-model-parallel-size 4 --moe-token-dispatcher-type
        alltoall --moe-router-load-balancing-type aux_loss --untie-embeddings-and-output-weights
        """,
        16,
        vocabulary=32000,
        not_done=(TIMERS,),
    ),
    Script(
        "alibaba: examples/qwen2_5/run_mcore_qwen.sh",
        """
        --save ckpt --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --weight-decay 0.1
        --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.008
        --attention-dropout 0.0 --hidden-dropout 0.0 --lr-decay-iters 9765 --lr-warmup-iters 97
        --train-iters 9765 --micro-batch-size 1 --global-batch-size 8 --num-layers 28
        --hidden-size 3584 --num-attention-heads 28 --ffn-hidden-size 18944 --seq-length 128
        --max-position-embeddings 131072 --max-padding-length 128 --log-interval 1
        --log-throughput --eval-interval 10000 --eval-iters 10 --save-interval 100000
        --tensorboard-queue-size 1 --tensorboard-dir tb --log-timers-to-tensorboard
        --log-validation-ppl-to-tensorboard --tensor-model-parallel-size 4
        --pipeline-model-parallel-size 2 --context-parallel-size 1 --no-load-optim --no-load-rng
        --num-workers 8 --extra-vocab-size 421 --patch-tokenizer-type Qwen2Tokenizer --swiglu
        --normalization RMSNorm --norm-epsilon 1e-6 --use-rotary-position-embeddings
        --position-embedding-type rope --disable-bias-linear --add-qkv-bias --rotary-percent 1.0
        --rotary-base 1000000 --rotary-seq-len-interpolation-factor 1 --no-save-optim
        --data-path corpus_text_document --split 99,1,0 --dataset MMAP --bf16 --load ckpt
        --transformer-impl transformer_engine --recompute-activations
        --use-distributed-optimizer --sequence-parallel --group-query-attention
        --num-query-groups 4 --tp-comm-overlap --overlap-grad-reduce --overlap-param-gather
        --train-mode pretrain --untie-embeddings-and-output-weights --attention-backend flash
        """,
        8,
        vocabulary=1025,  # of the small tokenizer.json
        not_done=(TIMERS,),
    ),
    Script(
        "alibaba: examples/qwen3/run_mcore_qwen3.sh",
        """
        --save ckpt --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --weight-decay 0.01
        --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --init-method-std 0.008
        --attention-dropout 0.0 --hidden-dropout 0.0 --lr-decay-iters 9765 --lr-warmup-iters 97
        --train-iters 9765 --micro-batch-size 1 --global-batch-size 8 --num-layers 48
        --hidden-size 2048 --num-attention-heads 32 --ffn-hidden-size 6144 --seq-length 128
        --max-position-embeddings 40960 --max-padding-length 128 --log-interval 1
        --log-throughput --eval-interval 10000 --eval-iters 10 --save-interval 100000
        --tensorboard-queue-size 1 --tensorboard-dir tb --log-timers-to-tensorboard
        --log-validation-ppl-to-tensorboard --tensor-model-parallel-size 4
        --pipeline-model-parallel-size 2 --context-parallel-size 1 --no-load-optim --no-load-rng
        --num-workers 32 --padded-vocab-size 151936 --patch-tokenizer-type Qwen3Tokenizer
        --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --use-rotary-position-embeddings
        --position-embedding-type rope --disable-bias-linear --rotary-base 1000000
        --no-save-optim --ckpt-format torch_dist --transformer-impl transformer_engine
        --cross-entropy-loss-fusion --qk-layernorm --kv-channels 128 --data-path
        corpus_text_document --split 99,1,0 --dataset MMAP --bf16 --load ckpt --recompute-method
        uniform --recompute-num-layers 1 --recompute-granularity full
        --use-distributed-optimizer --sequence-parallel --moe-grouped-gemm
        --moe-token-dispatcher-type alltoall --moe-router-topk 8 --num-experts 128
        --expert-tensor-parallel-size 1 --expert-model-parallel-size 4 --moe-ffn-hidden-size 768
        --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.001 --moe-layer-freq
        '([1]*48)' --train-mode pretrain --attention-backend flash
        --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 4
        """,
        32,
        vocabulary=151669,
        not_done=(TIMERS,),
    ),
    Script(
        "ROCm: examples/mixtral/train_mixtral_8x7b_distributed.sh",
        MIXTRAL,
        32,
        vocabulary=32000,
    ),
)
