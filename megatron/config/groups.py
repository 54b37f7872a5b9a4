"""Every setting of a run: frozen dataclasses, one per group of flags (the model's is in model.py).

A field is a flag: `lr_decay_style` is `--lr-decay-style`, its type gives the parser, the string
under it is its help. `flag(...)` adds what a type cannot specify: other spellings, bounds, what the
field acts with, what a change of it means at a resume. Adding a flag is one edit here, and
docs/flags.md made anew; its names in other programs are in `compatibility.toml`, and rules between
several fields in `rules.py` and `validate.py`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, NewType

from megatron.config.metadata import (
    BATCHES,
    BELOW_ONE,
    LENGTH,
    LOSS_SCALE,
    NOT_NEGATIVE,
    OBJECTIVE,
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
)
from megatron.config.model import ApexBackend, ModelConfig, expert_rounding_flag, kernel_flag
from megatron.config.recompute import INSIDE, LAYER_INPUT, MODULES
from megatron.config.schedules import SCHEDULES

PIPELINE = "pipeline_model_parallel_size>1"
MODEL_FILE = "tokenizer_type=SentencePieceTokenizer,HuggingFaceTokenizer,TikTokenizer"
GPT2_BPE = "tokenizer_type=GPT2BPETokenizer"
SELECTIVE = "recompute_granularity=selective"
WARMUP = "lr_warmup_iters>0|lr_warmup_samples>0|lr_warmup_fraction>0"
CHANGING = "weight_decay_incr_style=linear,cosine"

fp8_flag = partial(flag, needs="fp8_format=e4m3,hybrid", change=STEPS)
first_last_flag = partial(
    flag, bound=NOT_NEGATIVE, idle_without="first_last_layers_bf16", change=STEPS
)
dynamic_scale_flag = partial(flag, needs="loss_scale=None", idle_without="fp16")
full_flag = partial(flag, idle_without="recompute_granularity=full")
adam_flag = partial(flag, idle_without="optimizer=adam", change=STEPS)
not_negative = partial(flag, bound=NOT_NEGATIVE)
load_flag = partial(flag, idle_without="load")
save_flag = partial(flag, idle_without="save")
offload_flag = partial(flag, needs="activation_offload")
local_flag = partial(flag, needs="local_checkpoint_dir")
profile_flag = partial(flag, idle_without="profile")
wandb_flag = partial(flag, idle_without="wandb_project")
pipeline_flag = partial(flag, idle_without=PIPELINE, change=ROUNDING)
Prefixes = tuple[str, ...]
RecomputeModule = Literal[*MODULES]  # type: ignore[valid-type]
OffloadModule = Literal[LAYER_INPUT, *INSIDE]  # type: ignore[valid-type]
Schedule = Literal[*SCHEDULES]  # type: ignore[valid-type]
Changed = Literal["data", "tokenizer", "batch", "seed", "positions"]
TokenizerType = Literal[
    "SentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "TikTokenizer",
    "NullTokenizer",
]


@dataclass(frozen=True)
class PrecisionConfig:
    """bf16, fp16, FP8 and loss scaling."""

    bf16: bool = flag(False, change=STEPS)
    """Compute in bfloat16, with fp32 master weights and fp32 gradient accumulation."""
    fp16: bool = flag(False, change=STEPS)
    """Compute in float16, with fp32 master weights, fp32 gradient accumulation and loss scaling."""
    fp64: bool = flag(False, change=STEPS)
    """Compute everything in float64, to compare runs far below rounding."""
    fp8_format: Literal["e4m3", "hybrid"] | None = flag(change=STEPS)
    """GEMMs of wide linear layers in FP8: e4m3, or hybrid (e5m2 for gradients of outputs).
    Everything else keeps its precision."""
    fp8_recipe: Literal["tensorwise", "rowwise", "blockwise"] = fp8_flag("tensorwise")
    """What shares a scale: a tensor, a row, or 128 consecutive elements of a row (blockwise). With
    rowwise, weight gradients are not computed in FP8."""
    fp8_wgrad: bool = flag(True, idle_without="fp8_format=e4m3,hybrid", change=STEPS)
    """Compute weight gradients in FP8 too."""
    fp8_min_width: int = fp8_flag(4096)
    """Fewest inputs and outputs of a linear layer in FP8; narrower ones gain little."""
    first_last_layers_bf16: bool = flag(False, idle_without="fp8_format=e4m3,hybrid", change=STEPS)
    """Keep the first and last transformer layers out of FP8."""
    num_layers_at_start_in_bf16: int = first_last_flag(1)
    """Number of first layers for --first-last-layers-bf16."""
    num_layers_at_end_in_bf16: int = first_last_flag(1)
    """Number of last layers for --first-last-layers-bf16."""
    loss_scale: float | None = flag(bound=LOSS_SCALE, idle_without="fp16", change=STEPS)
    """Static loss scale for fp16; dynamic when not given."""
    initial_loss_scale: float = dynamic_scale_flag(2.0**32, bound=LOSS_SCALE, change=ROUNDING)
    """Where dynamic loss scaling starts."""
    min_loss_scale: float = dynamic_scale_flag(1.0, bound=LOSS_SCALE, change=STEPS)
    """Lowest dynamic loss scale."""
    loss_scale_window: int = dynamic_scale_flag(1000, change=STEPS)
    """Clean steps after which the dynamic loss scale doubles."""
    hysteresis: int = dynamic_scale_flag(2, change=STEPS)
    """Overflows since the loss scale last doubled at which it halves; further ones halve it too."""


@dataclass(frozen=True)
class DataConfig:
    """Data files, sequence length, tokenizer."""

    data_path: Prefixes | None = None
    """Prefixes of .bin/.idx files, or `weight prefix weight prefix ...`, divided by --split."""
    split: str | None = flag(idle_without="data_path")
    """Shares of train,valid,test in --data-path, contiguous over documents. Default: 969,30,1."""
    train_data_path: Prefixes | None = None
    """Training prefixes, with or without weights (instead of --data-path and --split)."""
    valid_data_path: Prefixes | None = None
    """Validation prefixes, with or without weights."""
    test_data_path: Prefixes | None = None
    """Test prefixes, with or without weights."""
    mock_data: bool = False
    """Train on computed tokens instead of files."""
    seq_length: int | None = flag(change=LENGTH)
    """Tokens in a sample."""
    reset_position_ids: bool = flag(False, change=OBJECTIVE)
    """Count positions from zero after each end-of-document token."""
    reset_attention_mask: bool = flag(False, change=OBJECTIVE)
    """Let no token attend across an end-of-document token."""
    eod_mask_loss: bool = flag(False, change=OBJECTIVE)
    """Take no loss at end-of-document tokens."""
    check_data: bool = flag(False, idle_without="mock_data=False")
    """Scan all data files first, on rank 0 (raise --distributed-timeout-minutes for terabytes)."""
    tokenizer_type: TokenizerType | None = flag(change=TOKENIZER)
    """Kind of tokenizer."""
    tokenizer_model: str | None = flag(idle_without=MODEL_FILE, change=TOKENIZER_FILE)
    """File of the SentencePiece model, tokenizer.json or tiktoken vocabulary."""
    vocab_file: str | None = flag(idle_without=GPT2_BPE, change=TOKENIZER_FILE)
    """GPT-2 BPE vocabulary (JSON)."""
    merge_file: str | None = flag(idle_without=GPT2_BPE, change=TOKENIZER_FILE)
    """GPT-2 BPE merges."""
    vocab_size: int | None = flag(change=TOKENIZER)
    """Vocabulary, if above the tokenizer's. Required by NullTokenizer, without end of document."""


