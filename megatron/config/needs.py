"""What a field has no effect without, by name: `needs.PIPELINE` and so on.

`run` in a condition is `derive.RunView`: every field by its own name, and tp, pp, dp and world.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Need:
    """A field has no effect without `text`. Where that is not given, a value other than the default
    is a fault if `fault` is set: the run would have another model, other numbers, less safety or
    more memory than the flag asks for. Otherwise it is a remark: launch scripts give such flags in
    every run, and the same line of flags should run in every layout.

    Without `holds`, the text is a flag that must be given, with the value that follows it if one
    does; DIR, N and NAME are any value.
    """

    text: str
    holds: Callable[[Any], bool] | None = None
    fault: bool = False

    def is_met(self, run: Any) -> bool:
        """Whether the field can act in this run."""
        if self.holds is not None:
            return self.holds(run)
        flag, _, value = self.text.partition(" ")
        given = getattr(run, flag[2:].replace("-", "_"))
        if value in ("", "DIR", "N", "NAME"):
            return given is not None and given is not False
        return str(given) == value


def is_rotary(run: Any) -> bool:
    """Whether positions rotate queries and keys."""
    return run.position_embedding_type in ("rope", "yarn")


def is_yarn(run: Any) -> bool:
    """Whether the rotary frequencies are YaRN's."""
    return run.position_embedding_type == "yarn"


GROUPED = Need(
    "--group-query-attention",
    lambda run: run.group_query_attention or run.num_query_groups == run.num_attention_heads,
    fault=True,
)
ROTARY = Need("--position-embedding-type rope or yarn", is_rotary)
ROPE = Need("--position-embedding-type rope", fault=True)
SCALED_ROPE = Need(
    "--use-rope-scaling or --position-embedding-type yarn",
    lambda run: run.use_rope_scaling or is_yarn(run) or not is_rotary(run),
    fault=True,
)
LLAMA_ROPE = Need(
    "--use-rope-scaling", lambda run: run.use_rope_scaling or not is_rotary(run), fault=True
)
YARN = Need(
    "--position-embedding-type yarn", lambda run: is_yarn(run) or not is_rotary(run), fault=True
)
DYNAMIC_SCALE = Need(
    "dynamic loss scaling (no --loss-scale)",
    lambda run: run.loss_scale is None or not run.fp16,
    fault=True,
)
FP16 = Need("--fp16")
BF16 = Need("--bf16", fault=True)
FP8 = Need("--fp8-format e4m3 or hybrid", lambda run: run.fp8_format is not None)
FP8_FAULT = Need(FP8.text, FP8.holds, fault=True)
WINDOW = Need("--window-size N", fault=True)
EXPERTS = Need("--num-experts N", fault=True)
EXPERTS_EXIST = Need("--num-experts N")
EXPERT_PARALLEL = Need(
    "--expert-model-parallel-size of 2 or more",
    lambda run: run.expert_model_parallel_size > 1,
    fault=True,
)
LATENT = Need("--multi-latent-attention", fault=True)
LATENT_ROPE = Need("--multi-latent-attention")
SHARED_EXPERT = Need("--moe-shared-expert-intermediate-size N", fault=True)
EXPERT_BIAS = Need("--moe-router-enable-expert-bias", fault=True)
EXPERT_CAPACITY = Need("--moe-expert-capacity-factor N", fault=True)
EXPERT_GROUPS = Need("--moe-router-num-groups N", fault=True)
SOFTMAX_ROUTER = Need("--moe-router-score-function softmax")
FIRST_LAST = Need("--first-last-layers-bf16")
RECOMPUTE = Need("--recompute-granularity full", fault=True)
RECOMPUTE_FULL = Need("--recompute-granularity full")
MANUAL_GC = Need("--manual-gc")
RECOMPUTE_AUTO = Need("--recompute auto", fault=True)
SELECTIVE = Need("--recompute-granularity selective", fault=True)
ACTIVATION_OFFLOAD = Need("--activation-offload", fault=True)
ADAM = Need("--optimizer adam")
OFFLOADED_ADAM = Need("--optimizer adam", fault=True)
SGD = Need("--optimizer sgd")
CPU_OFFLOAD = Need("--optimizer-cpu-offload", fault=True)
DECAY = Need("a --lr-decay-style that decays", lambda run: run.decay_kind.decays)
DECOUPLED = Need("--decoupled-lr N", fault=True)
WSD = Need("--lr-decay-style WSD", lambda run: run.decay_kind.has_final_decay)
WARMUP = Need(
    "a warm-up (--lr-warmup-iters, -samples or -fraction)",
    lambda run: bool(run.lr_warmup_iters or run.lr_warmup_samples or run.lr_warmup_fraction),
)
CHANGING_DECAY = Need(
    "--weight-decay-incr-style linear or cosine",
    lambda run: run.weight_decay_incr_style != "constant",
    fault=True,
)
DATA_PATH = Need("--data-path", lambda run: run.data_path is not None or run.mock_data)
DATA_FILES = Need("data files (--data-path or --train-data-path)", lambda run: not run.mock_data)
MODEL_FILE = Need(
    "--tokenizer-type SentencePieceTokenizer, HuggingFaceTokenizer or TikTokenizer",
    lambda run: run.tokenizer_type not in ("GPT2BPETokenizer", "NullTokenizer"),
)
GPT2_BPE = Need(
    "--tokenizer-type GPT2BPETokenizer",
    lambda run: run.tokenizer_type in (None, "GPT2BPETokenizer"),
)
SAVE = Need("--save DIR")
SAVE_FOR_SAFETY = Need("--save DIR", fault=True)
ASYNC_SAVE = Need("--async-save")
ASYNC_SAVE_COPIES = Need(
    "--async-save without --local-checkpoint-dir, whose files are copied instead",
    lambda run: run.async_save and run.local_checkpoint_dir is None,
    fault=True,
)
LOCAL_FOLDER = Need("--local-checkpoint-dir DIR", fault=True)
LOCAL_INTERVAL = Need("--local-save-interval N", fault=True)
LOAD = Need("--load DIR")
LOAD_AS_ASKED = Need("--load DIR", fault=True)
PROFILE = Need("--profile")
WANDB = Need("--wandb-project NAME")
EVALUATED = Need("--eval-iters above 0", lambda run: run.eval_iters > 0, fault=True)
TRACKERS = Need(
    "--tensorboard-dir or --wandb-project",
    lambda run: run.tensorboard_dir is not None or run.wandb_project is not None,
)
SEVERAL_RANKS = Need("several ranks", lambda run: run.world > 1)
TENSOR_PARALLEL = Need("--tensor-model-parallel-size above 1", lambda run: run.tp > 1)
CONTEXT_PARALLEL = Need("--context-parallel-size above 1", lambda run: run.cp > 1)
TWO_LEVELS = Need("--cp-comm-type a2a+p2p", lambda run: run.cp_comm_type == "a2a+p2p", fault=True)
PIPELINE = Need("--pipeline-model-parallel-size above 1", lambda run: run.pp > 1)
DATA_PARALLEL = Need("several data- or context-parallel ranks", lambda run: run.replicas > 1)
SHARDED = Need(
    "--zero-stage 1, 2 or 3",
    lambda run: run.zero_stage > 0 or not run.has("zero_shard_size"),
    fault=True,
)
GATHERED = Need(
    "--zero-stage 1, 2 or 3 on several data-parallel ranks", lambda run: run.zero_stage > 0
)
ZERO_3 = Need("--zero-stage 3", fault=True)
