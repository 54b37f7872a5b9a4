"""Launch scripts of Megatron-LM and Megatron-DeepSpeed as data: their flags and values, and what of
them does not exist here.

Paths of data, tokenizers and checkpoints are replaced by small ones. `refused` are the beginnings
of the faults of the flags as they are; with the flags of `drop` taken out, and `add` added, the
script runs.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILES = (
    "gpt2-vocab.json",
    "gpt2-merges.txt",
    "tokenizer.model",
    "corpus_text_document.bin",
    "corpus_text_document.idx",
)
CONTENTS = {
    "data.txt": "0.5 corpus_text_document web\n0.5 corpus_text_document books\n",
    # a vocabulary of 1,003 tokens, without those that were added later
    "ckpt/tokenizer.json": json.dumps({"model": {"vocab": {str(k): k for k in range(1003)}}}),
}


@dataclass(frozen=True)
class Script:
    """One script: where it is, its flags, its DeepSpeed file (deepspeed.json) and the job that it
    starts.
    """

    path: str
    flags: str
    ranks: int
    deepspeed: dict[str, Any] | None = None
    refused: tuple[str, ...] = ()
    drop: str = ""
    add: str = ""
    reason: str = ""
    not_done: tuple[str, ...] = ()
    vocabulary: int = 50257
    # sections of the DeepSpeed file as they must be; None: taken out
    edit: dict[str, Any] = field(default_factory=dict)

    def make(self, folder: Path, *, edited: bool) -> list[str]:
        """Its command line, and its files in a folder."""
        for name in FILES:
            (folder / name).write_bytes(b"")
        for name, text in CONTENTS.items():
            (folder / name).write_text(text)
        if self.deepspeed is not None:
            content = {**self.deepspeed, **self.edit} if edited else self.deepspeed
            content = {key: value for key, value in content.items() if value is not None}
            (folder / "deepspeed.json").write_text(json.dumps(content))
        return (
            [*without(self.flags, self.drop), *self.add.split()]
            if edited
            else shlex.split(self.flags)
        )


def without(flags: str, names: str) -> list[str]:
    """The words of a line less some flags and the words after them."""
    words, kept, dropping = shlex.split(flags), [], False
    for word in words:
        if word.startswith("--"):
            dropping = word.partition("=")[0] in names.split()
        kept += [] if dropping else [word]
    return kept


def changed(flags: str, **values: str) -> str:
    """A line in which flags have other values."""
    names = {"--" + name.replace("_", "-"): value for name, value in values.items()}
    line = without(flags, " ".join(names))
    return shlex.join(
        [*line, *(word for name, value in names.items() for word in (name, *value.split()))]
    )


# ---------------------------------------------------------------- Megatron-LM

GPT3 = """
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
    --attention-backend auto --micro-batch-size 1 --global-batch-size 1536
    --step-batch-size-schedule '0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536' --train-iters 500000 --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine
    --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000 --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 16 --data-path corpus_text_document --vocab-file gpt2-vocab.json
    --merge-file gpt2-merges.txt --split 949,50,1 --log-interval 100 --save-interval 10000 --eval-interval 1000 --save ckpt
    --load ckpt --eval-iters 10 --tensorboard-dir tb
"""
LLAMA3 = """
    --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
    --swiglu --normalization RMSNorm --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
    --untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1 --global-batch-size 128
    --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001
    --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss
    --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235 --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel --log-interval 1
    --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start 4
    --profile-step-end 6 --ckpt-format torch_dist --distributed-timeout-minutes 60 --save ckpt --load ckpt
    --tensorboard-dir tb