@dataclass(frozen=True)
class TrainingConfig:
    """Batch sizes, length of the run, recomputation, activation offload."""

    micro_batch_size: int | None = flag(None, "--batch-size", change=ROUNDING)
    """Samples in one forward pass of one data-parallel rank."""
    global_batch_size: int | None = flag(change=BATCHES)
    """Samples of an optimizer step. Default: micro-batch-size x data-parallel size."""
    rampup_batch_size: tuple[int, ...] | None = flag(change=BATCHES)
    """`start increment samples`: grow the global batch by increment over the first samples."""
    step_batch_size_schedule: tuple[str, ...] | None = flag(change=BATCHES)
    """`TOKENS:SAMPLES ...`, such as 0:16 2.4B:320: the global batch size from each number of
    consumed tokens on. Suffixes: K, M, B, T."""
    train_iters: int | None = not_negative()
    """Optimizer steps of the run."""
    train_samples: int | None = None
    """Samples of the run (instead of --train-iters)."""
    exit_interval: int | None = not_negative()
    """Save and exit at iterations divisible by this; 0: never."""
    exit_duration_in_mins: float | None = not_negative()
    """Save and exit after this many minutes; 0: never."""
    manual_gc: bool = True
    """Collect Python's garbage on all ranks at the same iterations: none waits for another's."""
    manual_gc_interval: int = not_negative(100, idle_without="manual_gc=True")
    """Iterations between collections; 0: none but those of --manual-gc-eval."""
    manual_gc_eval: bool = flag(True, idle_without="manual_gc=True")
    """Collect before and after each evaluation."""
    seed: int = not_negative(1234, change=SEED)
    """Seed of the initial weights, of dropout and of the order of the data."""
    nan_policy: Literal["stop", "skip"] = flag("stop", change=STEPS_ALONE)
    """What to do at a NaN or Inf loss or gradient: stop the run, or skip the step and log it."""
    cuda_graphs: bool = False
    """Replay the passes of layers as CUDA graphs from the second step on, for small, CPU-bound
    models. Takes memory beyond the plan's."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute in the backward pass: full layers, or the --recompute-modules (selective)."""
    recompute_modules: tuple[RecomputeModule, ...] | None = flag(needs=SELECTIVE)
    """Modules for selective recomputation: core_attn (default), qkv, mla_up_proj (queries, keys and
    values of latent attention), layernorm, mlp_act (activation), mlp (fc1 and activation), moe_act
    (activation of experts), moe (experts with dispatch)."""
    recompute_method: Literal["uniform", "block"] | None = full_flag()
    """uniform: all layers, in groups of --recompute-num-layers that keep one input. block: the
    first --recompute-num-layers of each (virtual) stage. Default: uniform."""
    recompute_num_layers: int | None = full_flag()
    """Layers of a group, or of each stage, see --recompute-method. Default of uniform: 1."""
    recompute: Literal["auto"] | None = None
    """auto: choose the fastest recomputation that fits --memory-budget, and print why."""
    memory_budget: float | None = flag(needs="recompute=auto")
    """GiB per device that --recompute auto may plan; leave room for what --dry-run lists as
    uncounted."""
    recompute_layers: tuple[str, ...] | None = None
    """Recomputation of each layer in order, as --recompute auto chooses it: WHAT*COUNT ..., where
    WHAT is none, full, or --recompute-modules joined by +."""
    distribute_saved_activations: bool = flag(
        False, needs="recompute_granularity=full", idle_without="tensor_model_parallel_size>1"
    )
    """With full recomputation: shard saved layer inputs over the tensor-parallel ranks."""
    activation_offload: bool = False
    """Keep saved activations in pinned host memory, copied back one pass ahead."""
    offload_modules: tuple[OffloadModule, ...] | None = offload_flag()
    """Modules whose saved inputs are offloaded, by default all: layer_input (of layers that are
    recomputed whole), attn_norm, qkv_linear, core_attn (with its statistics), attn_proj (needs
    core_attn), mlp_norm, mlp_fc1, mlp_act, mlp_fc2."""
    activation_offload_fraction: float = offload_flag(1.0, bound=UP_TO_ONE)
    """Share of the layers of each (virtual) stage, the first ones, that are offloaded."""
    min_offloaded_tensor_size: int = offload_flag(1048576, bound=NOT_NEGATIVE)
    """Elements below which a tensor stays on the device."""


