"""Every setting of a run: frozen dataclasses, one per argparse group.

A field is a flag: `lr_decay_style` is `--lr-decay-style`, its type gives the parser, the string under it is its help.
`flag(...)` adds what a type cannot say: other spellings, the spelling that switches a boolean off, how Megatron-LM differs.
Rules between fields live in `validate.py`; nothing here imports anything of the project.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal


def flag(default: Any, *names: str, off: str | None = None, megatron: str | None = None) -> Any:
    """A field with further option strings `names`, an option `off` that sets a boolean False, and a note for docs/flags.md."""
    metadata = {"names": names, "off": off, "megatron": megatron}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelConfig:
    """model"""

    num_layers: int | None = None
    """Number of transformer layers."""
    hidden_size: int | None = None
    """Width of the residual stream."""
    ffn_hidden_size: int | None = None
    """Width of the MLP. Default: 4 x hidden-size; with a gated activation 2/3 of that, rounded down to a multiple of 64."""
    num_attention_heads: int | None = None
    """Number of query heads."""
    kv_channels: int | None = None
    """Width of one attention head. Default: hidden-size / num-attention-heads."""
    group_query_attention: bool = False
    """Share each key/value head between several query heads (--num-query-groups)."""
    num_query_groups: int | None = None
    """Number of key/value heads when --group-query-attention is given."""
    max_position_embeddings: int | None = None
    """Rows of the learned position table, and the longest sequence of rotary positions. Default: seq-length."""
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = "learned_absolute"
    """How positions enter the model; yarn is rope with YaRN's rescaled frequencies."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""
    rotary_percent: float = 1.0
    """Share of each head's channels that rotates."""
    rotary_seq_len_interpolation_factor: float | None = None
    """Divide rotary positions by this factor (linear scaling)."""
    use_rope_scaling: bool = False
    """Rescale the rotary frequencies as Llama 3.x does."""
    rope_scaling_factor: float = 8.0
    """Factor of --use-rope-scaling and of YaRN."""
    rope_original_max_position_embeddings: int = flag(
        8192, "--yarn-original-max-position-embeddings", megatron="one flag for Llama-3 scaling (fixed to 8192 there) and YaRN")
    """Sequence length that the unscaled rotary frequencies were trained for."""
    rope_low_freq_factor: float = flag(1.0, megatron="fixed to 1 there")
    """Llama-3 scaling: wavelengths above original length / this factor are divided by the full factor."""
    rope_high_freq_factor: float = flag(4.0, megatron="fixed to 4 there")
    """Llama-3 scaling: wavelengths below original length / this factor are left alone."""
    yarn_beta_fast: float = 32.0
    """YaRN: channels with more rotations than this over the original length are left alone."""
    yarn_beta_slow: float = 1.0
    """YaRN: channels with fewer rotations than this over the original length are divided by the full factor."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of normalisation, everywhere."""
    norm_epsilon: float = flag(1e-5, "--layernorm-epsilon")
    """Added to the variance inside the normalisation."""
    activation: Literal["gelu", "gelu-tanh", "swiglu", "geglu", "squared-relu"] = flag(
        "gelu", megatron="one choice instead of --swiglu, --squared-relu, --openai-gelu, which set it too; the default there is fused, "
        "which is gelu-tanh")
    """Activation of the MLP; swiglu and geglu are gated."""
    add_bias_linear: bool = flag(True, off="--disable-bias-linear")
    """Biases in the linear layers."""
    add_qkv_bias: bool = False
    """A bias in the QKV projection only, when --disable-bias-linear is given."""
    qk_layernorm: bool = False
    """Normalise each head's queries and keys before the rotary embedding."""
    window_size: int | None = flag(
        None, megatron="one number: how many keys a query sees, itself included; Megatron's pair W-1,0 is read too")
    """Sliding-window attention: each token attends to this many latest tokens, itself included."""
    attn_logit_softcapping: float | None = flag(None, megatron="absent there")
    """Bound attention scores smoothly: cap x tanh(score / cap)."""
    final_logit_softcapping: float | None = flag(None, megatron="absent there")
    """Bound the logits smoothly: cap x tanh(logit / cap)."""
    z_loss_coeff: float = flag(0.0, megatron="absent there")
    """Add coeff x (log sum exp of the logits)^2 to each token's loss during training."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output head a matrix of its own."""
    hidden_dropout: float = 0.1
    """Dropout after the embedding, attention and MLP."""
    attention_dropout: float = 0.1
    """Dropout on attention probabilities (selects the slow plain attention; 0 allows the fused one)."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights; residual-output projections use std / sqrt(2 x num-layers)."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""
    attention_backend: Literal["auto", "gluon", "triton", "sdpa", "plain"] = flag(
        "auto", megatron="auto takes the fastest that supports the settings; flash and fused are read as auto, unfused and local as plain")
    """Implementation of the attention core: our Triton kernels (gluon: with the forward pass for Hopper), torch's scaled_dot_product_attention, or plain products."""
    norm_backend: Literal["auto", "triton", "apex", "torch"] = flag("auto", megatron="absent there")
    """Implementation of LayerNorm and RMSNorm."""
    rotary_backend: Literal["auto", "triton", "torch"] = flag("auto", megatron="absent there")
    """Implementation of the rotary embedding."""
    activation_backend: Literal["auto", "triton", "torch"] = flag("auto", megatron="absent there")
    """Implementation of the MLP's activation."""
    dropout_backend: Literal["auto", "triton", "torch"] = flag("auto", megatron="absent there")
    """Implementation of dropout on hidden states."""
    cross_entropy_backend: Literal["auto", "triton", "torch"] = flag("auto", megatron="absent there")
    """Implementation of the loss."""
    weight_grad_backend: Literal["auto", "apex", "torch"] = flag("auto", megatron="--no-gradient-accumulation-fusion switches apex's off there")
    """Implementation of the weight gradients' sum in fp32 on a GPU."""
    init_backend: Literal["auto", "triton", "torch"] = flag("auto", megatron="absent there")
    """Implementation of the generator that draws the initial weights; those on the host are drawn by torch."""
    deterministic_mode: bool = flag(True, megatron="off by default there")
    """Use only kernels that give the same bits every time. When off, the backward pass of attention may
    sum in any order on a GPU, which is faster."""
    fused_linear_cross_entropy: bool = flag(False, megatron="--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear")
    """Compute the logits in chunks of tokens, in the forward pass and again in the backward pass, so
    that memory never holds all of them."""


