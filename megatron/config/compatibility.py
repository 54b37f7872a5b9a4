"""What becomes of flags of Megatron-LM (2026-08) and Megatron-DeepSpeed (2025-07) that are not
fields here.

One maintained table, nine verdicts:
- equals: rewritten to our flags; `$` stands for the flag's own values.
- choice: rewritten to our flags, which depend on the flag's value; other values are refused.
- file: rewritten to the flags of data that the named file holds (`named_files.py`).
- together: read with the rest of the command line by `megatron_deepspeed.py`.
- at least: rewritten to our flag where the settings do not already give that much.
- note: accepted, because what it asks for is done anyway or does not apply; one line in the banner
  says why.
- not done: accepted, although it asks for a service that does not exist here. The result does not
  depend
  on it; the block at the top of the banner says what is missing.
- only: accepted with the listed values (they are what happens here anyway), refused with others.
- refused: an error line that says what to do. A name ending in `*` stands for the names in
  `upstream_flags.py` that begin so and that no other row has; a longer beginning wins over a
  shorter one. A flag whose exact name is in no row is unknown.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron.config.errors import UserError
from megatron.config.groups import Config
from megatron.config.upstream_flags import NAMES

Words = list[str]  # that follow a flag
Occurrence = tuple[str, Words]


@dataclass(frozen=True)
class CompatibilityRow:
    """One line of the table: the flags in `names` (with spaces between them) share a verdict and
    its `text` (for equals and at least: the flags of ours that they mean).
    """

    names: str
    text: str
    verdict: str
    values: tuple[str, ...] = ()
    # For a note: it holds for such settings only, and others are refused with the text `otherwise`.
    # For "not done": with such settings it is done after all, and `otherwise` is a note.
    when: Callable[[Config], bool] | None = None
    otherwise: str = ""
    # for a choice: the flags of ours that each value means; "" means what happens anyway
    choices: tuple[tuple[str, str], ...] = ()

    @property
    def flags(self) -> list[str]:
        return self.names.split()

    def holds(self, config: Config) -> bool:
        """Whether the settings are such as `when` asks for."""
        return self.when is None or self.when(config)

    def rewrite(self, words: Words) -> list[Occurrence]:
        """The occurrences of our own flags that an equals or choice row means. Raises UserError
        for a value that no choice has.
        """
        text = self.text
        if self.verdict == "choice":
            by_value = dict(self.choices)
            value = " ".join(words).lower()
            if value not in by_value:
                known = ", ".join(name or "no value" for name in by_value)
                raise UserError(f"{self.text} (accepted: {known})")
            text = by_value[value]
        result: list[Occurrence] = []
        for word in text.split():
            if word.startswith("--"):
                result.append((word, []))
            else:
                result[-1][1].extend(words if word == "$" else [word])
        return result


# One function a verdict: each takes the names and the text.
note = partial(CompatibilityRow, verdict="note")
equals = partial(CompatibilityRow, verdict="equals")
at_least = partial(CompatibilityRow, verdict="at least")
refused = partial(CompatibilityRow, verdict="refused")


def not_done(flags: str, text: str, quiet: str = "", **rest: Any) -> CompatibilityRow:
    """A row whose flags ask for what does not exist here; with the values `quiet` they ask for
    nothing.
    """
    return CompatibilityRow(flags, text, "not done", tuple(quiet.split()), **rest)


def only(flags: str, values: str, text: str) -> CompatibilityRow:
    """A row whose flags are accepted with these values alone; `text` says why others are not."""
    return CompatibilityRow(flags, text, "only", tuple(values.split()))


def choice(flags: str, otherwise: str, **choices: str) -> CompatibilityRow:
    """A row whose values mean flags of ours; `otherwise` says why other values are refused. The
    keyword `none` stands for the flag without a value, and a leading `_` protects a digit.
    """
    named = tuple(
        ("" if value == "none" else value.removeprefix("_"), ours)
        for value, ours in choices.items()
    )
    return CompatibilityRow(flags, otherwise, "choice", choices=named)


def together(flags: str, text: str) -> CompatibilityRow:
    """A row whose flags mean settings that other flags of the line take part in."""
    return CompatibilityRow(flags, text, "together")


def named_file(flags: str, text: str) -> CompatibilityRow:
    """A row whose flags name a file that holds flags of data."""
    return CompatibilityRow(flags, text, "file")


EQUALS = (
    equals("--swiglu", "--activation swiglu"),
    equals("--geglu", "--activation geglu"),
    equals("--squared-relu", "--activation squared-relu"),
    equals("--openai-gelu", "--activation gelu-tanh"),
    equals("--use-rotary-position-embeddings", "--position-embedding-type rope"),
    equals("--rotary-position-embeddings-theta", "--rotary-base $"),
    equals("--num-key-value-heads", "--group-query-attention --num-query-groups $"),
    equals("--no-weight-tying", "--untie-embeddings-and-output-weights"),
    equals("--no-pad-vocab-size --disable-pad-vocab-size", "--make-vocab-size-divisible-by 1"),
    equals("--encoder-num-layers --decoder-num-layers", "--num-layers $"),
    equals("--encoder-seq-length --decoder-seq-length", "--seq-length $"),
    equals("--checkpoint-activations", "--recompute-granularity full --recompute-method uniform"),
    equals(
        "--checkpoint-num-layers --activations-checkpoint-num-layers", "--recompute-num-layers $"
    ),
    equals("--activations-checkpoint-method", "--recompute-granularity full --recompute-method $"),
    equals("--fp8-e4m3", "--fp8-format e4m3"),
    equals("--fp8-hybrid", "--fp8-format hybrid"),
    equals("--disable-fp8-wgrad", "--no-fp8-wgrad"),
    equals("--recompute-activations", "--recompute-granularity selective"),
    equals(
        "--distribute-checkpointed-activations --partition-activations",
        "--distribute-saved-activations",
    ),
    equals("--fine-grained-activation-offloading", "--activation-offload"),
    equals("--checkpoint-in-cpu", "--activation-offload --offload-modules layer_input"),
    equals("--override-lr-scheduler", "--override-opt-param-scheduler"),
    equals("--use-checkpoint-lr-scheduler", "--use-checkpoint-opt-param-scheduler"),
    equals("--no-check-for-nan-in-loss-and-grad", "--nan-policy skip"),
    equals("--no-load-lr-state", "--override-opt-param-scheduler"),
    equals("--model-parallel-size", "--tensor-model-parallel-size $"),
    equals("--enable-zbh1-pipeline", "--pipeline-schedule zero-bubble"),
    equals("--no-async-tensor-model-parallel-allreduce", "--no-tp-comm-overlap"),
    at_least("--use-distributed-optimizer", "--zero-stage 1"),
    equals("--data-parallel-sharding-strategy", "--zero-stage $"),
    equals("--use-torch-fsdp2", "--zero-stage 3"),
    equals("--torch-fsdp2-no-reshard-after-forward", "--zero3-keep-gathered"),
    equals("--megatron-fsdp-main-grads-dtype", "--main-grads-dtype $"),
    equals("--megatron-fsdp-grad-comm-dtype", "--grad-reduce-in-bf16 $"),
    equals("--cpu-optimizer", "--optimizer-cpu-offload"),
    equals("--cross-entropy-fusion-impl", "--fused-linear-cross-entropy $"),
    equals("--mlp-chunks-for-training", "--tiled-mlp $"),
    equals("--yaml-cfg", "--config $"),
    equals("--disable-manual-gc-eval", "--no-manual-gc-eval"),
    equals("--moe-expert-parallel-size", "--expert-model-parallel-size $"),
    equals("--moe-layer-recompute", "--recompute-granularity selective --recompute-modules moe"),
    # forks of Megatron-LM
    equals("--sliding-window", "--window-size $"),
    equals("--use-z-loss", "--z-loss-coeff 1e-4"),
    equals("--rope-theta", "--rotary-base $"),
    equals("--rope-factor", "--rope-scaling-factor $"),
    equals(
        "--rope-original-max-positional-embeddings", "--rope-original-max-position-embeddings $"
    ),
    equals("--qk-nope-head-dim", "--qk-head-dim $"),
    equals("--qk-rope-head-dim", "--qk-pos-emb-head-dim $"),
    equals("--pad-vocab-size-to", "--padded-vocab-size $"),
    equals("--tokenizer-name-or-path --tokenizer-file", "--tokenizer-model $"),
    equals("--wandb-name --wandb-run-name", "--wandb-exp-name $"),
    equals("--wandb-group-name", "--wandb-group $"),
    equals("--wandb-project-name", "--wandb-project $"),
    equals("--wandb-entity-name --wandb-organization", "--wandb-entity $"),
    equals("--rms-norm-eps", "--norm-epsilon $"),
    equals("--use-rms-norm --RMSNorm", "--normalization RMSNorm"),
)

# Flags whose meaning depends on their value: mostly of forks of Megatron-LM.
CHOICES = (
    choice(
        "--attention-head-type",
        "give --num-query-groups, the number of key/value heads",
        multihead="",
        multiquery="--group-query-attention --num-query-groups 1",
    ),
    choice(
        "--use-torch-compile",
        "expected 0 or 1",
        none="--torch-compile",
        _0="",
        _1="--torch-compile",
        false="",
        true="--torch-compile",
    ),
    choice(
        "--train-mode",
        "instruction tuning is not supported; use --train-mode pretrain",
        pretrain="",
    ),
    choice(
        "--dataset",
        "only Megatron's .bin/.idx files are read; prepare them with tools/preprocess_data.py",
        mmap="",
        **{"llama-pretrain-idxmap": ""},
    ),
    choice(
        "--patch-tokenizer-type",
        "give --tokenizer-type and --tokenizer-model",
        **dict.fromkeys(
            "llamatokenizer llama2tokenizer llama3tokenizer qwentokenizer qwen2tokenizer "
            "qwen2vltokenizer qwen3tokenizer mistraltokenizer mixtraltokenizer falcontokenizer "
            "deepseekv2tokenizer opttokenizer bloomtokenizerfromhf "
            "startcodertokenizerfromhf starcodertokenizerfromhf".split(),
            "--tokenizer-type HuggingFaceTokenizer",
        ),
        gpt2bpetokenizer="--tokenizer-type GPT2BPETokenizer",
    ),
)

# Flags that are read with a file or with the rest of the command line.
TOGETHER = (
    named_file("--data-args-path", "--data-path with the words of the file"),
    named_file(
        "--per-split-data-args-path",
        "--train-data-path, --valid-data-path and --test-data-path with the words under train, "
        "valid and test of the JSON file",
    ),
    named_file(
        "--data-file-list",
        "--data-path with the weight and the prefix of each line of the file; a third word, the "
        "corpus, is not needed",
    ),
    together(
        "--extra-vocab-size",
        "--padded-vocab-size with this number of rows more than the tokenizer.json has without its "
        "added tokens; nothing for 0",
    ),
    together(
        "--train-tokens --lr-decay-tokens --lr-warmup-tokens",
        "the samples of --seq-length that hold these tokens: --train-samples (the shorter of the "
        "lengths that are given), --lr-decay-samples and --lr-warmup-samples",
    ),
    together(
        "--topk --expert-interval --moe-loss-coeff --moe-train-capacity-factor "
        "--moe-eval-capacity-factor --moe-min-capacity --disable-moe-token-dropping "
        "--disable-moe-top2-2nd-expert-sampling --create-moe-param-group --mlp-type --use-tutel "
        "--enable-expert-tensor-parallelism",
        "Megatron-DeepSpeed's experts, with its defaults where a flag is missing: "
        "--moe-router-topk 1 --moe-router-pre-softmax, experts in every second layer "
        "(--moe-layer-freq), --moe-aux-loss-coeff 0.1, --moe-expert-capacity-factor 1 and "
        "--expert-tensor-parallel-size 1",
    ),
)

NOTES = (
    note(
        "--use-mcore-models --use-legacy-models --transformer-impl --spec --enable-experimental",
        "there is one implementation of the model here",
    ),
    note(
        "--no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion "
        "--no-rope-fusion --no-persist-layer-norm "
        "--no-gradient-accumulation-fusion --cross-entropy-loss-fusion --fused-residual-rmsnorm "
        "--use-fused-weighted-squared-relu --use-te-activation-func "
        "--use-transformer-engine-op-fuser --disable-jit-fuser "
        "--disable-mem-efficient-ln --use-grouped-gemm-for-dense-mlp --onnx-safe",
        "a choice of kernels, which are chosen here",
    ),
    note(
        "--no-bias-gelu-fusion",
        "--activation gelu is the exact (erf) form here, as in Megatron's path without fusion",
    ),
    note(
        "--attention-softmax-in-fp32 --apply-query-key-layer-scaling --no-query-key-layer-scaling",
        "the softmax is in fp32, where scaling by the layer number cancels",
    ),
    note(
        "--accumulate-allreduce-grads-in-fp32",
        (
            "gradients are accumulated and sent in fp32 without --main-grads-dtype bf16 or "
            "--grad-reduce-in-bf16"
        ),
        when=lambda config: (
            config.optimizer.main_grads_dtype == "fp32"
            and not config.distributed.grad_reduce_in_bf16
        ),
        otherwise=(
            "contradicts --grad-reduce-in-bf16 or --main-grads-dtype bf16, whichever is "
            "given; drop one of them"
        ),
    ),
    note(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        "gradients are summed over ranks in fp32 here, whatever they are sent in",
    ),
    note(
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
        "every gradient is accumulated in fp32 here without --main-grads-dtype bf16",
        when=lambda config: config.optimizer.main_grads_dtype == "fp32",
        otherwise=(
            "contradicts --main-grads-dtype bf16, which holds for every gradient; drop one of them"
        ),
    ),
    note(
        "--use-precision-aware-optimizer",
        "--main-grads-dtype, --exp-avg-dtype and --exp-avg-sq-dtype act without it",
    ),
    note(
        "--use-megatron-fsdp --use-custom-fsdp",
        "--zero-stage (or --data-parallel-sharding-strategy) says what is sharded",
    ),
    note("--fp16-lm-cross-entropy", "the loss is computed in fp32 here"),
    note(
        "--calculate-per-token-loss",
        "the loss is always the mean over all tokens of the global batch here",
    ),
    note(
        "--apply-layernorm-1p",
        "storing the scale minus one gives the same model, since norms take no weight decay",
    ),
    note(
        "--no-position-embedding",
        "rotary positions have no table",
        when=lambda config: config.model.position_embedding_type != "learned_absolute",
        otherwise="use --position-embedding-type rope or none",
    ),
    note(
        "--tp-comm-* --no-tp-comm-* --disable-tp-comm-*",
        (
            "how the collectives of tensor parallelism run is chosen here; --no-tp-comm-overlap "
            "takes them out from beside the matrix products"
        ),
    ),
    note(
        "--scattered-embeddings "
        "--no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding",
        "--sequence-parallel divides the embedding's output over the tensor-parallel ranks",
    ),
    note(
        "--use-ring-exchange-p2p --overlap-p2p-communication --no-overlap-p2p-communication "
        "--overlap-p2p-communication-warmup-flush "
        "--pipeline-model-parallel-comm-backend --no-scatter-gather-tensors-in-pipeline",
        (
            "messages between pipeline ranks always travel beside the computation; under "
            "--sequence-parallel each rank sends its part"
        ),
    ),
    note(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "an order of the same computations, which --pipeline-schedule interleaved sets itself",
    ),
    note(
        "--defer-embedding-wgrad-compute --wgrad-deferral-limit --delay-wgrad-compute",
        (
            "when weight gradients are computed is a matter of the schedule: see "
            "--pipeline-schedule zero-bubble"
        ),
    ),
    note(
        "--enable-zbh1-exact-semantics",
        (
            "every schedule here clips and steps after all gradients are known, with nothing to "
            "roll back"
        ),
    ),
    note(
        "--no-pipeline-parallel",
        "there is one pipeline rank",
        when=lambda config: config.distributed.pipeline_model_parallel_size == 1,
        otherwise="contradicts --pipeline-model-parallel-size above 1; drop one of them",
    ),
    note(
        "--standalone-embedding-stage",
        "there is one pipeline rank",
        when=lambda config: config.distributed.pipeline_model_parallel_size == 1,
        otherwise=(
            "give --pipeline-model-parallel-layout with a first stage E, as in E|(ttt|)*6tttL"
        ),
    ),
    note(
        "--no-align-grad-reduce --disable-align-grad-reduce --no-align-param-gather "
        "--delay-param-gather --no-delay-grad-reduce",
        (
            "when collectives of data parallelism run follows from the schedule: see "
            "--overlap-grad-reduce"
        ),
    ),
    note(
        ("--max-seqlen-per-dp-cp-rank --force-ds-sequence-parallel"),
        "concerns kinds of context parallelism that are not built",
    ),
    note(
        "--overlap-param-gather-with-optimizer-step --no-use-layer-wise-param-layout",
        (
            "the weights of each layer are gathered as soon as it has been updated: see "
            "--overlap-param-gather"
        ),
    ),
    note(
        "--ddp-* --DDP-impl --no-contiguous-buffers-in-local-ddp "
        "--use-contiguous-buffers-in-ddp --no-gradient-reduce-div-fusion "
        "--suggested-communication-unit-size "
        "--zero-contigious-gradients --zero-reduce-bucket-size --zero-allgather-bucket-size "
        "--megatron-fsdp-* --fsdp-*",
        (
            "gradients and weights travel layer by layer, in buffers of a layer's size: there "
            "is no bucket to choose"
        ),
    ),
    note("--zero-reduce-scatter", "gradients are always reduce-scattered"),
    note(
        "--use-pin-memory --no-pin-cpu-grads --no-pin-cpu-params "
        "--overlap-cpu-optimizer-d2h-h2d --use-torch-optimizer-for-cpu-offload",
        (
            "how the offloaded optimizer steps and moves its data is chosen here: see "
            "--optimizer-cpu-offload"
        ),
    ),
    note(
        "--disable-symmetric-registration --create-all-gather-group "
        "--disable-gloo-process-groups --local-rank --lazy-mpu-init "
        "--no-flight-recorder-* --disable-flight-recorder-*",
        (
            "process groups and device are set up here; NCCL's own settings are its environment "
            "variables"
        ),
    ),
    note(
        (
            "--deepspeed --deepscale --deepspeed-activation-checkpointing "
            "--synchronize-each-layer --ds-fused-adam --cpu-torch-adam"
        ),
        "DeepSpeed is not used; training is the same without it",
    ),
    note(
        "--tokenizer-hf-include-special-tokens --tokenizer-hf-no-include-special-tokens",
        (
            "training reads token ids: give it to tools/preprocess_data.py, which adds special "
            "tokens only with --tokenizer-hf-include-special-tokens (Megatron-LM: by default)"
        ),
    ),
    note(
        "--num-workers --data-cache-path --no-mmap-bin-files --mmap-warmup "
        "--no-create-attention-mask-in-dataloader "
        "--dataloader-fast-cache-load --dataloader-defer-npy-index-mmap "
        "--num-dataset-builder-threads --per-dataset-sequences-path --mid-level-dataset-surplus "
        "--object-storage-cache-path --enable-msc --disable-msc "
        "--no-data-sharding --s3-cache-path --renormalize-blend-weights",
        "data order is computed: there is no index to build, cache or prefetch",
    ),
    note(
        "--decrease-batch-size-if-needed",
        (
            "the global batch is never made smaller: one that micro-batch-size x data-parallel "
            "ranks does not divide is refused"
        ),
    ),
    note(
        (
            "--exit-signal-handler --exit-signal-handler-for-training "
            "--exit-signal-handler-for-dataloader"
        ),
        "SIGTERM and SIGUSR1 always save and exit",
    ),
    note(
        "--log-throughput --no-log-loss-scale-to-tensorboard "
        "--disable-log-loss-scale-to-tensorboard --log-validation-ppl-to-tensorboard "
        "--log-memory-to-tensorboard "
        "--log-memory-interval --log-world-size-to-tensorboard --log-batch-size-to-tensorboard "
        "--no-log-learnig-rate-to-tensorboard --no-log-learning-rate-to-tensorboard "
        "--tensorboard-queue-size --timing-log-option --no-barrier-with-level-1-timing "
        "--logging-level",
        "logging is fixed here: docs/logging.md lists the metrics that are always written",
    ),
    note("--no-one-logger", "there is no such service here to be switched off"),
    note(
        "--use-mpi --deepspeed-mpi",
        "ranks are read from the environment that the launcher sets",
    ),
    note(
        "--pp-partition-method",
        "which pipeline rank has which layers changes no result; "
        "--pipeline-model-parallel-layout chooses",
    ),
    note(
        "--use-fused-sdpa --use-fused-sdpa-with-recompute --use-fused-rmsnorm "
        "--abort-on-unmet-fused-kernel-constraints --use-torch-compiled-autograd "
        "--compiled-autograd-fallback-mode --use-fast-softmax --cache-fp8-weight",
        "a choice of kernels, which are chosen here",
    ),
    note(
        "--verify-checkpoint --verify-checkpoint-model-type",
        "every checkpoint is verified by its digests when it is read",
    ),
    note("--max-padding-length", "samples are never padded"),
    note("--shuffle-sample-in-corpus", "samples of all corpora are always shuffled"),
    note(
        "--straggler-* --disable-straggler-on-startup",
        "slow ranks are looked for from the first step on, without a port, and one is named; "
        "--no-log-straggler switches that off",
    ),
    note(
        (
            "--calc-ft-timeouts --ft-* --inprocess-* --result-rejected-tracker-filename "
            "--adlr-autoresume-interval"
        ),
        "acts only together with a main switch, which is refused",
    ),
    note("--legacy-tokenizer", "the tokenizers are those of --tokenizer-type"),
    note(
        "--tokenizer-hf-use-fast --trust-remote-code",
        "a Hugging Face tokenizer is read from tokenizer.json alone, and no code of its folder is "
        "run",
    ),
    note(
        "--no-save-rng --no-load-rng --te-rng-tracker --inference-rng-tracker",
        "there is no random state: every draw is computed",
    ),
    note(
        "--ckpt-format --dist-ckpt-* --distrib-optim-* --use-dist-ckpt "
        "--auto-detect-ckpt-format --async-* --use-persistent-ckpt-worker "
        "--ckpt-fully-parallel-* --no-ckpt-fully-parallel-save "
        "--ckpt-assume-constant-structure --ckpt-pg-tensors-* "
        "--ckpt-drop-redundant-extra-state --no-ckpt-load-validate-sharding-integrity "
        "--disable-ckpt-load-validate-sharding-integrity --no-save-tokenizer-assets "
        "--disable-save-tokenizer-assets --no-strict-fsdp-dtensor-load "
        "--disable-strict-fsdp-dtensor-load "
        "--universal-checkpoint --non-persistent-local-ckpt-algo --replication-jump "
        "--replication-factor",
        "checkpoints have one format here, verified and independent of the layout",
    ),
    note(
        "--use-cpu-initialization --init-model-with-meta-device",
        "initial weights do not depend on the device or the layout",
    ),
    note("--multiple-validation-sets", "every validation source always has its own loss"),
    note(
        "--moe-grouped-gemm --moe-permute-fusion --moe-router-fusion --moe-use-grouped-tensor "
        "--moe-single-grouped-weight --use-grouped-gemm-for-shared-expert",
        "how the products of experts are made follows from their sizes and the device",
    ),
    note(
        "--moe-pad-expert-input-to-capacity --moe-router-padding-for-fp8 "
        "--moe-router-padding-for-quantization",
        "rows of experts need no padding, which changes no number",
    ),
    note(
        "--moe-enable-deepep --moe-flex-dispatcher-backend --moe-flex-dispatcher-num-sms "
        "--moe-deepep-num-sms --moe-hybridep-* --moe-permute-fusion-into-hybridep "
        "--moe-ncclep-zero-copy",
        "tokens are sent by the collectives of --distributed-backend",
    ),
    note(
        "--moe-* --ep-overlap-early-attn-memory-release --high-priority-a2a-comm-stream",
        "acts only in mixture-of-experts models (--num-experts)",
        when=lambda config: config.model.num_experts in (None, 1),
        otherwise="not supported; drop it (docs/flags.md lists what routers and experts take)",
    ),
    not_done(
        "--moe-shared-expert-overlap --overlap-dispatch-backward-with-experts-wgrad",
        "a layer's own products do not run beside its tokens on their way to experts; those of "
        "another micro-batch do with --overlap-moe-expert-parallel-comm",
    ),
    note(
        "--fp4-* --reuse-grad-buf-for-mxfp8-param-ag",
        "acts only with --fp4-format or mxfp8, which are refused",
    ),
    note(
        "--fp8-amax-compute-algo --fp8-amax-history-len --fp8-interval --fp8-margin "
        "--fp8-quantizer-factory",
        "acts only with --fp8-recipe delayed or custom, which are refused: a scale is that of the "
        "numbers themselves",
    ),
    note(
        "--keep-fp8-transpose-cache --keep-fp8-transpose-cache-when-using-custom-fsdp",
        "transposed copies are made where they are read, and not kept",
    ),
    note(
        "--inference-* --disable-chunked-prefill --no-inference-* --use-legacy-static-engine "
        "--max-tokens-to-oom "
        "--decode-only-cuda-graphs --enable-chunked-prefill --num-speculative-tokens "
        "--flash-decode --mamba-inference-* --mlp-chunks-for-prefill --nccl-all-reduce-for-prefill "
        "--use-same-sampling-seed-across-dp-ranks --ds-inference",
        "concerns inference, which does not take part in pretraining",
    ),
    note(
        "--muon-* --lion-* --qk-clip-* --mtp-* --mup-* --dsa-* --no-dsa-* --disable-dsa-* "
        "--mhc-* --linear-* --mamba-* "
        "--disable-mamba-mem-eff-path --gdp-* --fim-* --relative-attention-* "
        "--yarn-correction-range-round-to-int "
        "--cpu-offloading-retain-pinned-cpu-buffers --gtp-* --batch-invariant-backend "
        "--ds-sequence-parallel-fpdt-* --error-injection-type --tokenizer-special-tokens "
        "--chat-template "
        "--sft-tokenizer-prompt-format --logits-* --bert-no-binary-head --mask-prob "
        "--short-seq-prob --sample-rate",
        "acts only together with a main switch, which is refused",
    ),
    note("--use-pytorch-profiler", "--profile always takes torch's profiler"),
    note(
        "--memory-snapshot-path",
        "snapshots of --record-memory-history are in --profile-dir, one a rank",
    ),
    note(
        "--fine-grained-offloading-max-inflight-offloads",
        "what one pass sends to the host has the time of the next pass, see --activation-offload",
    ),
    note(
        "--delay-offload-until-cuda-graph",
        "acts only with CUDA graphs, which --activation-offload does not combine with",
    ),
    note(
        "--tiktoken-*",
        "acts only with the TikTokenizer",
        when=lambda config: config.data.tokenizer_type != "TikTokenizer",
        otherwise="pattern and special tokens of the TikTokenizer cannot be chosen; drop it",
    ),
)

# Services: the result does not depend on them, but who asks for one must hear that it is missing.
NOT_DONE = (
    not_done(
        "--fp8-param-gather",
        "weights are gathered and kept in --bf16, whatever their products are formed of",
    ),
    not_done(
        "--pytorch-profiler-collect-chakra --nvtx-ranges --profile-backward --profile-steps",
        "--profile writes Chrome traces of torch's profiler alone, with named passes and "
        "collectives",
    ),
    not_done(
        "--log-timers-to-tensorboard",
        "no timer is logged; give --timing-log-level 1 as well",
        when=lambda config: config.logging.timing_log_level > 0,
        otherwise="timers are logged with the other metrics",
    ),
    not_done(
        "--log-energy --log-max-attention-logit --log-optimizer-states-to-tensorboard "
        "--log-device-memory-used --log-progress "
        "--config-logger-dir --dump-param-to-param-group-map",
        "not logged or written; docs/logging.md lists the metrics that are",
    ),
    not_done(
        "--gpu-sniff-test-interval",
        "no GPU is tested during a run; --log-straggler, on by default, names a slow rank",
    ),
    not_done(
        "--run-workload-inspector-server --enable-one-logger --one-logger-* --app-tag-* --otel-*",
        (
            "no such service is started or reported to; use --wandb-project, --tensorboard-dir "
            "or metrics.jsonl"
        ),
    ),
    not_done(
        "--enable-cuda-graph --external-cuda-graph --optimizer-cuda-graph --cuda-graph-*",
        "no CUDA graph is captured because of it; --cuda-graphs captures transformer layers",
        quiet="none",
    ),
    not_done(
        "--use-flash-attn --use-flash-attn-v1 --use-flash-attn-v2 --use-flash-attn-triton "
        "--use-flash-attn-builder "
        "--flash-attention-version --use-kitchen-attention --kitchen-attention-backend",
        "with attention dropout or --attn-logit-softcapping, --attention-backend auto may "
        "take plain attention (the line "
        "kernels says which is taken); give --attention-dropout 0 and no soft-capping, or "
        "--attention-backend triton",
        when=lambda config: (
            config.model.attention_backend not in ("auto", "plain")
            or (
                config.model.attention_backend == "auto"
                and config.model.attention_dropout == 0
                and config.model.attn_logit_softcapping is None
            )
        ),
        otherwise="--attention-backend auto takes the fastest kernel that supports the settings",
    ),
    not_done(
        "--contigious-checkpointing --split-transformers",
        "it saves no memory here; --sequence-parallel and --recompute-granularity full do",
        quiet="1",
    ),
    not_done(
        "--memory-centric-tiled-linear --tile-factor",
        "--zero-stage 3 gathers the weights of one transformer layer at a time, and no matrix in "
        "parts; --tensor-model-parallel-size makes a layer's weights smaller, --tiled-mlp what "
        "the MLP makes of them, --fused-linear-cross-entropy the logits",
        quiet="1",
    ),
    not_done(
        "--kill-switch-file --kill-switch-path",
        "no file ends a run; send SIGTERM or SIGUSR1, which save and exit",
    ),
    not_done("--codecarbon-dir", "the energy that a run takes is not measured"),
    not_done("--empty-unused-memory-level", "torch's allocator keeps its unused memory", quiet="0"),
    not_done(
        "--train-sync-interval",
        "the host waits for the GPU at each logged iteration and at no other",
    ),
    not_done(
        "--nccl-communicator-config-path --use-sharp --sharp-enabled-group --use-nccl-ub "
        "--symmetric-ar-type",
        "NCCL is used with its defaults; its environment variables and NCCL_CONF_FILE change them",
    ),
    not_done(
        "--high-priority-stream-groups",
        "the groups that computation waits for have them: those of tensor parallelism and of ZeRO",
    ),
    not_done(
        "--distributed-timeout-seconds-after-init",
        "--distributed-timeout-minutes holds for the whole run",
    ),
    not_done(
        "--flight-recorder-*",
        "the environment variables of PyTorch's flight recorder (TORCH_NCCL_TRACE_BUFFER_SIZE, "
        "TORCH_NCCL_DUMP_ON_TIMEOUT) switch it on",
    ),
)

_LATER = "not built yet"
ONLY = (
    only(
        "--tensor-parallel-num-weight-shards",
        "1",
        f"sharding weights further than over the tensor-parallel ranks is {_LATER}",
    ),
    only(
        "--num-distributed-optimizer-instances",
        "1",
        (
            "give --zero-shard-size with the data-parallel ranks of one instance: all of them / "
            "instances"
        ),
    ),
    only(
        "--outer-dp-sharding-strategy",
        "no_shard",
        "copies made by --zero-shard-size share nothing; drop that to shard over all ranks",
    ),
    only(
        "--remote-device",
        "none",
        "use --param-cpu-offload, which keeps weights in host memory between their uses",
    ),
    only(
        "--num-experts-switch --expert-tensor-parallel-num-weight-shards",
        "1",
        "not supported; experts are --num-experts and --expert-tensor-parallel-size",
    ),
    only(
        "--data-impl",
        "mmap infer",
        "only Megatron's memory-mapped .bin/.idx files are read; preprocess again",
    ),
    only("--dataloader-type", "single", "data order is always computed from the seed"),
    only("--softmax-type", "vanilla", "attention sinks are not supported"),
    only("--exit-signal", "SIGTERM SIGUSR1", "SIGTERM and SIGUSR1 save and exit"),
    only(
        "--main-params-dtype --megatron-fsdp-main-params-dtype",
        "fp32",
        "master weights are fp32; to save memory shard them with --zero-stage 1",
    ),
    only(
        "--cpu-offloading-num-layers",
        "0",
        "use --activation-offload --activation-offload-fraction SHARE, the number of layers / "
        "--num-layers",
    ),
    only(
        "--delta-offload-bytes-across-pp-ranks",
        "0",
        "every pipeline rank keeps the same share of its layers on the host; drop it",
    ),
    only(
        "--vocab-extra-ids --error-injection-rate --mtp-num-layers",
        "0",
        "not supported; drop it",
    ),
    only(
        "--rerun-mode",
        "disabled",
        "no step is computed twice to compare results; NaN and Inf are checked always "
        "(--nan-policy), and tools/compare_runs.py compares two runs",
    ),
    only(
        (
            "--encoder-tensor-model-parallel-size --encoder-pipeline-model-parallel-size "
            "--hybrid-attention-ratio --hybrid-mlp-ratio"
        ),
        "0 0.0",
        "every layer is the same decoder layer; drop it",
    ),
    only("--glu-linear-offset", "0 0.0", "not supported; drop it"),
    only(
        "--fim-rate",
        "0 0.0",
        "documents are not rearranged for infilling (fill-in-the-middle); prepare such data "
        "before tools/preprocess_data.py",
    ),
)

REFUSED = (
    refused("--warmup", "use --lr-warmup-fraction: a share of the decay, not a percentage"),
    refused(
        "--head-lr-mult",
        "it is of a classification head, which no model here has; drop it, or give the output "
        "layer's matrix and the word embedding their own rate with --decoupled-lr",
    ),
    refused(
        "--use-mp-args-from-checkpoint-args --no-use-tokenizer-model-from-checkpoint-args "
        "--disable-use-tokenizer-model-from-checkpoint-args",
        "settings come from the command line; save them with --print-config "
        "and read them with --config FILE",
    ),
    refused("--pretrained-checkpoint", "use --load DIR --finetune"),
    refused("--reset-iteration", "use --finetune"),
    refused("--override-ckpt-iteration --load-tag", "use --ckpt-step ITERATION"),
    refused(
        "--load-main-params-from-ckpt --ckpt-convert-* --replication "
        "--save-params-interval --save-activations-interval --save-wgrads-interval "
        "--save-dgrads-interval --save-tokens-per-expert-interval",
        "not supported; drop it",
    ),
    refused("--non-persistent-*", "use --local-checkpoint-dir DIR --local-save-interval N"),
    refused(
        "--enable-full-sharding-in-hsdp",
        "ZeRO shards over all data-parallel ranks without --zero-shard-size; drop it",
    ),
    refused(
        "--offload-optimizer-states", "use --optimizer-cpu-offload, which steps them in host memory"
    ),
    refused(
        "--moe-paged-stash",
        "--activation-offload keeps activations in host memory",
    ),
    refused(
        "--pipeline-model-parallel-split-rank",
        (
            "every layer is a decoder layer; say which rank has which with "
            "--pipeline-model-parallel-layout"
        ),
    ),
    refused(
        "--hybrid-context-parallel --ds-sequence-parallel-fpdt",
        "chunks of a sequence that take turns on the device are not supported; "
        "--ds-sequence-parallel-size divides it over ranks, and --tiled-mlp, "
        "--activation-offload and --recompute-granularity full save memory",
    ),
    refused(
        "--output-logit-dtype --embedding-weights-in-fp32 --fp32-residual-connection",
        "precision is what --bf16, --fp16 or --fp64 say (with fp32 master weights); drop it",
    ),
    refused("--fp8-output-proj", "the head's product stays in --bf16; drop it"),
    refused(
        "--fp4-format --fp4-param-gather --te-precision-config-file --kitchen-*",
        "fp4 is not supported; use --bf16, with or without --fp8-format",
    ),
    refused(
        "--quick-geglu --activation-func-clamp-value",
        "not an activation here; choose one with --activation",
    ),
    refused(
        "--init-method-xavier-uniform --embedding-init-method-std --no-initialization --use-mup "
        "--adjust-word-embedding-init --word-embedding-init-std",
        "every weight is drawn from normal(0, --init-method-std), residual outputs scaled by "
        "depth; another initialization is not supported",
    ),
    refused("--data-parallel-random-init", "all replicas start from the same weights; drop it"),
    refused(
        (
            "--rotary-interleaved --no-rope-freq --mrope-section "
            "--no-yarn-correction-range-round-to-int"
        ),
        "rotary positions are half-split and the same in every layer; drop it",
    ),
    refused("--window-attn-skip-freq", "the window is the same in every layer; drop it"),
    refused(
        "--qk-l2-norm --qk-clip",
        "not a variant of attention here; --qk-layernorm normalizes queries and keys with weights",
    ),
    refused(
        "--embed-layernorm --embedding-layernorm --use-embedding-scaling",
        "a norm or a scale after the embedding is not supported",
    ),
    refused(
        "--train-weighted-split-paths-path --valid-weighted-split-paths-path "
        "--test-weighted-split-paths-path --train-weighted-split-paths "
        "--valid-weighted-split-paths --test-weighted-split-paths",
        "give --train-data-path, --valid-data-path or --test-data-path with WEIGHT PREFIX WEIGHT "
        "PREFIX ...; a range of a file's documents is not supported, --split divides --data-path",
    ),
    refused(
        "--check-weight-hash-across-dp-replicas-interval",
        "the weights of replicas are not compared during a run; drop it",
    ),
    refused(
        "--inprocess-restart --enable-ft-package --adlr-autoresume",
        "a job that fails is started again by its launcher (torchrun --max-restarts, "
        "scripts/train.sbatch) and resumes from its "
        "newest checkpoint; SIGTERM and SIGUSR1 save and exit; drop it",
    ),
    refused("--inference", "use --skip-train to evaluate, or tools/generate.py"),
    refused(
        "--disable-bf16-reduced-precision-matmul",
        "matrix products of bf16 are summed as torch's defaults say; drop it",
    ),
    refused(
        "--export-* --modelopt-enabled --qad-train-target --finetune-hf-dataset "
        "--finetune-data-split --finetune-data-files "
        "--freeze-base-for-mtp --enable-gpt-oss --load-model-opt-format",
        "quantisation and export with NVIDIA's Model Optimizer are not supported",
    ),
    refused(
        (
            "--attention-output-gate --apply-residual-connection-post-layernorm "
            "--enable-mhc-connections --batch-invariant-mode"
        ),
        "not a variant of the model here; drop it",
    ),
    refused(
        "--no-weight-decay-cond-type --apply-wd-to-qk-layernorm",
        "biases and one-dimensional parameters take no weight decay; drop it",
    ),
    refused(
        "--iterations-to-skip --freeze-all-layers --sft --fim-data "
        "--data-efficiency-curriculum-learning --random-ltd --train-idx-path "
        "--train-desc-path --train-doc-idx-path --train-sample-idx-path "
        "--train-shuffle-idx-path --repeated-dataloader "
        "--train-data-exact-num-epochs --return-data-index --use-dataset-only "
        "--phase-transition-iterations --aml-data-download-path",
        "not supported; drop it",
    ),
    refused(
        "--dataloader-inter-document-masking",
        "use --reset-attention-mask (and --reset-position-ids)",
    ),
    refused("--allow-ambiguous-pad-tokens", "samples are never padded; drop it"),
    refused(
        "--eval-global-batch-size --eval-micro-batch-size",
        "evaluation uses the training batch sizes; drop it",
    ),
    refused(
        "--start-eval-at-iter --full-validation --validation-set-names --test-mode",
        (
            "evaluation is --eval-iters global batches every --eval-interval iterations, for "
            "each source by its name; drop it"
        ),
    ),
    refused(
        "--null-tokenizer-eod-id --null-tokenizer-pad-id",
        "the NullTokenizer's end of document is --vocab-size; drop it",
    ),
    refused(
        "--tokenizer-metadata --tokenizer-sentencepiece-legacy "
        "--no-tokenizer-sentencepiece-ignore-extra-whitespaces "
        "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces --tokenizer-hf-* "
        "--use-gigatoken",
        "the tokenizer's own file decides; drop it",
    ),
    refused(
        "--check-for-spiky-loss --check-for-large-grads --fault-injector-* --fake-process-group",
        "not supported; NaN and Inf are checked always (--nan-policy); drop it",
    ),
    refused(
        "--moe-use-upcycling --moe-upcycling-granularity",
        "a dense checkpoint does not become a mixture of experts here; drop it",
    ),
    refused(
        "--mla-* --cache-mla-latents",
        "a way of computing latent attention that is not built; drop it",
    ),
    refused(
        "--is-hybrid-model --hybrid-layer-pattern --hybrid-override-pattern "
        "--experimental-attention-variant "
        "--heterogeneous-* --linear-attention-freq --mtp-standalone",
        "every layer is the same attention and MLP block",
    ),
    refused(
        "--retro-* --retriever-* --biencoder-* --ict-* --bert-* --output-bert-embeddings "
        "--titles-data-path --query-in-block-prob "
        "--use-one-sent-docs --evidence-data-path --block-data-path --embedding-path --indexer-*",
        "retrieval and BERT models are not supported",
    ),
    refused(
        "--vision-* --num-classes --img-h --img-w --img-dim --num-channels --patch-dim "
        "--classes-fraction --data-per-class-fraction "
        "--swin-backbone-type --mask-type --mask-factor --iter-per-epoch --dino-*",
        "vision models are not supported",
    ),
    refused(
        "--rl-* --no-rl-* --grpo-* --langrl-* --perform-rl-step --refit-method",
        "reinforcement learning is not supported",
    ),
    refused(
        "--logits-save-dir --logits-load-dir --mos --kd --kd-* --load-teacher "
        "--num-layers-teacher --num-experts-teacher "
        "--hidden-size-teacher --num-attention-heads-teacher",
        "distillation is not supported",
    ),
    refused("--deepscale-config", "use --deepspeed_config"),
)

TABLE: tuple[CompatibilityRow, ...] = (
    *EQUALS,
    *CHOICES,
    *TOGETHER,
    *NOTES,
    *NOT_DONE,
    *ONLY,
    *REFUSED,
)

# Other values of our own flags: (flag, word) -> our word, and a note if the meaning deserves one.
VALUES: dict[tuple[str, str], tuple[str, str]] = {
    ("--tokenizer-type", "Llama2Tokenizer"): ("SentencePieceTokenizer", ""),
    ("--tokenizer-type", "GPTSentencePieceTokenizer"): ("SentencePieceTokenizer", ""),
    ("--tokenizer-type", "Llama3Tokenizer"): ("TikTokenizer", ""),
    **{
        ("--tokenizer-type", theirs): ("HuggingFaceTokenizer", "")
        for theirs in ("HFTokenizer", "PretrainedFromHF", "TokenizerFromFile")
    },
    **{
        ("--optimizer", theirs): ("adam", "")
        for theirs in ("adamw", "fusedadam", "fusedadamw", "Adam", "AdamW", "apex.fusedadam")
    },
    **{
        ("--distributed-backend", theirs): ("auto", f"--distributed-backend {theirs} is auto here")
        for theirs in ("ccl", "hccl", "xccl", "rccl")
    },
    ("--moe-token-dispatcher-type", "flex"): (
        "alltoall",
        "--moe-token-dispatcher-type flex is alltoall here, which sends the same rows",
    ),
    ("--normalization", "layernorm"): ("LayerNorm", ""),
    ("--normalization", "rmsnorm"): ("RMSNorm", ""),
    ("--attention-backend", "flash"): ("auto", ""),
    ("--attention-backend", "fused"): ("auto", ""),
    ("--attention-backend", "unfused"): ("plain", "--attention-backend unfused is plain here"),
    ("--attention-backend", "local"): ("plain", "--attention-backend local is plain here"),
    ("--cp-comm-type", "all_gather"): ("allgather", ""),
    ("--zero-stage", "no_shard"): ("0", ""),
    ("--zero-stage", "optim"): ("1", ""),
    ("--zero-stage", "optim_grads"): ("2", ""),
    ("--zero-stage", "optim_grads_params"): ("3", ""),
    ("--grad-reduce-in-bf16", "fp32"): ("false", ""),
    ("--grad-reduce-in-bf16", "bf16"): ("true", ""),
    ("--fused-linear-cross-entropy", "linear"): ("true", ""),
    ("--fused-linear-cross-entropy", "native"): ("false", ""),
    ("--fused-linear-cross-entropy", "te"): (
        "false",
        "--cross-entropy-fusion-impl te: --cross-entropy-backend chooses the kernel of the loss",
    ),
    ("--timing-log-level", "2"): ("1", ""),
}

# What such a value asks for beside our word: the row that answers it.
ASKS: dict[tuple[str, str], CompatibilityRow] = {
    **dict.fromkeys(
        (("--attention-backend", "flash"), ("--attention-backend", "fused")),
        next(row for row in NOT_DONE if "--use-flash-attn" in row.flags),
    ),
    ("--timing-log-level", "2"): not_done(
        "", "there are no finer timers than those of level 1, which are logged"
    ),
}

# Values that are refused, with what to give instead.
INSTEAD: dict[tuple[str, str], str] = {
    **{
        ("--recompute", word): f"auto chooses; give --recompute-granularity {word} for that"
        for word in ("full", "selective")
    },
    **{
        ("--recompute-modules", word): f"{word} is a part of {what}; drop the word{instead}"
        for word, what, instead in (
            ("shared_experts", "what mlp recomputes here", ", or give mlp"),
            ("gdn_norm_out", "gated delta nets, which are not built", ""),
            ("gdp_in_proj", "gated delta nets, which are not built", ""),
            ("gdp_qkv", "gated delta nets, which are not built", ""),
            ("mhc", "hyper-connections, which are not built", ""),
        )
    },
    **{
        ("--offload-modules", word): "of experts nothing is offloaded; recompute it with "
        f"--recompute-modules {ours}"
        for word, ours in (
            ("expert_fc1", "moe"),
            ("moe_act", "moe_act"),
            ("fused_group_mlp", "moe"),
        )
    },
    (
        "--position-embedding-type",
        "alibi",
    ): "ALiBi is not supported; choose learned_absolute, rope, yarn or none",
    ("--position-embedding-type", "mrope"): "multimodal positions are not supported; give rope",
    (
        "--tokenizer-type",
        "TokenizerFromFileWithFIM",
    ): "give HuggingFaceTokenizer, without tokens for infilling (fill-in-the-middle)",
    **{
        ("--moe-router-load-balancing-type", word): "not a loss of our routers; give aux_loss, "
        "seq_aux_loss, global_aux_loss or none"
        for word in ("sinkhorn", "quantile_balancing")
    },
    **{
        ("--fp8-recipe", word): "not a recipe here; give --fp8-recipe tensorwise, rowwise or "
        "blockwise"
        for word in ("delayed", "mxfp8", "custom")
    },
    **{
        (flag, word): f"moments are kept in fp32 or bf16; give {flag} bf16, which has fp32's range"
        for flag in ("--exp-avg-dtype", "--exp-avg-sq-dtype")
        for word in ("fp16", "fp8")
    },
    (
        "--main-grads-dtype",
        "fp16",
    ): "gradients are accumulated in fp32 or, with --bf16, in bf16; give --main-grads-dtype fp32",
}

# Short names that are nobody's flags: what they stand for, or what to do.
HABITS = {
    "--tensor-model-parallel-size": (
        "--tp --tp-size --tensor-parallel --tensor-parallel-size --tensor-model-parallel"
    ),
    "--pipeline-model-parallel-size": (
        "--pp --pp-size --pipeline-parallel --pipeline-parallel-size --pipeline-model-parallel"
    ),
    "--num-virtual-stages-per-pipeline-rank": "--vpp --vp --virtual-pipeline-model-parallel-size",
    "--sequence-parallel": "--sp",
    "--zero-stage": "--zero --zero-level --ds-stage --fsdp",
    "--use-distributed-optimizer": (
        "--use-dist-opt --dist-opt --distributed-optimizer --use-dist-optimizer"
    ),
    "--micro-batch-size": "--bs --mbs --micro-bs --per-device-train-batch-size",
    "--global-batch-size": "--gbs --train-batch-size",
    "--train-iters": (
        "--steps --max-steps --iters --iterations --num-iters --train-steps --training-steps"
    ),
    "--lr-warmup-iters": "--warmup-steps --warmup-iters --lr-warmup-steps",
    "--lr": "--learning-rate --max-lr",
    "--weight-decay": "--wd",
    "--clip-grad": "--grad-clip --max-grad-norm --gradient-clipping",
    "--seq-length": (
        "--seq-len --sequence-length --max-seq-len --max-seq-length --context-length --block-size"
    ),
    "--num-layers": "--layers --n-layers --nlayers --n-layer --num-hidden-layers",
    "--hidden-size": "--hidden --d-model --n-embd --hidden-dim",
    "--num-attention-heads": "--heads --n-heads --nheads --num-heads --n-head",
    "--num-query-groups": "--n-kv-heads --num-kv-heads --kv-heads",
    "--ffn-hidden-size": "--intermediate-size --d-ff",
    "--hidden-dropout": "--dropout",
    "--recompute-granularity": "--gradient-checkpointing --activation-checkpointing",
    "--attention-backend": "--flash-attn --flash-attention",
    "--data-path": "--data --train-data",
    "--tokenizer-model": "--tokenizer --tokenizer-path",
    "--save": "--output-dir --save-dir --checkpoint-dir",
    "--load": "--resume --resume-from --load-dir --resume-from-checkpoint",
    "--save-interval": "--save-steps --save-every",
    "--log-interval": "--logging-steps --log-every",
    "--eval-interval": "--eval-steps --eval-every",
    "--context-parallel-size": "--cp --cp-size",
    "--bf16": "--bfloat16",
}
_HABIT_OF = {name: ours for ours, names in HABITS.items() for name in names.split()}
FOLLOWS = {"--dp": "the data-parallel size is the number of ranks / (tensor x pipeline); drop it"}
FOLLOWS |= dict.fromkeys(("--dp-size", "--data-parallel-size"), FOLLOWS["--dp"])
FOLLOWS |= dict.fromkeys(
    ("--gradient-accumulation-steps", "--grad-accum"),
    "give --global-batch-size: --micro-batch-size x steps x data-parallel ranks",
)
FOLLOWS |= dict.fromkeys(
    ("--epochs", "--num-epochs", "--num-train-epochs"),
    "give --train-samples, the number of samples in all epochs",
)
FOLLOWS |= dict.fromkeys(
    ("--num-gpus", "--gpus", "--nproc-per-node"),
    "the launcher starts the ranks, such as torchrun --nproc-per-node N pretrain_gpt.py",
)


def translate_value(flag: str, words: Words) -> tuple[Words, str]:
    """Our words for another codebase's values of our own flag, and a note; raises UserError for
    values that cannot act.
    """
    if flag == "--window-size" and len(words) == 1 and "," in words[0]:
        left, right = (part.strip() for part in words[0].strip("()").split(",", 1))
        if not left.isdigit() or right != "0":
            raise UserError(
                "Megatron's pair must be W-1,0 here: W latest tokens, itself included, none "
                "after it"
            )
        return [
            str(int(left) + 1)
        ], f"--window-size {words[0]} is a window of {int(left) + 1} tokens, itself included"
    if flag == "--num-experts" and len(words) > 1:
        if len(set(words)) > 1:
            raise UserError(
                "the number of experts must be the same in every layer that has experts; give one"
            )
        return words[:1], ""
    for word in words:
        if (flag, word) in INSTEAD:
            raise UserError(INSTEAD[flag, word])
    if len(words) != 1:
        return words, ""
    ours, text = VALUES.get((flag, words[0]), (words[0], ""))
    return [ours], text


def habit(flag: str) -> str:
    """Our flag that a short name stands for, or an empty string."""
    return _HABIT_OF.get(flag, "")


def key(flag: str) -> str:
    """The spelling by which a flag is looked up: underscores and hyphens are the same, as
    DeepSpeed's flags mix them.
    """
    return flag[:2] + flag[2:].replace("_", "-")


@functools.cache
def rows() -> dict[str, CompatibilityRow]:
    """Row by exact name, families spelled out; a name in two rows is a fault of the table."""
    result: dict[str, CompatibilityRow] = {}
    families: dict[str, CompatibilityRow] = {}
    for row in TABLE:
        for flag in row.flags:
            where, name = (families, flag[:-1]) if flag.endswith("*") else (result, key(flag))
            assert name not in where, f"{flag} is twice in the table"
            where[name] = row
    for name in map(key, NAMES):
        beginnings = [family for family in families if name.startswith(family)]
        if beginnings:
            result.setdefault(name, families[max(beginnings, key=len)])
    return result


def find(flag: str) -> CompatibilityRow | None:
    """The row that answers a flag, or None."""
    return rows().get(flag)


Answered = tuple[str, Words, CompatibilityRow]  # a flag as written, its words, its row
Lines = dict[tuple[CompatibilityRow, str], list[str]]  # the flags that share a row and a text


@dataclass
class Answers:
    """What is reported about flags that are not ours; those that share a row share its line."""

    notes: list[str]
    not_done: list[str]
    faults: list[str]


def _fault(flag: str, words: Words, row: CompatibilityRow, config: Config) -> str:
    """Why a row refuses its flag with these words and settings; empty when it does not."""
    shown = " ".join([flag, *words])
    if row.verdict == "only" and not words:
        return f"{flag}: no value follows it (is a shell variable unset?)"
    if row.verdict == "only" and not set(words) <= set(row.values):
        return f"{shown}: {row.text} (accepted: {', '.join(row.values)})"
    if row.verdict == "refused":
        return f"{shown}: {row.text}"
    if row.verdict == "note" and not row.holds(config):
        return f"{shown}: {row.otherwise}"
    return ""


def answer(occurrences: list[Answered], config: Config) -> Answers:
    """Notes, missing services and faults of other programs' flags."""
    notes: Lines = defaultdict(list)
    missing: Lines = defaultdict(list)
    faults = []
    for flag, words, row in occurrences:
        asks_nothing = bool(words) and set(words) <= set(row.values)
        if fault := _fault(flag, words, row, config):
            faults.append(fault)
        elif row.verdict == "note":
            notes[row, row.text].append(flag)
        elif row.verdict == "not done" and row.when is not None and row.holds(config):
            notes[row, row.otherwise].append(flag)
        elif row.verdict == "not done" and not asks_nothing:
            missing[row, row.text].append(flag)
    return Answers(_lines(notes), _lines(missing), faults)


def _lines(groups: Lines) -> list[str]:
    return [f"{', '.join(dict.fromkeys(flags))}: {text}" for (_, text), flags in groups.items()]
