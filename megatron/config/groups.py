"""Every setting of a run: frozen dataclasses, one per argparse group.

A field is a flag: `lr_decay_style` is `--lr-decay-style`, its type gives the parser, the string
under it is its help. `flag(...)` adds what a type cannot specify: other spellings, bounds, what the
field acts with, what a change of it means at a resume, and its names in other programs. Adding a
flag is one edit here, and docs/flags.md made anew; rules between several fields live in
`validate.py`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from megatron.config import needs
from megatron.config.experts import ExpertsConfig
from megatron.config.latent import LatentConfig
from megatron.config.metadata import (
    BATCHES,
    BELOW_ONE,
    KERNEL,
    LENGTH,
    LOSS_SCALE,
    NOT_NEGATIVE,
    OBJECTIVE,
    POSITIVE,
    RATE,
    ROUNDING,
    SEED,
    SHARE,
    STEPS,
    STEPS_ALONE,
    TOKENIZER,
    TOKENIZER_FILE,
    UP_TO_A_YEAR,
    UP_TO_ONE,
    flag,
    model_flag,
    position_flag,
)
from megatron.config.offload import INSIDE, LAYER_INPUT
from megatron.config.schedules import SCHEDULES

kernel_flag = partial(flag, "auto", megatron="not in Megatron-LM", change=KERNEL)
Backend = Literal["auto", "triton", "torch"]
ApexBackend = Literal["auto", "triton", "apex", "torch"]
RecomputeModule = Literal[
    "core_attn", "qkv", "mla_up_proj", "layernorm", "mlp_act", "mlp", "moe_act", "moe"
]
OffloadModule = Literal[LAYER_INPUT, *INSIDE]  # type: ignore[valid-type]
Prefixes = tuple[str, ...]


@dataclass(frozen=True)
class ModelConfig(ExpertsConfig, LatentConfig):
    """model"""

    num_layers: int | None = model_flag(None, bound=POSITIVE)
    """Number of transformer layers."""
    hidden_size: int | None = model_flag(None, bound=POSITIVE)
    """Hidden size of the transformer."""
    ffn_hidden_size: int | None = model_flag(None, bound=POSITIVE)
    """Width of the MLP. Default: 4 x hidden-size; with a gated activation 2/3 of that, rounded down
    to a multiple of 64.
    """
    num_attention_heads: int | None = model_flag(None, bound=POSITIVE)
    """Number of query heads."""
    kv_channels: int | None = model_flag(None, bound=POSITIVE)
    """Width of one attention head. Default: hidden-size / num-attention-heads."""
    group_query_attention: bool = model_flag(False)
    """Share each key/value head between several query heads (--num-query-groups)."""
    num_query_groups: int | None = model_flag(None, bound=POSITIVE, needs=needs.GROUPED)
    """Number of key/value heads when --group-query-attention is given."""
    max_position_embeddings: int | None = position_flag(None, bound=POSITIVE)
    """Rows of the learned position table, and the longest sequence of rotary positions. Default:
    seq-length.
    """
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = position_flag(
        "learned_absolute"
    )
    """How positions enter the model; yarn is rope with YaRN's rescaled frequencies. For
    --multi-latent-attention see --rope-type.
    """
    rotary_base: float = position_flag(10000.0, bound=POSITIVE, needs=needs.ROTARY)
    """Base of the rotary frequencies."""
    rotary_percent: float = position_flag(1.0, bound=SHARE, needs=needs.ROTARY)
    """Share of each head's channels that rotates."""
    rotary_seq_len_interpolation_factor: float | None = position_flag(
        None, bound=POSITIVE, needs=needs.ROPE
    )
    """Divide rotary positions by this factor (linear scaling)."""
    use_rope_scaling: bool = position_flag(False, needs=needs.ROPE)
    """Rescale the rotary frequencies as Llama 3.x does."""
    rope_scaling_factor: float | None = position_flag(
        None,
        "--rotary-scaling-factor",
        megatron="two flags: --rope-scaling-factor is for --use-rope-scaling, "
        "--rotary-scaling-factor for YaRN",
        bound=POSITIVE,
        needs=(needs.SCALED_ROPE, needs.ROTARY),
    )
    """Factor of --use-rope-scaling and of YaRN. Default: 8 for --use-rope-scaling, 1 for YaRN,
    which then changes nothing.
    """
    rope_original_max_position_embeddings: int | None = position_flag(
        None,
        "--yarn-original-max-position-embeddings",
        "--original-max-position-embeddings",
        megatron="fixed to 8192 for --use-rope-scaling, and to 4096 for YaRN of latent attention",
        bound=POSITIVE,
        needs=(needs.SCALED_ROPE, needs.ROTARY),
    )
    """Sequence length that the unscaled rotary frequencies were trained for. Default: 8192 for
    --use-rope-scaling, 4096 for YaRN.
    """
    rope_low_freq_factor: float = position_flag(
        1.0, megatron="fixed to 1 there", bound=POSITIVE, needs=(needs.LLAMA_ROPE, needs.ROTARY)
    )
    """Llama-3 scaling: wavelengths above original length / this factor are divided by the full
    factor.
    """
    rope_high_freq_factor: float = position_flag(
        4.0, megatron="fixed to 4 there", bound=POSITIVE, needs=(needs.LLAMA_ROPE, needs.ROTARY)
    )
    """Llama-3 scaling: wavelengths below original length / this factor are unchanged."""
    yarn_beta_fast: float = position_flag(32.0, bound=POSITIVE, needs=(needs.YARN, needs.ROTARY))
    """YaRN: channels with more rotations than this over the original length are unchanged."""
    yarn_beta_slow: float = position_flag(1.0, bound=POSITIVE, needs=(needs.YARN, needs.ROTARY))
    """YaRN: channels with fewer rotations than this over the original length are divided by the
    full factor.
    """
    normalization: Literal["LayerNorm", "RMSNorm"] = model_flag("LayerNorm")
    """Normalization layer used throughout the model."""
    norm_epsilon: float = model_flag(1e-5, "--layernorm-epsilon", bound=POSITIVE)
    """Added to the variance inside the normalization."""
    activation: Literal["gelu", "gelu-tanh", "swiglu", "geglu", "squared-relu"] = model_flag(
        "gelu",
        megatron="one choice instead of --swiglu, --squared-relu, --openai-gelu, which set it "
        "too; the default there is fused, "
        "which is gelu-tanh",
    )
    """Activation of the MLP; swiglu and geglu are gated."""
    add_bias_linear: bool = model_flag(True, off="--disable-bias-linear")
    """Biases in the linear layers."""
    add_qkv_bias: bool = model_flag(False)
    """A bias in the QKV projection only, when --disable-bias-linear is given."""
    qk_layernorm: bool = model_flag(False)
    """Normalize each head's queries and keys before the rotary embedding; with
    --multi-latent-attention what they are made of.
    """
    window_size: int | None = model_flag(
        None,
        megatron=(
            "one number: how many keys a query sees, itself included; Megatron's pair W-1,0 "
            "is read too"
        ),
        bound=POSITIVE,
    )
    """Sliding-window attention: each token attends to this many latest tokens, itself included."""
    attn_logit_softcapping: float | None = model_flag(
        None, megatron="not in Megatron-LM", bound=POSITIVE
    )
    """Bound attention scores smoothly: cap x tanh(score / cap)."""
    final_logit_softcapping: float | None = model_flag(
        None, megatron="not in Megatron-LM", bound=POSITIVE
    )
    """Bound the logits smoothly: cap x tanh(logit / cap)."""
    z_loss_coeff: float = flag(0.0, megatron="not in Megatron-LM", bound=NOT_NEGATIVE, change=STEPS)
    """Add coeff x (log sum exp of the logits)^2 to each token's loss during training."""
    untie_embeddings_and_output_weights: bool = model_flag(False)
    """Give the output head its own matrix."""
    hidden_dropout: float = flag(0.1, bound=BELOW_ONE, change=STEPS)
    """Dropout after the embedding, attention and MLP."""
    attention_dropout: float = flag(0.1, bound=BELOW_ONE, change=STEPS)
    """Dropout on attention probabilities. Without our kernels, which --attention-backend auto takes
    on GPUs of sm_80 and sm_90, it selects the slow plain attention; 0 allows the fused one.
    """
    init_method_std: float = flag(0.02, bound=POSITIVE)
    """Standard deviation of the initial weights; residual-output projections use std / sqrt(2 x
    num-layers).
    """
    make_vocab_size_divisible_by: int = model_flag(128, bound=POSITIVE)
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""
    padded_vocab_size: int | None = model_flag(
        None, megatron="must be divisible by the tensor-parallel size", bound=POSITIVE
    )
    """Rows of the embedding and the output layer. Default: the vocabulary, rounded up by
    --make-vocab-size-divisible-by.
    """
    attention_backend: Literal["auto", "gluon", "triton", "fa4", "sdpa", "plain"] = flag(
        "auto",
        megatron=(
            "auto takes the fastest that supports the settings; flash and fused are read as "
            "auto, unfused and local as plain"
        ),
        change=KERNEL,
    )
    """Implementation of the attention core: our Triton kernels (gluon: those for Hopper in Gluon),
    torch's scaled_dot_product_attention (fa4: with FlashAttention-4), or plain matmuls.
    """
    norm_backend: ApexBackend = kernel_flag()
    """Implementation of LayerNorm and RMSNorm."""
    rotary_backend: Backend = kernel_flag()
    """Implementation of the rotary embedding."""
    activation_backend: Backend = kernel_flag()
    """Implementation of the MLP's activation."""
    dropout_backend: Backend = kernel_flag()
    """Implementation of dropout on hidden states."""
    cross_entropy_backend: Backend = kernel_flag()
    """Implementation of the loss."""
    weight_grad_backend: Literal["auto", "apex", "torch"] = flag(
        "auto",
        megatron="--no-gradient-accumulation-fusion switches apex's off there",
        change=KERNEL,
    )
    """Implementation of the weight gradients' sum in fp32 on a GPU."""
    init_backend: Backend = kernel_flag()
    """Implementation of the generator that draws the initial weights; those on the host are drawn
    by torch.
    """
    deterministic_mode: bool = flag(True, megatron="off by default there", change=ROUNDING)
    """Use only kernels that give the same bits every time. When off, the backward pass of attention
    may sum in any order on a GPU, which is faster.
    """
    torch_compile: bool = flag(False, megatron="not in Megatron-LM", change=KERNEL)
    """Compile each transformer layer with torch.compile, which fuses what lies between the matrix
    multiplications. Norms, rotary embedding, activations and dropout whose backend is auto are
    torch's then.
    """
    fused_linear_cross_entropy: bool = flag(
        False,
        megatron="--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear",
        change=ROUNDING,
    )
    """Compute the logits in chunks of tokens, in the forward pass and again in the backward pass,
    so that memory never holds all of them.
    """
    tiled_mlp: int = flag(
        1,
        megatron="--mlp-chunks-for-training there, which keeps what the pieces make",
        bound=POSITIVE,
        change=ROUNDING,
    )
    """Pieces of the sequence that the MLP is computed in, one after another, in the forward pass
    and again in the backward pass, so that memory never holds more than one piece of its inner
    tensors. The sequence that a rank holds over the hidden size, rounded up, makes a piece as large
    as a few tensors of a layer's width; more pieces make GEMMs too small for a GPU.
    """

    @property
    def rope_factor(self) -> float:
        """--rope-scaling-factor, or Megatron-LM's default if it is not set."""
        if self.rope_scaling_factor is not None:
            return self.rope_scaling_factor
        return 1.0 if self.position_embedding_type == "yarn" else 8.0

    @property
    def rope_original_length(self) -> int:
        """--rope-original-max-position-embeddings, or Megatron-LM's default if it is not set."""
        if self.rope_original_max_position_embeddings is not None:
            return self.rope_original_max_position_embeddings
        return 4096 if self.position_embedding_type == "yarn" else 8192