@dataclass(frozen=True)
class PrecisionConfig:
    """precision"""

    bf16: bool = False
    """Compute in bfloat16, with fp32 master weights and fp32 gradient accumulation."""
    fp16: bool = False
    """Compute in float16, with fp32 master weights, fp32 gradient accumulation and loss scaling."""
    fp64: bool = flag(False, megatron="absent there")
    """Compute everything in float64, to compare runs far below rounding."""
    loss_scale: float | None = None
    """Static loss scale for fp16; dynamic when not given."""
    initial_loss_scale: float = 2.0**32
    """Where dynamic loss scaling starts."""
    min_loss_scale: float = 1.0
    """Lowest dynamic loss scale."""
    loss_scale_window: int = flag(1000, megatron="an integer")
    """Clean steps after which the dynamic loss scale doubles."""
    hysteresis: int = 2
    """Overflows since the dynamic loss scale last doubled, in a row or not, at which it halves; every further one halves it, too."""


@dataclass(frozen=True)
class DataConfig:
    """data"""

    data_path: tuple[str, ...] | None = None
    """Prefixes of .bin/.idx files, or `weight prefix weight prefix ...`, divided by --split."""
    split: str | None = flag(None, megatron="default 969,30,1 there too, when --data-path is given")
    """Shares of train,valid,test in --data-path, contiguous over documents. Default: 969,30,1."""
    train_data_path: tuple[str, ...] | None = None
    """Training prefixes, with or without weights (instead of --data-path and --split)."""
    valid_data_path: tuple[str, ...] | None = None
    """Validation prefixes, with or without weights."""
    test_data_path: tuple[str, ...] | None = None
    """Test prefixes, with or without weights."""
    mock_data: bool = False
    """Train on computed tokens instead of files."""
    seq_length: int | None = None
    """Tokens in a sample."""
    reset_position_ids: bool = False
    """Count positions from zero after each end-of-document token."""
    reset_attention_mask: bool = False
    """Let no token attend across an end-of-document token."""
    eod_mask_loss: bool = False
    """Take no loss at end-of-document tokens."""
    check_data: bool = flag(False, megatron="absent there")
    """Scan the data files fully (monotone offsets, ids below the vocabulary) before training."""
    tokenizer_type: Literal[
        "SentencePieceTokenizer", "HuggingFaceTokenizer", "GPT2BPETokenizer", "TikTokenizer", "NullTokenizer"] | None = flag(
        None, megatron="Llama2Tokenizer and GPTSentencePieceTokenizer are read as SentencePieceTokenizer")
    """Kind of tokenizer."""
    tokenizer_model: str | None = None
    """File of the SentencePiece model, tokenizer.json or tiktoken vocabulary."""
    vocab_file: str | None = None
    """GPT-2 BPE vocabulary (JSON)."""
    merge_file: str | None = None
    """GPT-2 BPE merges."""
    vocab_size: int | None = None
    """Vocabulary of the NullTokenizer (one more is added for the end of document); elsewhere checked against the tokenizer."""