class OptimizerKind(NamedTuple):
    """What rules and the plan know of an update rule; optimizer/update.py has its functions."""

    states: dict[str, str | None]  # buffer -> the field with its precision; None: the master's
    implementation: str | None  # the field that chooses its implementation, if there are several


OPTIMIZERS = {
    "adam": OptimizerKind(
        {"exp_avg": "exp_avg_dtype", "exp_avg_sq": "exp_avg_sq_dtype"}, "adam_implementation"
    ),
    "sgd": OptimizerKind({"momentum_buffer": None}, None),
}


# --lr-decay-style, and whether it goes down to --min-lr. optimizer/lr_schedule.py has their
# functions.
LR_DECAYS = {
    "constant": False,
    "linear": True,
    "cosine": True,
    "inverse-square-root": True,
    "WSD": True,
}
# Conditions: the rate decays, and it has a final decay.
DECAYING = "lr_decay_style=" + ",".join(name for name, decays in LR_DECAYS.items() if decays)
FINAL_DECAY = "lr_decay_style=WSD"
wsd_flag = partial(flag, idle_without=FINAL_DECAY)
FINAL_DECAYS = ("exponential", "linear", "cosine", "minus_sqrt")
WEIGHT_DECAY_CHANGES = ("constant", "linear", "cosine")
WeightDecayChange = Literal[*WEIGHT_DECAY_CHANGES]  # type: ignore[valid-type]


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam and SGD, learning-rate schedule, offload of optimizer state."""

    optimizer: Literal[*OPTIMIZERS] = flag("adam", change=STEPS)  # type: ignore[valid-type]
    """adam is AdamW (decoupled weight decay)."""
    adam_implementation: Literal["auto", "triton", "apex", "torch-fused"] = kernel_flag(
        idle_without="optimizer=adam"
    )
    """AdamW kernel: ours in Triton, apex's FusedAdam or torch's fused kernel."""
    grad_norm_backend: ApexBackend = kernel_flag()
    """Implementation of the gradient norm, which is summed in float64 (apex: fp32)."""
    main_grads_dtype: Literal["fp32", "bf16"] = flag("fp32", needs="bf16", change=STEPS)
    """Precision of accumulated gradients. bf16 saves 2 bytes a parameter and loses bits."""
    exp_avg_dtype: Literal["fp32", "bf16"] = adam_flag("fp32")
    """Precision in which Adam's first moment is kept."""
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = adam_flag("fp32")
    """Precision in which Adam's second moment is kept."""
    optimizer_cpu_offload: bool = flag(False, needs="optimizer=adam", change=ROUNDING)
    """Keep master weights and moments in host memory and update them on the CPU."""
    optimizer_offload_fraction: float = flag(
        1.0, bound=SHARE, needs="optimizer_cpu_offload", change=ROUNDING
    )
    """With --optimizer-cpu-offload: the share of the parameters that the CPU updates."""
    optimizer_nvme_offload: str | None = flag(needs="optimizer=adam")
    """Folder on a local disk of each node for master weights and moments; sets
    --optimizer-cpu-offload."""
    param_cpu_offload: bool = flag(False, needs="optimizer=adam zero_stage=3")
    """ZeRO-3: keep frozen and CPU-updated weights in host memory; sets --optimizer-cpu-offload."""
    freeze: str | None = flag(change=STEPS)
    """Parts to freeze, such as embedding,layers.0-3,head. Positions go with the first layer, the
    final norm with the last."""
    lr: float | None = not_negative()
    """Peak learning rate."""
    min_lr: float = not_negative(0.0, idle_without=DECAYING)
    """Learning rate at the end of the decay."""
    decoupled_lr: float | None = not_negative()
    """Peak learning rate of word embedding and head, on the same schedule. Default: lr."""
    decoupled_min_lr: float | None = not_negative(needs="decoupled_lr", idle_without=DECAYING)
    """With --decoupled-lr: their learning rate at the end of the decay. Default: min-lr."""
    lr_decay_style: Literal[*LR_DECAYS] = "linear"  # type: ignore[valid-type]
    """Shape of the decay after warm-up."""
    lr_decay_iters: int | None = None
    """Iterations over which the learning rate decays, warm-up included. Default: train-iters."""
    lr_decay_samples: int | None = None
    """Samples over which the learning rate decays, warm-up included. Default: train-samples."""
    lr_warmup_iters: int = not_negative(0)
    """Iterations of linear warm-up."""
    lr_warmup_samples: int = not_negative(0)
    """Samples of linear warm-up."""
    lr_warmup_fraction: float | None = flag(bound=BELOW_ONE)
    """Warm-up as a share of the decay."""
    lr_warmup_init: float = not_negative(0.0, idle_without=WARMUP)
    """Learning rate at which the warm-up starts."""
    lr_wsd_decay_style: Literal[*FINAL_DECAYS] = wsd_flag("exponential")  # type: ignore[valid-type]
    """Shape of the final decay of WSD."""
    lr_wsd_decay_iters: int | None = wsd_flag()
    """Iterations of the final decay of WSD."""
    lr_wsd_decay_samples: int | None = wsd_flag()
    """Samples of the final decay of WSD."""
    weight_decay: float = not_negative(0.01)
    """Weight decay; biases and one-dimensional parameters have none."""
    start_weight_decay: float | None = not_negative(needs=CHANGING)
    """Weight decay at the start of a run in which it changes."""
    end_weight_decay: float | None = not_negative(needs=CHANGING)
    """Weight decay at the end of a run in which it changes."""
    weight_decay_incr_style: WeightDecayChange = "constant"
    """Shape of the change of weight decay from start to end of the run."""
    clip_grad: float = not_negative(1.0, change=STEPS)
    """Scale gradients down to this global norm; 0 disables clipping."""
    adam_beta1: float = adam_flag(0.9, bound=BELOW_ONE)
    """Decay of Adam's first moment."""
    adam_beta2: float = adam_flag(0.999, bound=BELOW_ONE)
    """Decay of Adam's second moment."""
    adam_eps: float = adam_flag(1e-8)
    """Added to the root of Adam's second moment."""
    sgd_momentum: float = flag(0.9, bound=BELOW_ONE, idle_without="optimizer=sgd", change=STEPS)
    """Momentum of SGD."""
    override_opt_param_scheduler: bool = load_flag(False)
    """On resume take the command line's learning-rate and weight-decay schedule."""
    use_checkpoint_opt_param_scheduler: bool = load_flag(False)
    """On resume take the checkpoint's schedule without comparing it."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation during training, or without it."""

    eval_iters: int = not_negative(100, change=STEPS_ALONE)
    """Global batches in an evaluation; every evaluation uses the same ones."""
    eval_interval: int | None = not_negative(1000)
    """Training iterations between evaluations; 0: only at the end."""
    skip_train: bool = False
    """Load, evaluate, exit."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving, loading, resuming."""

    save: str | None = None
    """Folder for checkpoints and metrics.jsonl."""
    save_interval: int | None = save_flag(None, "--persistent-save-interval", bound=NOT_NEGATIVE)
    """Iterations between checkpoints; one is always written at the end, with 0 no other."""
    load: str | None = None
    """Folder to resume from. When it equals --save it may still be empty."""
    ckpt_step: int | None = not_negative(needs="load")
    """Load this iteration instead of the latest."""
    finetune: bool = flag(False, needs="load")
    """Load weights only; start at iteration 0."""
    load_optim: bool = load_flag(True)
    """Load the optimizer's state."""
    save_optim: bool = save_flag(True)
    """Write the optimizer's state."""
    exit_on_missing_checkpoint: bool = flag(False, needs="load")
    """Require --load to hold a checkpoint, instead of starting at iteration 0."""
    allow_older_checkpoint: bool = False
    """If the newest checkpoint is damaged, verify and load the newest undamaged one."""
    accept_changed: tuple[Changed, ...] | None = None
    """Resume although these changed: data (files, blend, sequence length), tokenizer (of the same
    size), batch (size, ramp-up), seed, positions (rotary base, scaling, longest sequence)."""
    use_checkpoint_args: bool = False
    """Take model, dropout, tokenizer and sequence length from the checkpoint where not given."""
    async_save: bool = save_flag(False)
    """Write checkpoints in the background; training waits only for a copy into host memory."""
    async_save_host_memory: float | None = flag(needs="async_save")
    """Most GiB of host memory of a rank's background save. Default: its whole shard."""
    local_checkpoint_dir: str | None = flag(
        None, "--non-persistent-local-ckpt-dir", needs="save local_save_interval"
    )
    """Folder on each node (such as /dev/shm/NAME) for frequent checkpoints, used at a restart."""
    local_save_interval: int | None = local_flag(None, "--non-persistent-save-interval")
    """Iterations between checkpoints in --local-checkpoint-dir."""
    local_redundancy: Literal["none", "partner", "xor"] = local_flag("none")
    """Rebuild a lost node from its partner's copy, or from parity blocks of up to 8 nodes (xor)."""
    save_retain_interval: int | None = save_flag()
    """Keep checkpoints at multiples of this, and the newest --save-keep-last."""
    save_keep_last: int | None = save_flag()
    """Newest checkpoints to keep. Default: all; 1 with --save-retain-interval."""
    verify_integrity: bool = flag(False, needs="save")
    """Read every checkpoint back from the disk and verify it before it counts as saved."""