@dataclass(frozen=True)
class PrecisionConfig:
    """precision"""

    bf16: bool = flag(False, change=STEPS, deepspeed="bf16.enabled bfloat16.enabled")
    """Compute in bfloat16, with fp32 master weights and fp32 gradient accumulation."""
    fp16: bool = flag(False, change=STEPS, deepspeed="fp16.enabled")
    """Compute in float16, with fp32 master weights, fp32 gradient accumulation and loss scaling."""
    fp64: bool = flag(False, megatron="not in Megatron-LM", change=STEPS)
    """Compute everything in float64, to compare runs far below rounding."""
    fp8_format: Literal["e4m3", "hybrid"] | None = flag(
        None, megatron="never run on a GPU here", change=STEPS
    )
    """Compute the GEMMs of wide linear layers in 8-bit floats: of e4m3 alone, or hybrid, with e5m2
    for the gradients of outputs. Weights, sums and everything else stay as they are.
    """
    fp8_recipe: Literal["tensorwise", "rowwise", "blockwise"] = flag(
        "tensorwise",
        megatron="default delayed there, which is refused; mxfp8 is refused",
        needs=needs.FP8_FAULT,
        change=STEPS,
    )
    """What shares a scale: a tensor, a row, or 128 consecutive elements of a row. Under rowwise the
    gradients of weights are formed without 8-bit floats.
    """
    fp8_wgrad: bool = flag(True, off="--no-fp8-wgrad", needs=needs.FP8, change=STEPS)
    """Form the gradients of weights of 8-bit floats, too."""
    fp8_min_width: int = flag(
        4096, megatron="not in Megatron-LM", bound=POSITIVE, needs=needs.FP8_FAULT, change=STEPS
    )
    """Leave linear layers with fewer inputs or outputs than this as they are: there 8-bit floats
    gain little.
    """
    first_last_layers_bf16: bool = flag(False, needs=needs.FP8, change=STEPS)
    """Leave the first and last transformer layers as they are, see --num-layers-at-start-in-bf16
    and --num-layers-at-end-in-bf16.
    """
    num_layers_at_start_in_bf16: int = flag(
        1, bound=NOT_NEGATIVE, needs=needs.FIRST_LAST, change=STEPS
    )
    """How many of the first transformer layers --first-last-layers-bf16 leaves as they are."""
    num_layers_at_end_in_bf16: int = flag(
        1, bound=NOT_NEGATIVE, needs=needs.FIRST_LAST, change=STEPS
    )
    """How many of the last transformer layers --first-last-layers-bf16 leaves as they are."""
    loss_scale: float | None = flag(
        None, bound=LOSS_SCALE, needs=needs.FP16, change=STEPS, deepspeed="fp16.loss_scale"
    )
    """Static loss scale for fp16; dynamic when not given."""
    initial_loss_scale: float = flag(
        2.0**32,
        bound=LOSS_SCALE,
        needs=(needs.DYNAMIC_SCALE, needs.FP16),
        change=ROUNDING,
        deepspeed="fp16.initial_scale_power",
    )
    """Where dynamic loss scaling starts."""
    min_loss_scale: float = flag(
        1.0,
        bound=LOSS_SCALE,
        needs=(needs.DYNAMIC_SCALE, needs.FP16),
        change=STEPS,
        deepspeed="fp16.min_loss_scale",
    )
    """Lowest dynamic loss scale."""
    loss_scale_window: int = flag(
        1000,
        megatron="an integer",
        bound=POSITIVE,
        needs=(needs.DYNAMIC_SCALE, needs.FP16),
        change=STEPS,
        deepspeed="fp16.loss_scale_window",
    )
    """Clean steps after which the dynamic loss scale doubles."""
    hysteresis: int = flag(
        2,
        bound=POSITIVE,
        needs=(needs.DYNAMIC_SCALE, needs.FP16),
        change=STEPS,
        deepspeed="fp16.hysteresis",
    )
    """Overflows since the dynamic loss scale last doubled, in a row or not, at which it halves;
    every further one halves it, too.
    """