@dataclass(frozen=True)
class TrainingConfig:
    """training"""

    micro_batch_size: int | None = flag(None, "--batch-size")
    """Samples in one forward pass of one data-parallel rank."""
    global_batch_size: int | None = None
    """Samples in one optimizer step over all ranks. Default: micro-batch-size x data-parallel size."""
    rampup_batch_size: tuple[int, ...] | None = None
    """`start increment samples`: grow the global batch from start by increment over the first samples."""
    train_iters: int | None = None
    """Optimizer steps of the run."""
    train_samples: int | None = None
    """Samples of the run (instead of --train-iters)."""
    exit_interval: int | None = None
    """Save and exit at iterations divisible by this."""
    exit_duration_in_mins: float | None = flag(None, megatron="fractions allowed")
    """Save and exit after this many minutes."""
    seed: int = 1234
    """Seed of the initial weights, of dropout and of the order of the data."""
    nan_policy: Literal["stop", "skip"] = flag(
        "stop", megatron="--no-check-for-nan-in-loss-and-grad sets skip; fp16 overflows are always skipped")
    """What to do at a NaN or Inf loss or gradient: stop the run, or skip the step and log it."""
    recompute_granularity: Literal["full"] | None = flag(None, megatron="selective is refused until it is built")
    """full: keep only each block's input and recompute the block in the backward pass."""
    recompute_method: Literal["uniform"] | None = flag(None, megatron="block is refused until it is built")
    """uniform: recompute every layer."""
    recompute_num_layers: int | None = flag(None, megatron="only 1 until groups are built")
    """Layers per recomputed unit."""