@dataclass(frozen=True)
class LoggingConfig:
    """Console, metrics, TensorBoard, wandb, profiler."""

    log_interval: int = 100
    """Iterations between console lines and logged metrics."""
    log_params_norm: bool = False
    """Log the norm of the parameters."""
    log_num_zeros_in_grad: bool = False
    """Log how many gradient elements are zero."""
    log_layer_norms: bool = False
    """Log the norms of gradient (before clipping) and parameters of each layer."""
    moe_per_layer_logging: bool = flag(False, idle_without="num_experts")
    """Log how evenly tokens go to the experts of each layer, not of the worst one alone."""
    timing_log_level: Literal[0, 1] = 0
    """1 logs `<timer>-time` for data, forward-backward, optimizer, evaluation and checkpoint."""
    log_straggler: bool = True
    """Measure the compute time of each rank, and name one that keeps the others waiting."""
    straggler_threshold: float = not_negative(0.1)
    """How much slower than its peers a rank must be to be named: 0.1 is 10%."""
    pipeline_timeline: str | None = flag(idle_without=PIPELINE)
    """Write the last logged step's time line of each pipeline rank (tools/plot_schedule.py)."""
    profile: bool = False
    """Record some steps with torch's profiler, a Chrome trace per rank, in --profile-dir."""
    profile_step_start: int = profile_flag(10, bound=NOT_NEGATIVE)
    """Iterations before the first that --profile records."""
    profile_step_end: int = profile_flag(12)
    """The last iteration that --profile records."""
    profile_ranks: tuple[int, ...] = profile_flag((0,))
    """Ranks that --profile records."""
    profile_dir: str | None = None
    """Folder for traces and memory snapshots. Default: <save>/profile; without --save that of
    --tensorboard-dir, else profile."""
    pytorch_profiler_collect_shapes: bool = profile_flag(False, "--record-shapes")
    """Let traces hold the shapes of operators' inputs."""
    pytorch_profiler_collect_callstack: bool = profile_flag(False)
    """Let traces hold the lines of Python that called each operator."""
    record_memory_history: bool = False
    """Write a snapshot of CUDA allocations to --profile-dir at out-of-memory, after --profile."""
    metrics_file: str | None = None
    """File for the metrics. Default: <save>/metrics.jsonl."""
    tensorboard_dir: str | None = None
    """Write TensorBoard files here."""
    tensorboard_log_interval: int = flag(1, idle_without="tensorboard_dir|wandb_project")
    """Iterations between TensorBoard and wandb points (at most one per --log-interval)."""
    wandb_project: str | None = None
    """Log to this wandb project (WANDB_MODE=offline works)."""
    wandb_exp_name: str | None = wandb_flag()
    """Name of the wandb run."""
    wandb_group: str | None = wandb_flag()
    """Group of the wandb run: wandb shows the runs of a group together."""
    wandb_save_dir: str | None = wandb_flag()
    """Folder of wandb's files. Default: <save>/wandb."""
    wandb_entity: str | None = wandb_flag()
    """wandb entity (user or team)."""
    peak_tflops: float | None = None
    """Peak TFLOP/s of a device, for MFU. Default: the known device's; else no MFU."""