@dataclass(frozen=True)
class DataConfig:
    """data"""

    data_path: Prefixes | None = None
    """Prefixes of .bin/.idx files, or `weight prefix weight prefix ...`, divided by --split."""
    split: str | None = flag(
        None,
        megatron="default 969,30,1 there too, when --data-path is given",
        needs=needs.DATA_PATH,
    )
    """Shares of train,valid,test in --data-path, contiguous over documents. Default: 969,30,1."""
    train_data_path: Prefixes | None = None
    """Training prefixes, with or without weights (instead of --data-path and --split)."""
    valid_data_path: Prefixes | None = None
    """Validation prefixes, with or without weights."""
    test_data_path: Prefixes | None = None
    """Test prefixes, with or without weights."""
    mock_data: bool = False
    """Train on computed tokens instead of files."""
    seq_length: int | None = flag(None, bound=POSITIVE, change=LENGTH)
    """Tokens in a sample."""
    reset_position_ids: bool = flag(False, change=OBJECTIVE)
    """Count positions from zero after each end-of-document token."""
    reset_attention_mask: bool = flag(False, change=OBJECTIVE)
    """Let no token attend across an end-of-document token."""
    eod_mask_loss: bool = flag(False, change=OBJECTIVE)
    """Take no loss at end-of-document tokens."""
    check_data: bool = flag(False, megatron="not in Megatron-LM", needs=needs.DATA_FILES)
    """Scan the data files fully (monotone offsets, ids below the vocabulary) before training."""
    tokenizer_type: (
        Literal[
            "SentencePieceTokenizer",
            "HuggingFaceTokenizer",
            "GPT2BPETokenizer",
            "TikTokenizer",
            "NullTokenizer",
        ]
        | None
    ) = flag(
        None,
        megatron="Llama2Tokenizer and GPTSentencePieceTokenizer are read as SentencePieceTokenizer",
        change=TOKENIZER,
    )
    """Kind of tokenizer."""
    tokenizer_model: str | None = flag(None, needs=needs.MODEL_FILE, change=TOKENIZER_FILE)
    """File of the SentencePiece model, tokenizer.json or tiktoken vocabulary."""
    vocab_file: str | None = flag(None, needs=needs.GPT2_BPE, change=TOKENIZER_FILE)
    """GPT-2 BPE vocabulary (JSON)."""
    merge_file: str | None = flag(None, needs=needs.GPT2_BPE, change=TOKENIZER_FILE)
    """GPT-2 BPE merges."""
    vocab_size: int | None = flag(None, bound=POSITIVE, change=TOKENIZER)
    """Rows of the embedding, where they are more than the tokenizer has ids, as in many published
    models. Of the NullTokenizer its vocabulary (one more is added for the end of document).
    """