"""
FP8 = (
    " --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max "
    "--fp8-param-gather"
)
PARAM_GATHER = "--fp8-param-gather: weights are gathered"
MOCK = """ --mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache --tiktoken-pattern v2
    --split "'99,1,0'" --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1"""
REAL = """ --data-path corpus_text_document --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.model
    --data-cache-path cache --split "'99,1,0'" --no-create-attention-mask-in-dataloader --no-mmap-bin-files
    --num-workers 1 --vocab-size 128256"""
LLAMA3_NOT_DONE = ("--empty-unused-memory-level: ",)

MEGATRON_LM = (
    Script("examples/gpt3/train_gpt3_175b_distributed.sh", GPT3, 512),
    Script(
        "examples/gpt3/README.md 345M",
        changed(
            GPT3,
            num_layers="12",
            hidden_size="512",
            num_attention_heads="8",
            seq_length="1024",
            tensor_model_parallel_size="1",
            pipeline_model_parallel_size="1",
        ),
        8,
    ),
    Script(
        "examples/gpt3/README.md 857M",
        changed(
            GPT3,
            num_layers="24",
            hidden_size="1024",
            num_attention_heads="16",
            tensor_model_parallel_size="1",
            pipeline_model_parallel_size="1",
        ),
        8,
    ),
    Script(
        "examples/llama/train_llama3_8b_h100_fp8.sh",
        LLAMA3 + FP8 + MOCK,
        8,
        vocabulary=128257,
        not_done=(*LLAMA3_NOT_DONE, PARAM_GATHER),
    ),
    Script(
        "examples/llama/train_llama3_8b_h100_fp8.sh DTYPE=bf16",
        LLAMA3 + MOCK,
        8,
        vocabulary=128257,
        not_done=LLAMA3_NOT_DONE,
    ),
    Script(
        "examples/llama/train_llama3_8b_h100_fp8.sh TOKENIZER DATA",
        LLAMA3 + FP8 + REAL,
        8,
        vocabulary=128256,
        not_done=(*LLAMA3_NOT_DONE, PARAM_GATHER),
    ),
)

# ---------------------------------------------------------------- Megatron-DeepSpeed

REBASE = """
    --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --data-path corpus_text_document --data-impl mmap
    --override-opt_param-scheduler --adam-beta1 0.9 --adam-beta2 0.95 --tensor-model-parallel-size 2 --init-method-std 0.02
    --lr-decay-tokens 300000000000 --lr-warmup-tokens 3000000000 --micro-batch-size 2 --exit-duration-in-mins 30000000
    --global-batch-size 256 --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 2048
    --max-position-embeddings 2048 --train-tokens 300000000000 --train-samples 292968750 --lr 6.0e-4 --min-lr 1.0e-6
    --lr-decay-style cosine --split 949,50,1 --log-interval 10 --eval-interval 100 --eval-iters 10 --save-interval 100
    --weight-decay 0.1 --clip-grad 1.0 --hysteresis 2 --num-workers 0 --fp16 --seed 1234 --load ckpt --save ckpt
    --no-async-tensor-model-parallel-allreduce --tensorboard-queue-size 1 --log-timers-to-tensorboard
    --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard --tensorboard-dir tb --checkpoint-activations
    --log-optimizer-states-to-tensorboard --deepspeed --deepspeed_config deepspeed.json --zero-stage 1
    --pipeline-model-parallel-size 2 --deepspeed-activation-checkpointing
"""
LARGE = {
    "num_layers": "24",
    "hidden_size": "2048",
    "num_attention_heads": "16",
    "global_batch_size": "512",
    "lr": "2.0e-4",
    "init_method_std": "0.013",
}
# its DeepSpeed file and its lengths in tokens are taken
REBASED: dict[str, Any] = {
    "not_done": ("--log-timers-to-tensorboard: ", "--log-optimizer-states-to-tensorboard: "),
}


def template(
    batch: int, stage: int, micro: int = 2, steps: int = 10, power: int = 11
) -> dict[str, Any]:
    """The DeepSpeed file of most scripts."""
    return {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "steps_per_print": steps,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "prescale_gradients": stage == 0,
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": power,
        },
        "wall_clock_breakdown": False,
    }


ROPE = " --use-rotary-position-embeddings --rotary-percent 0.25"
DENSE = (
    changed(
        REBASE,
        **LARGE,
        tensor_model_parallel_size="1",
        pipeline_model_parallel_size="1",
        zero_stage="0",
    )
    + " --no-pipeline-parallel"
)
ZBH1 = shlex.join(
    without(
        changed(
            REBASE,
            **{**LARGE, "global_batch_size": "16"},
            tensor_model_parallel_size="1",
            pipeline_model_parallel_size="8",
            zero_stage="0",
            micro_batch_size="1",
            log_interval="1",
            eval_iters="10100",
            eval_interval="10100",
            save_interval="10100",
        ),
        "--checkpoint-activations --deepspeed-activation-checkpointing",
    )
)

LLAMA = """
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 24 --hidden-size 2048
    --ffn-hidden-size 5504 --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 32 --seq-length 2048
    --max-position-embeddings 2048 --train-iters 250000 --save ckpt --load ckpt --data-path 1 corpus_text_document
    --data-impl mmap --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model tokenizer.model --split 949,50,1
    --distributed-backend nccl --lr 3e-4 --lr-decay-style cosine --min-lr 3e-5 --weight-decay 0.1 --clip-grad 1
    --lr-warmup-iters 2000 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --log-interval 1 --save-interval 10000
    --eval-interval 1000 --eval-iters 10 --bf16 --no-query-key-layer-scaling --attention-dropout 0 --hidden-dropout 0
    --use-rotary-position-embeddings --untie-embeddings-and-output-weights --swiglu --normalization rmsnorm
    --disable-bias-linear --zero-stage=0 --deepspeed_config=deepspeed.json --deepspeed