@dataclass(frozen=True)
class DistributedConfig:
    """Parallel layout, ZeRO, collectives, planning."""

    tensor_model_parallel_size: int = 1
    """Ranks over which each layer's matrices are divided (TP)."""
    context_parallel_size: int = flag(1, "--ds-sequence-parallel-size", change=ROUNDING)
    """Ranks over which the positions of each sample are divided (CP)."""
    expert_model_parallel_size: int = flag(1, needs="num_experts", change=ROUNDING)
    """Ranks that share the experts of a layer (EP), within a stage's TP x CP x DP ranks."""
    expert_tensor_parallel_size: int | None = expert_rounding_flag()
    """Ranks that share each expert's matrices (ETP). Default: tensor-model-parallel-size."""
    overlap_moe_expert_parallel_comm: bool = flag(False, needs="expert_model_parallel_size>1")
    """Run each backward pass with a later micro-batch's forward pass, layer by layer, so that token
    exchange overlaps compute. Holds more activations."""
    cp_comm_type: Literal["allgather", "a2a", "p2p", "a2a+p2p"] = flag(
        "allgather", idle_without="context_parallel_size>1", change=ROUNDING
    )
    """Attention across context-parallel ranks: gather keys and values (allgather), pass them in a
    ring (p2p), exchange heads for positions (a2a), or a ring of a2a groups (a2a+p2p)."""
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = flag(
        needs="cp_comm_type=a2a+p2p", change=ROUNDING
    )
    """For --cp-comm-type a2a+p2p: size of the a2a groups (within a node) and of the ring."""
    pipeline_model_parallel_size: int = 1
    """Ranks over which the layers are divided (PP)."""
    pipeline_schedule: Schedule | None = flag(change=ROUNDING)
    """Order of forward and backward passes. Default: 1f1b, or interleaved with virtual stages."""
    num_virtual_stages_per_pipeline_rank: int | None = flag(change=ROUNDING)
    """Stages that each pipeline rank holds (virtual stages): 1 by default, 2 with zero-bubble-v."""
    num_layers_per_virtual_pipeline_stage: int | None = flag(idle_without=PIPELINE)
    """Layers of each virtual stage; another way to give the number of virtual stages."""
    decoder_first_pipeline_num_layers: int | None = pipeline_flag()
    """Layers of the first pipeline rank; ranks without a given number share the others evenly."""
    decoder_last_pipeline_num_layers: int | None = pipeline_flag()
    """Layers of the last pipeline rank; ranks without a given number share the others evenly."""
    account_for_embedding_in_pipeline_split: bool = pipeline_flag(False)
    """Count the embedding as a layer of the first stage when layers are divided evenly."""
    account_for_loss_in_pipeline_split: bool = pipeline_flag(False)
    """Count head and loss as a layer of the last stage when layers are divided evenly."""
    pipeline_model_parallel_layout: str | None = pipeline_flag()
    """Stages as text, E embedding, t layer, L head and loss: Et*3|(tt|)*6tL; auto: by cost."""
    sequence_parallel: bool = flag(False, change=ROUNDING)
    """Shard activations of norms, dropout and residuals over the TP ranks. Sends no more bytes."""
    overlap_grad_reduce: bool = flag(True, idle_without="replicas>1", change=ROUNDING)
    """Reduce gradients during the backward pass. Costs time on CPUs whose cores all compute."""
    zero_stage: Literal[0, 1, 2, 3] = flag(0, change=ROUNDING)
    """ZeRO: data-parallel ranks shard 1 optimizer state, 2 also gradients, 3 also weights."""
    zero_shard_size: int | None = flag(needs="zero_stage>0", change=ROUNDING)
    """Neighbouring data-parallel ranks that ZeRO shards over; each group has a copy.
    Default: all."""
    zero3_keep_gathered: bool = flag(False, needs="zero_stage=3")
    """ZeRO-3: gather a layer once a step, not for every pass."""
    overlap_param_gather: bool = flag(True, idle_without="zero_stage>0")
    """ZeRO: gather the weights of the next layers during computation."""
    grad_reduce_in_bf16: bool = flag(False, idle_without="replicas>1", change=STEPS)
    """Send gradients in bf16, but for sums over the copies of --zero-shard-size; accumulation is
    unchanged. Gloo sums in fp32, NCCL in bf16."""
    use_tp_pp_dp_mapping: bool = flag(False, idle_without=PIPELINE)
    """Number the ranks tp, cp, pp, dp instead of tp, cp, dp, pp (fastest first)."""
    distributed_backend: Literal["auto", "nccl", "gloo"] = flag(
        "auto", idle_without="world>1", change=ROUNDING
    )
    """Library of the collectives: auto takes nccl on GPUs and gloo on CPUs."""
    distributed_timeout_minutes: float = flag(10.0, bound=UP_TO_A_YEAR, idle_without="world>1")
    """Longest wait for other ranks, at the start and in every collective."""
    world_size: int | None = None
    """With --dry-run: the number of ranks to validate for."""
    device_memory: float | None = None
    """GiB of a GPU, for the plan's verdict. Default: what the GPU has; 80 in a dry run."""
    hardware: str | None = None
    """Device for predicted step times: a name or file of tools/plan.py. Default: the GPU's."""
    host_memory: float | None = None
    """GiB of a node's memory for all its ranks, which offload must fit. Default: the node's."""