@dataclass(frozen=True)
class TrainingConfig:
    """training"""

    micro_batch_size: int | None = flag(
        None,
        "--batch-size",
        bound=POSITIVE,
        change=ROUNDING,
        deepspeed="train_micro_batch_size_per_gpu",
    )
    """Samples in one forward pass of one data-parallel rank."""
    global_batch_size: int | None = flag(
        None, bound=POSITIVE, change=BATCHES, deepspeed="train_batch_size"
    )
    """Samples in one optimizer step over all ranks. Default: micro-batch-size x data-parallel
    size.
    """
    rampup_batch_size: tuple[int, ...] | None = flag(None, change=BATCHES)
    """`start increment samples`: grow the global batch from start by increment over the first
    samples.
    """
    step_batch_size_schedule: tuple[str, ...] | None = flag(
        None,
        megatron="refused there with --global-batch-size; here that may be the last size",
        change=BATCHES,
    )
    """`TOKENS:SAMPLES ...`, such as 0:16 2.4B:320 12B:1536: the global batch size from each number
    of consumed tokens on. Numbers may end in K, M, B or T.
    """
    train_iters: int | None = flag(None, bound=NOT_NEGATIVE)
    """Optimizer steps of the run."""
    train_samples: int | None = flag(None, bound=POSITIVE)
    """Samples of the run (instead of --train-iters)."""
    exit_interval: int | None = flag(None, bound=NOT_NEGATIVE)
    """Save and exit at iterations divisible by this; 0: never."""
    exit_duration_in_mins: float | None = flag(
        None, megatron="fractions allowed", bound=NOT_NEGATIVE
    )
    """Save and exit after this many minutes; 0: never."""
    manual_gc: bool = flag(True, megatron="off there")
    """Run Python's garbage collector after the same iterations on all ranks
    (--manual-gc-interval), instead of whenever one of them has made enough objects, which keeps
    the others waiting.
    """
    manual_gc_interval: int = flag(
        100,
        megatron="default 0 there: collected at evaluations alone",
        bound=NOT_NEGATIVE,
        needs=needs.MANUAL_GC,
    )
    """Iterations between collections; 0: none but those of --manual-gc-eval."""
    manual_gc_eval: bool = flag(True, off="--no-manual-gc-eval", needs=needs.MANUAL_GC)
    """Collect before and after each evaluation."""
    seed: int = flag(1234, bound=NOT_NEGATIVE, change=SEED)
    """Seed of the initial weights, of dropout and of the order of the data."""
    nan_policy: Literal["stop", "skip"] = flag(
        "stop",
        megatron="--no-check-for-nan-in-loss-and-grad sets skip; fp16 overflows are always skipped",
        change=STEPS_ALONE,
    )
    """What to do at a NaN or Inf loss or gradient: stop the run, or skip the step and log it."""
    cuda_graphs: bool = flag(False, megatron="--enable-cuda-graph, --cuda-graph-impl local")
    """Capture the passes of transformer layers in CUDA graphs in the second step and replay them:
    for small, CPU-bound models. Takes memory beyond the plan's for copies of what passes between
    layers and for what graphs may not share.
    """
    recompute_granularity: Literal["full", "selective"] | None = flag(None)
    """full: keep the input of layers alone and compute the layers again in the backward pass.
    selective: compute the parts of each layer again that --recompute-modules names.
    """
    recompute_modules: tuple[RecomputeModule, ...] | None = flag(
        None,
        megatron="qkv and mlp_act are not in Megatron-LM; of mlp fc2 is not computed again here",
        needs=needs.SELECTIVE,
    )
    """What selective recomputes: core_attn (the attention core), qkv (queries, keys and values),
    mla_up_proj (those of latent attention, from the narrow vectors that it keeps), layernorm (what
    the norms in front of attention and MLP give), mlp_act (the activation, or the gated product),
    mlp (fc1's product and the activation), moe_act (the same as mlp_act of experts), moe (the
    experts with the way of tokens to them and back). Default: core_attn.
    """
    recompute_method: Literal["uniform", "block"] | None = flag(None, needs=needs.RECOMPUTE_FULL)
    """uniform: recompute every layer, in groups of --recompute-num-layers that keep one input.
    block: recompute the first --recompute-num-layers layers of each (virtual) pipeline stage,
    each by itself. Default: uniform.
    """
    recompute_num_layers: int | None = flag(None, bound=POSITIVE, needs=needs.RECOMPUTE_FULL)
    """Layers of a group, or layers of each stage that are recomputed, see --recompute-method.
    Default of uniform: 1.
    """
    recompute: Literal["auto"] | None = flag(None, megatron="not in Megatron-LM")
    """auto: choose for the layers of each pipeline rank what costs the least time and fits
    --memory-budget, and print why.
    """
    memory_budget: float | None = flag(
        None, megatron="not in Megatron-LM", bound=POSITIVE, needs=needs.RECOMPUTE_AUTO
    )
    """GiB that the plan of a step may need on each device with --recompute auto; what the plan does
    not count (see --dry-run) comes on top.
    """
    recompute_layers: tuple[str, ...] | None = flag(None, megatron="not in Megatron-LM")
    """What is recomputed of each layer of the model, in order: WHAT*COUNT ... with WHAT none, full,
    or modules of --recompute-modules with + between them. It is what --recompute auto chooses.
    """
    distribute_saved_activations: bool = flag(
        False,
        needs=(needs.RECOMPUTE, needs.TENSOR_PARALLEL),
        deepspeed="activation_checkpointing.partition_activations",
    )
    """Of the layer inputs that full recomputation keeps, each tensor-parallel rank keeps its share
    and gathers them in the backward pass.
    """
    activation_offload: bool = flag(
        False,
        megatron="--fine-grained-activation-offloading",
        deepspeed="activation_checkpointing.cpu_checkpointing",
    )
    """Keep what layers save for their backward passes in pinned host memory, and copy it back one
    pass ahead. A forward pass whose backward pass follows at once keeps it on the device.
    """
    offload_modules: tuple[OffloadModule, ...] | None = flag(
        None, megatron="mlp_* are not in Megatron-LM", needs=needs.ACTIVATION_OFFLOAD
    )
    """Modules whose saved inputs are offloaded to host memory: layer_input (a layer that is
    recomputed whole, or a group of them), attn_norm, qkv_linear, core_attn (with its statistics),
    attn_proj (needs core_attn, which keeps the same tensor), mlp_norm, mlp_fc1, mlp_act, mlp_fc2.
    What is recomputed is not offloaded. Default: all that are kept, which with full recomputation
    is layer_input.
    """
    activation_offload_fraction: float = flag(1.0, bound=UP_TO_ONE, needs=needs.ACTIVATION_OFFLOAD)
    """The share of the layers of each (virtual) pipeline stage that go to the host, of those that
    keep anything of --offload-modules: the first ones, whose backward passes come last, in number
    rounded to the nearest.
    """
    min_offloaded_tensor_size: int = flag(
        1048576, bound=NOT_NEGATIVE, needs=needs.ACTIVATION_OFFLOAD
    )
    """Elements below which a tensor stays on the device."""


class OptimizerKind(NamedTuple):
    """What rules between flags and the plan know of an update rule. optimizer/update.py has its
    functions.
    """

    states: dict[str, str | None]  # buffer -> the field with its precision; None: the master's
    implementation: str | None  # the field that chooses its implementation, if there are several


OPTIMIZERS = {
    "adam": OptimizerKind(
        {"exp_avg": "exp_avg_dtype", "exp_avg_sq": "exp_avg_sq_dtype"}, "adam_implementation"
    ),
    "sgd": OptimizerKind({"momentum_buffer": None}, None),
}