@dataclass(frozen=True)
class OptimizerConfig:
    """optimizer"""

    optimizer: Literal["adam", "sgd"] = "adam"
    """adam is AdamW (decoupled weight decay)."""
    adam_implementation: Literal["auto", "triton", "apex", "torch-fused", "torch"] = flag("auto", megatron="absent there")
    """Implementation of AdamW: our Triton kernel, NVIDIA apex's FusedAdam, torch's fused kernel or its plain loop."""
    grad_norm_backend: Literal["auto", "triton", "apex", "torch"] = flag("auto", megatron="absent there")
    """Implementation of the gradients' sum of squares. It is summed in float64, but by apex in fp32."""
    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which gradients of bf16 weights are accumulated. bf16 takes 2 bytes a parameter
    less and loses bits with every micro-batch."""
    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which Adam's first moment is kept."""
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which Adam's second moment is kept."""
    optimizer_cpu_offload: bool = False
    """Keep master weights and moments in host memory and update them on the CPU."""
    optimizer_offload_fraction: float = 1.0
    """With --optimizer-cpu-offload: the share of the parameters that the CPU updates."""
    optimizer_nvme_offload: str | None = flag(None, megatron="absent there")
    """Keep master weights and moments in files in this folder, on a local disk of each node, instead
    of in host memory; sets --optimizer-cpu-offload."""
    param_cpu_offload: bool = flag(False, megatron="absent there")
    """With --zero-stage 3: also keep in host memory the weights whose optimizer state is there, and
    frozen weights; sets --optimizer-cpu-offload."""
    freeze: str | None = flag(None, megatron="absent there")
    """Parts that are not trained, such as embedding,layers.0-3,head. Positions belong to the first
    layer, the final norm to the last."""
    lr: float | None = None
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay after warm-up."""
    lr_decay_iters: int | None = None
    """Iterations over which the learning rate decays, warm-up included. Default: train-iters."""
    lr_decay_samples: int | None = None
    """Samples over which the learning rate decays, warm-up included. Default: train-samples."""
    lr_warmup_iters: int = 0
    """Iterations of linear warm-up."""
    lr_warmup_samples: int = 0
    """Samples of linear warm-up."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a share of the decay."""
    lr_warmup_init: float = 0.0
    """Learning rate at which the warm-up starts."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the final decay of WSD."""
    lr_wsd_decay_iters: int | None = None
    """Iterations of the final decay of WSD."""
    lr_wsd_decay_samples: int | None = None
    """Samples of the final decay of WSD."""
    weight_decay: float = 0.01
    """Weight decay; biases and one-dimensional parameters have none."""
    start_weight_decay: float | None = None
    """Weight decay at the start of a run in which it changes."""
    end_weight_decay: float | None = None
    """Weight decay at the end of a run in which it changes."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the change of weight decay from start to end of the run."""
    clip_grad: float = 1.0
    """Scale gradients down to this global norm; 0 disables clipping."""
    adam_beta1: float = 0.9
    """Decay of Adam's first moment."""
    adam_beta2: float = 0.999
    """Decay of Adam's second moment."""
    adam_eps: float = 1e-8
    """Added to the root of Adam's second moment."""
    sgd_momentum: float = 0.9
    """Momentum of SGD."""
    override_opt_param_scheduler: bool = False
    """On resume take the learning-rate and weight-decay schedule of the command line, not the checkpoint's."""
    use_checkpoint_opt_param_scheduler: bool = False
    """On resume take the checkpoint's schedule without comparing it with the command line."""


@dataclass(frozen=True)
class EvaluationConfig:
    """evaluation"""

    eval_iters: int = 100
    """Global batches in an evaluation; every evaluation uses the same ones."""
    eval_interval: int | None = flag(1000, megatron="None there")
    """Training iterations between evaluations."""
    skip_train: bool = False
    """Load, evaluate, exit."""