"""
LLAMA_FILE = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 1,
    "zero_optimization": {"stage": 0},
    "bf16": {"enabled": True},
}

EXAMPLE = """
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 24 --hidden-size 512
    --num-attention-heads 16 --seq-length 256 --loss-scale 12 --max-position-embeddings 1024 --micro-batch-size 4
    --global-batch-size 1024 --train-iters 1000 --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --log-interval 1
    --eval-iters 40 --eval-interval 1000 --data-path corpus_text_document --vocab-file gpt2-vocab.json
    --merge-file gpt2-merges.txt --save-interval 1000 --split 98,2,0 --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9
    --adam-beta2 0.95 --init-method-std 0.006 --fp16 --checkpoint-activations --tensorboard-dir tb
    --deepspeed-activation-checkpointing --zero-stage=2 --deepspeed_config=deepspeed.json --no-pipeline-parallel
    --deepspeed --exit-interval 5000
"""
EXAMPLE_FILE = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 1,
    "zero_optimization": {"stage": 2},
    "fp16": {"enabled": True, "initial_scale_power": 12},
    "wall_clock_breakdown": True,
}

UNIVERSAL = """
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --ds-sequence-parallel-size 1 --num-layers 24
    --hidden-size 1024 --num-attention-heads 32 --seq-length 1024 --loss-scale 12 --max-position-embeddings 1024
    --micro-batch-size 2 --global-batch-size 16 --train-iters 100000 --lr 6.0e-3 --min-lr 6.0e-4 --lr-decay-style cosine
    --log-interval 1 --eval-iters 40 --eval-interval 10 --data-path corpus_text_document --vocab-file gpt2-vocab.json
    --merge-file gpt2-merges.txt --save-interval 100 --split 98,2,0 --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9
    --adam-beta2 0.95 --init-method-std 0.006 --bf16 --checkpoint-activations --exit-interval 100 --save ckpt --load ckpt
    --make-vocab-size-divisible-by 256 --tensorboard-dir tb --deepspeed --deepspeed_config=deepspeed.json --zero-stage=1
    --deepspeed-activation-checkpointing
"""
UNIVERSAL_FILE = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "steps_per_print": 1,
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "wall_clock_breakdown": False,
}

FINETUNE = """
    --load ckpt --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --lr-warmup-iters 2000 --weight-decay 0.1
    --clip-grad 1 --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --finetune --ffn-hidden-size 11008
    --attention-dropout 0 --hidden-dropout 0 --no-query-key-layer-scaling --disable-bias-linear --normalization rmsnorm
    --use-rotary-position-embeddings --untie-embeddings-and-output-weights --swiglu --seq-length 512
    --max-position-embeddings 512 --micro-batch-size 16 --global-batch-size 256 --train-iters 3500 --lr 2e-5
    --tensorboard-dir tb --lr-decay-iters 320000 --lr-decay-style cosine --log-interval 1 --eval-iters 100
    --eval-interval 100 --data-path corpus_text_document --save-interval 1500 --split 100,0,0 --bf16 --zero-stage 0
    --tokenizer-type HFTokenizer --tokenizer-model tokenizer.model --deepspeed_config deepspeed.json --deepspeed
    --distributed-backend nccl --num-workers 0 --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --no-gradient-accumulation-fusion --repeated-dataloader