class DecayKind(NamedTuple):
    """What rules between flags know of a shape of the learning rate's decay.
    optimizer/lr_schedule.py has its function.
    """

    decays: bool  # to --min-lr
    has_final_decay: bool  # of --lr-wsd-decay-iters or -samples


LR_DECAYS = {
    "constant": DecayKind(decays=False, has_final_decay=False),
    "linear": DecayKind(decays=True, has_final_decay=False),
    "cosine": DecayKind(decays=True, has_final_decay=False),
    "inverse-square-root": DecayKind(decays=True, has_final_decay=False),
    "WSD": DecayKind(decays=True, has_final_decay=True),
}
FINAL_DECAYS = ("exponential", "linear", "cosine", "minus_sqrt")
WEIGHT_DECAY_CHANGES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class OptimizerConfig:
    """optimizer"""

    optimizer: Literal[*OPTIMIZERS] = flag(  # type: ignore[valid-type]
        "adam", change=STEPS, deepspeed="optimizer.type"
    )
    """adam is AdamW (decoupled weight decay)."""
    adam_implementation: Literal["auto", "triton", "apex", "torch-fused", "torch"] = flag(
        "auto", megatron="not in Megatron-LM", needs=needs.ADAM, change=KERNEL
    )
    """Implementation of AdamW: our Triton kernel, NVIDIA apex's FusedAdam, torch's fused kernel or
    its plain loop.
    """
    grad_norm_backend: ApexBackend = kernel_flag()
    """Implementation of the gradients' sum of squares. It is summed in float64, but by apex in
    fp32.
    """
    main_grads_dtype: Literal["fp32", "bf16"] = flag(
        "fp32", needs=needs.BF16, change=STEPS, deepspeed="data_types.grad_accum_dtype"
    )
    """Precision in which gradients of bf16 weights are accumulated. bf16 takes 2 bytes a parameter
    less and loses bits with every micro-batch."""
    exp_avg_dtype: Literal["fp32", "bf16"] = flag("fp32", needs=needs.ADAM, change=STEPS)
    """Precision in which Adam's first moment is kept."""
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = flag("fp32", needs=needs.ADAM, change=STEPS)
    """Precision in which Adam's second moment is kept."""
    optimizer_cpu_offload: bool = flag(
        False,
        needs=needs.OFFLOADED_ADAM,
        change=ROUNDING,
        deepspeed="zero_optimization.cpu_offload",
    )
    """Keep master weights and moments in host memory and update them on the CPU."""
    optimizer_offload_fraction: float = flag(
        1.0,
        bound=SHARE,
        needs=needs.CPU_OFFLOAD,
        change=ROUNDING,
        deepspeed="zero_optimization.offload_optimizer.ratio",
    )
    """With --optimizer-cpu-offload: the share of the parameters that the CPU updates."""
    optimizer_nvme_offload: str | None = flag(
        None, megatron="not in Megatron-LM", needs=needs.OFFLOADED_ADAM
    )
    """Keep master weights and moments in files in this folder, on a local disk of each node,
    instead of in host memory; sets --optimizer-cpu-offload.
    """
    param_cpu_offload: bool = flag(
        False,
        megatron="not in Megatron-LM",
        needs=(needs.OFFLOADED_ADAM, needs.ZERO_3),
        deepspeed="zero_optimization.cpu_offload_params zero_optimization.offload_param.device",
    )
    """With --zero-stage 3: also keep in host memory the weights whose optimizer state is there, and
    frozen weights; sets --optimizer-cpu-offload."""
    freeze: str | None = flag(None, megatron="not in Megatron-LM", change=STEPS)
    """Parts that are not trained, such as embedding,layers.0-3,head. Positions belong to the first
    layer, the final norm to the last."""
    lr: float | None = flag(None, bound=NOT_NEGATIVE, deepspeed="optimizer.params.lr")
    """Peak learning rate."""
    min_lr: float = flag(0.0, bound=NOT_NEGATIVE, needs=needs.DECAY)
    """Learning rate at the end of the decay."""
    decoupled_lr: float | None = flag(None, bound=NOT_NEGATIVE)
    """Peak learning rate of the word embedding and of the output layer's matrix, on the same
    schedule. Default: lr."""
    decoupled_min_lr: float | None = flag(
        None, bound=NOT_NEGATIVE, needs=(needs.DECOUPLED, needs.DECAY)
    )
    """With --decoupled-lr: their learning rate at the end of the decay. Default: min-lr."""
    lr_decay_style: Literal[*LR_DECAYS] = "linear"  # type: ignore[valid-type]
    """Shape of the decay after warm-up."""
    lr_decay_iters: int | None = flag(None, bound=POSITIVE)
    """Iterations over which the learning rate decays, warm-up included. Default: train-iters."""
    lr_decay_samples: int | None = flag(None, bound=POSITIVE)
    """Samples over which the learning rate decays, warm-up included. Default: train-samples."""
    lr_warmup_iters: int = flag(0, bound=NOT_NEGATIVE)
    """Iterations of linear warm-up."""
    lr_warmup_samples: int = flag(0, bound=NOT_NEGATIVE)
    """Samples of linear warm-up."""
    lr_warmup_fraction: float | None = flag(None, bound=BELOW_ONE)
    """Warm-up as a share of the decay."""
    lr_warmup_init: float = flag(0.0, bound=NOT_NEGATIVE, needs=needs.WARMUP)
    """Learning rate at which the warm-up starts."""
    lr_wsd_decay_style: Literal[*FINAL_DECAYS] = flag(  # type: ignore[valid-type]
        "exponential", needs=needs.WSD
    )
    """Shape of the final decay of WSD."""
    lr_wsd_decay_iters: int | None = flag(None, bound=POSITIVE, needs=needs.WSD)
    """Iterations of the final decay of WSD."""
    lr_wsd_decay_samples: int | None = flag(None, bound=POSITIVE, needs=needs.WSD)
    """Samples of the final decay of WSD."""
    weight_decay: float = flag(0.01, bound=NOT_NEGATIVE, deepspeed="optimizer.params.weight_decay")
    """Weight decay; biases and one-dimensional parameters have none."""
    start_weight_decay: float | None = flag(None, bound=NOT_NEGATIVE, needs=needs.CHANGING_DECAY)
    """Weight decay at the start of a run in which it changes."""
    end_weight_decay: float | None = flag(None, bound=NOT_NEGATIVE, needs=needs.CHANGING_DECAY)
    """Weight decay at the end of a run in which it changes."""
    weight_decay_incr_style: Literal[*WEIGHT_DECAY_CHANGES] = (  # type: ignore[valid-type]
        "constant"
    )
    """Shape of the change of weight decay from start to end of the run."""
    clip_grad: float = flag(
        1.0,
        bound=NOT_NEGATIVE,
        change=STEPS,
        deepspeed="gradient_clipping optimizer.params.max_grad_norm",
    )
    """Scale gradients down to this global norm; 0 disables clipping."""
    adam_beta1: float = flag(0.9, bound=BELOW_ONE, needs=needs.ADAM, change=STEPS)
    """Decay of Adam's first moment."""
    adam_beta2: float = flag(0.999, bound=BELOW_ONE, needs=needs.ADAM, change=STEPS)
    """Decay of Adam's second moment."""
    adam_eps: float = flag(
        1e-8, bound=POSITIVE, needs=needs.ADAM, change=STEPS, deepspeed="optimizer.params.eps"
    )
    """Added to the root of Adam's second moment."""
    sgd_momentum: float = flag(
        0.9, bound=BELOW_ONE, needs=needs.SGD, change=STEPS, deepspeed="optimizer.params.momentum"
    )
    """Momentum of SGD."""
    override_opt_param_scheduler: bool = flag(False, needs=needs.LOAD)
    """On resume take the learning-rate and weight-decay schedule of the command line, not the
    checkpoint's.
    """
    use_checkpoint_opt_param_scheduler: bool = flag(False, needs=needs.LOAD)
    """On resume take the checkpoint's schedule without comparing it with the command line."""