@dataclass(frozen=True)
class CheckpointConfig:
    """checkpoint"""

    save: str | None = None
    """Folder for checkpoints and metrics.jsonl."""
    save_interval: int | None = flag(None, "--persistent-save-interval")
    """Iterations between checkpoints; one is always written at the end."""
    load: str | None = None
    """Folder to resume from. When it equals --save it may still be empty."""
    ckpt_step: int | None = None
    """Load this iteration instead of the latest."""
    finetune: bool = False
    """Load weights only; start at iteration 0."""
    load_optim: bool = flag(True, off="--no-load-optim")
    """Load the optimizer's state."""
    save_optim: bool = flag(True, off="--no-save-optim")
    """Write the optimizer's state."""
    exit_on_missing_checkpoint: bool = False
    """Require --load to hold a checkpoint, instead of starting at iteration 0."""
    allow_older_checkpoint: bool = flag(False, megatron="absent there")
    """When the newest checkpoint is damaged, load the newest undamaged one before it, with a warning.
    All of it is read and verified before it is used."""
    accept_changed: tuple[Literal["data", "tokenizer", "batch", "seed"], ...] | None = flag(None, megatron="absent there: changes go unnoticed")
    """Resume from a checkpoint although these differ from it: data (files, blend, sequence length), tokenizer (of the same size), batch (global batch
    size, ramp-up), seed."""
    use_checkpoint_args: bool = flag(False, megatron="there it overrides the command line; here a flag that contradicts is refused")
    """Take the model's shape, the tokenizer and the sequence length from the checkpoint, wherever the command line leaves the default."""
    ckpt_parallel_write: Literal["balanced", "owner"] = flag("balanced", megatron="there: --ckpt-fully-parallel-save")
    """How ranks that hold the same values write them: balanced, an equal part each; owner, the first rank all."""
    async_save: bool = False
    """Write checkpoints in the background; training waits only for a copy into host memory."""
    async_save_host_memory: float | None = flag(None, megatron="absent there")
    """Most GiB of host memory that each rank's background save takes. Default: as much as its shard."""
    local_checkpoint_dir: str | None = flag(None, "--non-persistent-local-ckpt-dir")
    """Folder on each node (such as /dev/shm/NAME) for frequent checkpoints. A restart takes the newest
    complete checkpoint, here or in --load."""
    local_save_interval: int | None = flag(None, "--non-persistent-save-interval")
    """Iterations between checkpoints in --local-checkpoint-dir."""
    local_redundancy: Literal["none", "partner", "xor"] = flag("none", megatron="there: --replication")
    """How a lost node is rebuilt. partner: each node also keeps another node's local shards; xor: each
    node keeps a parity of its set of up to 8 nodes."""
    save_rate_limit: float | None = flag(None, megatron="absent there")
    """Most MB/s that each rank's background save sends to --save."""
    save_retain_interval: int | None = None
    """Keep the checkpoints of all multiples of this; of the others only the last --save-keep-last."""
    save_keep_last: int | None = flag(None, megatron="absent there")
    """Keep this many of the newest checkpoints, and with --save-retain-interval also those of its
    multiples. Default: all; 1 with --save-retain-interval."""
    verify_integrity: bool = False
    """Read every checkpoint back from the disk and verify it before it counts as saved."""


@dataclass(frozen=True)
class LoggingConfig:
    """logging"""

    log_interval: int = 100
    """Iterations between console lines and logged metrics."""
    log_params_norm: bool = False
    """Log the norm of the parameters."""
    log_num_zeros_in_grad: bool = False
    """Log how many gradient elements are zero."""
    timing_log_level: Literal[0, 1] = 0
    """1 logs `<timer>-time` for data, forward-backward, optimizer, evaluation and checkpoint."""
    pipeline_timeline: str | None = flag(None, megatron="absent there")
    """Write the time line of each pipeline rank in the last logged step to this file (for tools/plot_schedule.py)."""
    metrics_file: str | None = flag(None, megatron="absent there")
    """File for the metrics. Default: <save>/metrics.jsonl."""
    tensorboard_dir: str | None = None
    """Write TensorBoard files here."""
    tensorboard_log_interval: int = 1
    """Iterations between TensorBoard and wandb points (at most one per --log-interval)."""
    wandb_project: str | None = None
    """Log to this wandb project (WANDB_MODE=offline works)."""
    wandb_exp_name: str | None = None
    """Name of the wandb run."""
    wandb_save_dir: str | None = None
    """Folder of wandb's files. Default: <save>/wandb."""
    wandb_entity: str | None = None
    """wandb entity (user or team)."""
    peak_tflops: float | None = flag(None, megatron="absent there")
    """Peak TFLOP/s of one device, for MFU. Default: that of a known device; no MFU for an unknown one."""