@dataclass(frozen=True)
class Config:
    """All groups of one run; `given` names the fields that a flag set, to their defaults too."""

    model: ModelConfig = ModelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    distributed: DistributedConfig = DistributedConfig()
    given: frozenset[str] = dataclasses.field(default=frozenset(), compare=False, repr=False)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Nested plain dictionaries: what --print-config, wandb and checkpoints store."""
        return {name: dataclasses.asdict(getattr(self, name)) for name in GROUPS}

    def with_fields(self, group: str, **values: Any) -> Config:
        """The same run with other values of some fields of a group."""
        changed = dataclasses.replace(getattr(self, group), **values)
        return dataclasses.replace(self, **{group: changed})

    @classmethod
    def from_dict(cls, groups: dict[str, dict[str, Any]]) -> Config:
        """The inverse of to_dict, also after JSON (its lists become tuples). Raises TypeError for
        an unknown field.
        """
        config = cls()
        for group in GROUPS:
            fields = groups.get(group, {}).items()
            values = {name: tuple(v) if isinstance(v, list) else v for name, v in fields}
            config = config.with_fields(group, **values)
        return config


GROUPS: dict[str, Any] = {
    group.name: type(group.default)
    for group in dataclasses.fields(Config)
    if dataclasses.is_dataclass(group.default)
}

# The settings as flags and files give them, called `flags`: derived values are still None. A
# `config` is what `resolve` makes of them, which all code gets but parsing and the start of a run.
GivenConfig = NewType("GivenConfig", Config)