@dataclass(frozen=True)
class EvaluationConfig:
    """evaluation"""

    eval_iters: int = flag(100, bound=NOT_NEGATIVE, change=STEPS_ALONE)
    """Global batches in an evaluation; every evaluation uses the same ones."""
    eval_interval: int | None = flag(1000, megatron="None there", bound=NOT_NEGATIVE)
    """Training iterations between evaluations; 0: only at the end."""
    skip_train: bool = False
    """Load, evaluate, exit."""


@dataclass(frozen=True)
class CheckpointConfig:
    """checkpoint"""

    save: str | None = None
    """Folder for checkpoints and metrics.jsonl."""
    save_interval: int | None = flag(
        None, "--persistent-save-interval", bound=NOT_NEGATIVE, needs=needs.SAVE
    )
    """Iterations between checkpoints; one is always written at the end, with 0 no other."""
    load: str | None = None
    """Folder to resume from. When it equals --save it may still be empty."""
    ckpt_step: int | None = flag(None, bound=NOT_NEGATIVE, needs=needs.LOAD_AS_ASKED)
    """Load this iteration instead of the latest."""
    finetune: bool = flag(False, needs=needs.LOAD_AS_ASKED)
    """Load weights only; start at iteration 0."""
    load_optim: bool = flag(True, off="--no-load-optim", needs=needs.LOAD)
    """Load the optimizer's state."""
    save_optim: bool = flag(True, off="--no-save-optim", needs=needs.SAVE)
    """Write the optimizer's state."""
    exit_on_missing_checkpoint: bool = flag(False, needs=needs.LOAD_AS_ASKED)
    """Require --load to hold a checkpoint, instead of starting at iteration 0."""
    allow_older_checkpoint: bool = flag(False, megatron="not in Megatron-LM")
    """When the newest checkpoint is damaged, load the newest undamaged one before it, with a
    warning. All of it is read and verified before it is used.
    """
    accept_changed: (
        tuple[Literal["data", "tokenizer", "batch", "seed", "positions"], ...] | None
    ) = flag(None, megatron="not in Megatron-LM: changes go unnoticed")
    """Resume from a checkpoint although these differ from it: data (files, blend, sequence length),
    tokenizer (of the same size), batch (global batch size, ramp-up), seed, positions (rotary base,
    scaling and longest sequence).
    """
    use_checkpoint_args: bool = flag(
        False,
        megatron="there it overrides the command line; here a flag that contradicts is refused",
    )
    """Take the model's shape, the tokenizer and the sequence length from the checkpoint, wherever
    the command line leaves the default.
    """
    ckpt_parallel_write: Literal["balanced", "owner"] = flag(
        "balanced", megatron="there: --ckpt-fully-parallel-save"
    )
    """How ranks that hold the same values write them: balanced, an equal part each; owner, the
    first rank all.
    """
    async_save: bool = flag(False, needs=needs.SAVE)
    """Write checkpoints in the background; training waits only for a copy into host memory."""
    async_save_host_memory: float | None = flag(
        None, megatron="not in Megatron-LM", bound=POSITIVE, needs=needs.ASYNC_SAVE_COPIES
    )
    """Most GiB of host memory that each rank's background save takes. Default: as much as its
    shard.
    """
    local_checkpoint_dir: str | None = flag(
        None, "--non-persistent-local-ckpt-dir", needs=(needs.SAVE_FOR_SAFETY, needs.LOCAL_INTERVAL)
    )
    """Folder on each node (such as /dev/shm/NAME) for frequent checkpoints. A restart takes the
    newest complete checkpoint, here or in --load.
    """
    local_save_interval: int | None = flag(
        None, "--non-persistent-save-interval", bound=POSITIVE, needs=needs.LOCAL_FOLDER
    )
    """Iterations between checkpoints in --local-checkpoint-dir."""
    local_redundancy: Literal["none", "partner", "xor"] = flag(
        "none", megatron="there: --replication", needs=needs.LOCAL_FOLDER
    )
    """How a lost node is rebuilt. partner: each node also keeps another node's local shards; xor:
    each node keeps XOR parity blocks of its group of up to 8 nodes.
    """
    save_rate_limit: float | None = flag(
        None, megatron="not in Megatron-LM", bound=RATE, needs=needs.ASYNC_SAVE
    )
    """Most MB/s that each rank's background save sends to --save."""
    save_retain_interval: int | None = flag(None, bound=POSITIVE, needs=needs.SAVE)
    """Keep the checkpoints of all multiples of this; of the others only the last
    --save-keep-last.
    """
    save_keep_last: int | None = flag(
        None, megatron="not in Megatron-LM", bound=POSITIVE, needs=needs.SAVE
    )
    """Keep this many of the newest checkpoints, and with --save-retain-interval also those of its
    multiples. Default: all; 1 with --save-retain-interval."""
    verify_integrity: bool = flag(False, needs=needs.SAVE_FOR_SAFETY)
    """Read every checkpoint back from the disk and verify it before it counts as saved."""