"""

MEGATRON_DEEPSPEED = (
    Script(
        "examples_deepspeed/rebase/ds_pretrain_gpt_125M.sh",
        REBASE,
        8,
        template(256, 1),
        **REBASED,
    ),
    Script(
        "examples_deepspeed/rebase/ds_pretrain_gpt_125M_flashattn.sh",
        REBASE + " --use-flash-attn",
        8,
        template(256, 1),
        **{
            "not_done": (*REBASED["not_done"], "--use-flash-attn: with attention dropout"),
        },
    ),
    Script(
        "examples_deepspeed/rebase/ds_pretrain_gpt_1.3B.sh",
        DENSE,
        64,
        template(512, 0),
        **REBASED,
    ),
    Script(
        "examples_deepspeed/rebase/ds_pretrain_gpt_1.3B_megatron_checkpointing.sh",
        shlex.join(without(DENSE, "--checkpoint-activations --deepspeed-activation-checkpointing"))
        + " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        64,
        template(512, 0),
        **REBASED,
    ),
    Script(
        "examples_deepspeed/rebase/ds_pretrain_gpt_1.3B_rope.sh",
        changed(REBASE, **LARGE, tensor_model_parallel_size="4", pipeline_model_parallel_size="8")
        + ROPE,
        64,
        template(512, 1),
        **REBASED,
    ),
    Script(
        "examples_deepspeed/rebase/ds_pretrain_gpt_13B.sh",
        changed(
            REBASE,
            num_layers="40",
            hidden_size="5120",
            num_attention_heads="40",
            global_batch_size="1024",
            lr="1.0e-4",
            init_method_std="0.008",
            tensor_model_parallel_size="4",
            pipeline_model_parallel_size="8",
        ),
        64,
        template(1024, 1),
        **REBASED,
    ),
    Script(
        "examples_deepspeed/zero_bubble_pp/zbh1_pretrain_gpt_1.3b.sh",
        ZBH1 + " --enable-zbh1-pipeline --enable-zbh1-exact-semantics",
        8,
        template(16, 0, micro=1, steps=1),
        **REBASED,
    ),
    Script(
        "examples_deepspeed/sequence_parallel/ds_pretrain_gpt_1.3B_seq_parallel_32k.sh",
        changed(
            DENSE,
            seq_length="32768",
            max_position_embeddings="32768",
            global_batch_size="2",
            micro_batch_size="1",
            ds_sequence_parallel_size="4",
            train_samples="18310546",
            zero_stage="1",
        )
        + " --use-flash-attn-triton",
        8,
        template(2, 1, micro=1),
        not_done=(*REBASED["not_done"], "--use-flash-attn-triton: with attention dropout"),
    ),
    Script(
        "examples_deepspeed/pretrain_llama_distributed.sh", LLAMA, 8, LLAMA_FILE, vocabulary=32000
    ),
    Script(
        "examples_deepspeed/pretrain_llama2_distributed.sh",
        LLAMA
        + (
            " --num-key-value-heads 4 --recompute-granularity full --recompute-method "
            "uniform --deepspeed-activation-checkpointing"
        ),
        8,
        LLAMA_FILE,
        vocabulary=32000,
    ),
    Script(
        "examples_deepspeed/run_deepspeed_example.sh",
        EXAMPLE,
        8,
        EXAMPLE_FILE,
        refused=(
            (
                "--deepspeed_config deepspeed.json: train_batch_size = 64: contradicts "
                "--global-batch-size 1024"
            ),
        ),
        edit={"train_batch_size": 1024},
        reason="its file contradicts its flags: another batch",
    ),
    Script(
        "examples_deepspeed/universal_checkpointing/megatron_gpt/run_bf16.sh",
        UNIVERSAL,
        8,
        UNIVERSAL_FILE,
    ),
    Script(
        "examples_deepspeed/universal_checkpointing/megatron_gpt/run_universal_bf16.sh",
        UNIVERSAL + " --universal-checkpoint",
        8,
        UNIVERSAL_FILE,
    ),
    Script(
        "examples_deepspeed/universal_checkpointing/megatron_gpt/run_fp16.sh",
        UNIVERSAL.replace("--bf16", "--fp16"),
        8,
        {
            **UNIVERSAL_FILE,
            "data_types": None,
            "bf16": {"enabled": False},
            "fp16": {
                "enabled": True,
                "loss_scale": 0,
                "loss_scale_window": 50,
                "hysteresis": 2,
                "min_loss_scale": 1,
                "initial_scale_power": 12,
            },
        },
        refused=(
            "--deepspeed_config deepspeed.json: fp16.loss_scale = 0: contradicts --loss-scale 12",
        ),
        drop="--loss-scale",
        reason="a static loss scale in the flags and a dynamic one in the file",
    ),
    Script(
        "examples_deepspeed/finetune_hf_llama/finetune_llama.sh",
        FINETUNE,
        8,
        {
            **LLAMA_FILE,
            "train_batch_size": 256,
            "train_micro_batch_size_per_gpu": 16,
            "steps_per_print": 100,
        },
        vocabulary=32000,
        refused=("--repeated-dataloader: not supported",),
        drop="--repeated-dataloader",
        reason="finetuning on prompts",
    ),
)