@dataclass(frozen=True)
class DistributedConfig:
    """distributed"""

    tensor_model_parallel_size: int = 1
    """Ranks over which each layer's matrices are divided (TP)."""
    pipeline_model_parallel_size: int = 1
    """Ranks over which the layers are divided (PP)."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v"] | None = flag(
        None, megatron="absent there: 1f1b, or interleaved with virtual stages")
    """Order of forward and backward passes. Default: 1f1b, or interleaved with virtual stages."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Stages that each pipeline rank holds (virtual stages): 1 by default, 2 with zero-bubble-v."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers of each virtual stage; another way to give the number of virtual stages."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first pipeline rank; ranks without a number of their own share the others evenly."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last pipeline rank; ranks without a number of their own share the others evenly."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer of the first stage when layers are divided evenly."""
    account_for_loss_in_pipeline_split: bool = False
    """Count head and loss as a layer of the last stage when layers are divided evenly."""
    pipeline_model_parallel_layout: str | None = flag(None, megatron="auto is absent there; m and empty stages are refused here")
    """Parts of each stage, such as Et*3|(tt|)*6tL: E embedding, t layer, L head and loss. auto makes
    stages of equal cost."""
    sequence_parallel: bool = False
    """Split the sequence over the TP ranks between the matrix products (norms, dropout, residuals).
    The ranks send as many bytes as without it."""
    tp_comm_overlap: bool = flag(True, off="--no-tp-comm-overlap", megatron="off there, and needs TransformerEngine")
    """Run the collectives of tensor parallelism at the same time as matrix products that do not depend
    on them."""
    overlap_grad_reduce: bool = flag(True, off="--no-overlap-grad-reduce", megatron="off there")
    """Reduce the gradients of finished layers during the rest of the backward pass. On CPUs whose cores
    all compute, this costs time."""
    zero_stage: Literal[0, 1, 2, 3] = flag(0, megatron="--data-parallel-sharding-strategy there")
    """ZeRO stage. Data-parallel ranks shard: 1 the optimizer's state, 2 also gradients, 3 also weights."""
    zero_shard_size: int | None = flag(None, megatron="absent there")
    """Number of neighbouring data-parallel ranks that ZeRO shards over, such as those of a node; every
    such group holds a copy. Default: all data-parallel ranks."""
    zero3_keep_gathered: bool = flag(False, megatron="absent there")
    """ZeRO-3: gather a layer once a step and keep it until the step ends, instead of gathering it for
    every pass."""
    overlap_param_gather: bool = flag(True, off="--no-overlap-param-gather", megatron="off there")
    """ZeRO: gather the weights of the next layers during computation."""
    grad_reduce_in_bf16: bool = flag(False, megatron="gradients are accumulated in bf16 too there")
    """Send gradients in bf16; they are still accumulated and summed in fp32."""
    use_tp_pp_dp_mapping: bool = False
    """Number the ranks tp, cp, pp, dp instead of tp, cp, dp, pp (fastest first)."""
    distributed_backend: Literal["auto", "nccl", "gloo"] = flag("auto", megatron="nccl there")
    """Library of the collectives: auto takes nccl on GPUs and gloo on CPUs."""
    distributed_timeout_minutes: float = flag(10.0, megatron="an integer")
    """How long a rank waits for the others, at the start and in every collective, before it ends with
    an error."""
    world_size: int | None = flag(None, megatron="set by the launcher there; here only with --dry-run")
    """With --dry-run: the number of ranks to validate for."""
    device_memory: float | None = flag(None, megatron="absent there")
    """GiB of memory of one GPU, for the plan's verdict. Default: what the GPU has; 80 in a dry run."""


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

    @classmethod
    def from_dict(cls, groups: dict[str, dict[str, Any]]) -> Config:
        """The inverse of to_dict, also after JSON (its lists become tuples). Raises TypeError for an unknown field."""
        kinds = {group.name: type(group.default) for group in dataclasses.fields(cls)}
        return cls(**{
            name: kind(**{field: tuple(value) if isinstance(value, list) else value for field, value in groups.get(name, {}).items()})
            for name, kind in kinds.items()
        })