@dataclass(frozen=True)
class LoggingConfig:
    """logging"""

    log_interval: int = flag(100, bound=POSITIVE)
    """Iterations between console lines and logged metrics."""
    log_params_norm: bool = False
    """Log the norm of the parameters."""
    log_num_zeros_in_grad: bool = False
    """Log how many gradient elements are zero."""
    log_layer_norms: bool = flag(False, megatron="not in Megatron-LM")
    """Log the norms of gradient (before clipping) and parameters of each layer."""
    moe_per_layer_logging: bool = flag(False, needs=needs.EXPERTS_EXIST)
    """Log how evenly tokens go to the experts of each layer, not of the worst one alone."""
    log_sample_text: int = flag(
        0, megatron="not in Megatron-LM", bound=NOT_NEGATIVE, needs=needs.EVALUATED
    )
    """Let the model continue the start of the first validation sample by this many tokens at each
    evaluation, for the log and wandb. Each token takes a forward pass of a micro-batch.
    """
    timing_log_level: Literal[0, 1] = 0
    """1 logs `<timer>-time` for data, forward-backward, optimizer, evaluation and checkpoint."""
    log_straggler: bool = flag(True, megatron="off by default there, within a TP group")
    """Measure the compute time of each rank, and name one that keeps the others waiting."""
    straggler_threshold: float = flag(0.1, megatron="not in Megatron-LM", bound=NOT_NEGATIVE)
    """How much slower than its peers a rank must be to be named: 0.1 is 10%."""
    pipeline_timeline: str | None = flag(None, megatron="not in Megatron-LM", needs=needs.PIPELINE)
    """Write the time line of each pipeline rank in the last logged step to this file (for
    tools/plot_schedule.py).
    """
    profile: bool = flag(False, megatron="Nsight Systems there unless --use-pytorch-profiler")
    """Record some steps with torch's profiler: a Chrome trace a rank, with named passes of layers
    and collectives, in --profile-dir.
    """
    profile_step_start: int = flag(10, bound=NOT_NEGATIVE, needs=needs.PROFILE)
    """Iterations before the first that --profile records."""
    profile_step_end: int = flag(12, bound=POSITIVE, needs=needs.PROFILE)
    """The last iteration that --profile records."""
    profile_ranks: tuple[int, ...] = flag((0,), needs=needs.PROFILE)
    """Ranks that --profile records."""
    profile_dir: str | None = flag(None, megatron="not in Megatron-LM: --tensorboard-dir")
    """Folder for traces, and for what is written when memory runs out. Default: <save>/profile;
    without --save that of --tensorboard-dir, else profile.
    """
    pytorch_profiler_collect_shapes: bool = flag(False, "--record-shapes", needs=needs.PROFILE)
    """Let traces hold the shapes of operators' inputs."""
    pytorch_profiler_collect_callstack: bool = flag(False, needs=needs.PROFILE)
    """Let traces hold the lines of Python that called each operator."""
    record_memory_history: bool = flag(False, megatron="a snapshot a log interval there")
    """Let the allocator of CUDA remember where memory was taken, and write a snapshot for
    pytorch.org/memory_viz to --profile-dir when memory runs out and after the steps of --profile.
    """
    metrics_file: str | None = flag(None, megatron="not in Megatron-LM")
    """File for the metrics. Default: <save>/metrics.jsonl."""
    tensorboard_dir: str | None = None
    """Write TensorBoard files here."""
    tensorboard_log_interval: int = flag(1, bound=POSITIVE, needs=needs.TRACKERS)
    """Iterations between TensorBoard and wandb points (at most one per --log-interval)."""
    wandb_project: str | None = None
    """Log to this wandb project (WANDB_MODE=offline works)."""
    wandb_exp_name: str | None = flag(None, needs=needs.WANDB)
    """Name of the wandb run."""
    wandb_group: str | None = flag(None, megatron="not in Megatron-LM", needs=needs.WANDB)
    """Group of the wandb run: wandb shows the runs of a group together."""
    wandb_save_dir: str | None = flag(None, needs=needs.WANDB)
    """Folder of wandb's files. Default: <save>/wandb."""
    wandb_entity: str | None = flag(None, needs=needs.WANDB)
    """wandb entity (user or team)."""
    peak_tflops: float | None = flag(None, megatron="not in Megatron-LM", bound=POSITIVE)
    """Peak TFLOP/s of one device, for MFU. Default: that of a known device; no MFU for an unknown
    one.
    """


@dataclass(frozen=True)
class DistributedConfig:
    """distributed"""

    tensor_model_parallel_size: int = flag(1, bound=POSITIVE)
    """Ranks over which each layer's matrices are divided (TP)."""
    context_parallel_size: int = flag(
        1, "--ds-sequence-parallel-size", bound=POSITIVE, change=ROUNDING
    )
    """Ranks over which the positions of each sample are divided (CP)."""
    expert_model_parallel_size: int = flag(1, bound=POSITIVE, needs=needs.EXPERTS, change=ROUNDING)
    """Ranks over which the experts of each layer are divided (EP). They are ranks of the same
    pipeline stage: tensor- x context- x data-parallel ranks, or a part of them.
    """
    expert_tensor_parallel_size: int | None = flag(
        None, bound=POSITIVE, needs=needs.EXPERTS_EXIST, change=ROUNDING
    )
    """Ranks over which each expert's matrices are divided (ETP). Default:
    tensor-model-parallel-size.
    """
    overlap_moe_expert_parallel_comm: bool = flag(False, needs=needs.EXPERT_PARALLEL)
    """Run the backward pass of each micro-batch at the same time as the forward pass of a later
    one, layer by layer, so that the tokens of one travel to experts and back while the other
    computes. Each pipeline rank holds the activations of more micro-batches.
    """
    cp_comm_type: Literal["allgather", "a2a", "p2p", "a2a+p2p"] = flag(
        "allgather", megatron="default p2p there", needs=needs.CONTEXT_PARALLEL, change=ROUNDING
    )
    """How attention reads what other context-parallel ranks hold: keys and values of all positions
    are gathered (allgather), or go round the ranks and are never all in one place (p2p); each rank
    computes all positions of a part of the heads (a2a); or neighbouring ranks do that, and their
    groups make a ring (a2a+p2p).
    """
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = flag(
        None, needs=needs.TWO_LEVELS, change=ROUNDING
    )
    """Two numbers for --cp-comm-type a2a+p2p: ranks that exchange heads, which are to be neighbours
    within a node, and ranks of a ring. Their product is --context-parallel-size.
    """
    pipeline_model_parallel_size: int = flag(1, bound=POSITIVE, deepspeed="pipeline.stages")
    """Ranks over which the layers are divided (PP)."""
    pipeline_schedule: Literal[*SCHEDULES] | None = flag(  # type: ignore[valid-type]
        None,
        megatron="not in Megatron-LM: 1f1b, or interleaved with virtual stages",
        change=ROUNDING,
    )
    """Order of forward and backward passes. Default: 1f1b, or interleaved with virtual stages."""
    num_virtual_stages_per_pipeline_rank: int | None = flag(None, bound=POSITIVE, change=ROUNDING)
    """Stages that each pipeline rank holds (virtual stages): 1 by default, 2 with zero-bubble-v."""
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, bound=POSITIVE, needs=needs.PIPELINE
    )
    """Layers of each virtual stage; another way to give the number of virtual stages."""
    decoder_first_pipeline_num_layers: int | None = flag(
        None, bound=POSITIVE, needs=needs.PIPELINE, change=ROUNDING
    )
    """Layers of the first pipeline rank; ranks without a given number share the others evenly."""
    decoder_last_pipeline_num_layers: int | None = flag(
        None, bound=POSITIVE, needs=needs.PIPELINE, change=ROUNDING
    )
    """Layers of the last pipeline rank; ranks without a given number share the others evenly."""
    account_for_embedding_in_pipeline_split: bool = flag(
        False, needs=needs.PIPELINE, change=ROUNDING
    )
    """Count the embedding as a layer of the first stage when layers are divided evenly."""
    account_for_loss_in_pipeline_split: bool = flag(False, needs=needs.PIPELINE, change=ROUNDING)
    """Count head and loss as a layer of the last stage when layers are divided evenly."""
    pipeline_model_parallel_layout: str | None = flag(
        None,
        megatron="auto is not in Megatron-LM; m and empty stages are refused here",
        needs=needs.PIPELINE,
        change=ROUNDING,
    )
    """Parts of each stage, such as Et*3|(tt|)*6tL: E embedding, t layer, L head and loss. auto
    makes stages of equal cost.
    """
    sequence_parallel: bool = flag(False, change=ROUNDING)
    """Split the sequence over the TP ranks between the matrix multiplications (norms, dropout,
    residuals). The ranks send as many bytes as without it.
    """
    tp_comm_overlap: bool = flag(
        True,
        off="--no-tp-comm-overlap",
        megatron="off there, and needs TransformerEngine",
        needs=needs.TENSOR_PARALLEL,
        change=ROUNDING,
    )
    """Run the collectives of tensor parallelism at the same time as GEMMs that do not depend on
    them.
    """
    overlap_grad_reduce: bool = flag(
        True,
        off="--no-overlap-grad-reduce",
        megatron="off there",
        needs=needs.DATA_PARALLEL,
        change=ROUNDING,
    )
    """Reduce the gradients of finished layers during the rest of the backward pass. On CPUs whose
    cores all compute, this costs time.
    """
    zero_stage: Literal[0, 1, 2, 3] = flag(
        0,
        megatron="--data-parallel-sharding-strategy there",
        change=ROUNDING,
        deepspeed="zero_optimization.stage",
    )
    """ZeRO stage. Data-parallel ranks shard: 1 the optimizer's state, 2 also gradients, 3 also
    weights.
    """
    zero_shard_size: int | None = flag(
        None,
        megatron="not in Megatron-LM",
        bound=POSITIVE,
        needs=needs.SHARDED,
        change=ROUNDING,
        deepspeed="zero_optimization.mics_shard_size",
    )
    """Number of neighbouring data-parallel ranks that ZeRO shards over, such as those of a node;
    every such group holds a copy. Default: all data-parallel ranks.
    """
    zero3_keep_gathered: bool = flag(False, megatron="not in Megatron-LM", needs=needs.ZERO_3)
    """ZeRO-3: gather a layer once a step and keep it until the step ends, instead of gathering it
    for every pass.
    """
    overlap_param_gather: bool = flag(
        True, off="--no-overlap-param-gather", megatron="off there", needs=needs.GATHERED
    )
    """ZeRO: gather the weights of the next layers during computation."""
    grad_reduce_in_bf16: bool = flag(
        False,
        megatron="gradients are accumulated in bf16 too there",
        needs=needs.DATA_PARALLEL,
        change=STEPS,
    )
    """Send gradients in bf16; they are still accumulated and summed in fp32."""
    use_tp_pp_dp_mapping: bool = flag(False, needs=needs.PIPELINE)
    """Number the ranks tp, cp, pp, dp instead of tp, cp, dp, pp (fastest first)."""
    distributed_backend: Literal["auto", "nccl", "gloo"] = flag(
        "auto", megatron="nccl there", needs=needs.SEVERAL_RANKS, change=ROUNDING
    )
    """Library of the collectives: auto takes nccl on GPUs and gloo on CPUs."""
    distributed_timeout_minutes: float = flag(
        10.0, megatron="an integer", bound=UP_TO_A_YEAR, needs=needs.SEVERAL_RANKS
    )
    """How long a rank waits for the others, at the start and in every collective, before it ends
    with an error.
    """
    world_size: int | None = flag(
        None, megatron="set by the launcher there; here only with --dry-run", bound=POSITIVE
    )
    """With --dry-run: the number of ranks to validate for."""
    device_memory: float | None = flag(None, megatron="not in Megatron-LM", bound=POSITIVE)
    """GiB of memory of one GPU, for the plan's verdict. Default: what the GPU has; 80 in a dry
    run.
    """
    hardware: str | None = flag(None, megatron="not in Megatron-LM")
    """Device whose constants the prediction of a step's time is made of: a name that tools/plan.py
    lists, or a file of tools/plan.py measure. Default: by the name of the GPU; none where it is not
    known.
    """
    host_memory: float | None = flag(None, megatron="not in Megatron-LM", bound=POSITIVE)
    """GiB of memory of a node that all its ranks together may take: a run whose offload flags need
    more is refused. Default: what the node has; unknown in a dry run.
    """


@dataclass(frozen=True)
class Config:
    """All groups of one run."""

    model: ModelConfig = ModelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    distributed: DistributedConfig = DistributedConfig()

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Nested plain dictionaries: what --print-config, wandb and checkpoints store."""
        return dataclasses.asdict(self)

    def with_fields(self, group: str, **values: Any) -> Config:
        """The same run with other values of some fields of a group."""
        changed = dataclasses.replace(getattr(self, group), **values)
        return dataclasses.replace(self, **{group: changed})

    @classmethod
    def from_dict(cls, groups: dict[str, dict[str, Any]]) -> Config:
        """The inverse of to_dict, also after JSON (its lists become tuples). Raises TypeError for
        an unknown field.
        """
        kinds: dict[str, Any] = {
            group.name: type(group.default) for group in dataclasses.fields(cls)
        }
        return cls(
            **{
                name: kind(
                    **{
                        field: tuple(value) if isinstance(value, list) else value
                        for field, value in groups.get(name, {}).items()
                    }
                )
                for name, kind in kinds.items()
            }
        )
