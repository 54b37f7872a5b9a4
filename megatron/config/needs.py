"""What a field can have no effect without, where that is more than one flag: `needs.PIPELINE`.

`run` in a condition is `derive.RunView`: every field by its own name, and tp, pp, dp and world.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Need(NamedTuple):
    """A condition, by what a message calls it.

    Without `holds`, the text is a flag that must be given, with the value that follows it if one
    does; DIR, N and NAME are any value.
    """

    text: str
    holds: Callable[[Any], bool] | None = None

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
)
ROTARY = Need("--position-embedding-type rope or yarn", is_rotary)
SCALED_ROPE = Need(
    "--use-rope-scaling or --position-embedding-type yarn",
    lambda run: run.use_rope_scaling or is_yarn(run) or not is_rotary(run),
)
LLAMA_ROPE = Need("--use-rope-scaling", lambda run: run.use_rope_scaling or not is_rotary(run))
YARN = Need("--position-embedding-type yarn", lambda run: is_yarn(run) or not is_rotary(run))
DYNAMIC_SCALE = Need(
    "dynamic loss scaling (no --loss-scale)", lambda run: run.loss_scale is None or not run.fp16
)
FP8 = Need("--fp8-format e4m3 or hybrid", lambda run: run.fp8_format is not None)
EXPERT_PARALLEL = Need(
    "--expert-model-parallel-size of 2 or more", lambda run: run.expert_model_parallel_size > 1
)
DECAY = Need("a --lr-decay-style that decays", lambda run: run.decay_kind.decays)
WSD = Need("--lr-decay-style WSD", lambda run: run.decay_kind.has_final_decay)
WARMUP = Need(
    "a warm-up (--lr-warmup-iters, -samples or -fraction)",
    lambda run: bool(run.lr_warmup_iters or run.lr_warmup_samples or run.lr_warmup_fraction),
)
CHANGING_DECAY = Need(
    "--weight-decay-incr-style linear or cosine",
    lambda run: run.weight_decay_incr_style != "constant",
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
ASYNC_SAVE_COPIES = Need(
    "--async-save without --local-checkpoint-dir, whose files are copied instead",
    lambda run: run.async_save and run.local_checkpoint_dir is None,
)
EVALUATED = Need("--eval-iters above 0", lambda run: run.eval_iters > 0)
TRACKERS = Need(
    "--tensorboard-dir or --wandb-project",
    lambda run: run.tensorboard_dir is not None or run.wandb_project is not None,
)
SEVERAL_RANKS = Need("several ranks", lambda run: run.world > 1)
TENSOR_PARALLEL = Need("--tensor-model-parallel-size above 1", lambda run: run.tp > 1)
CONTEXT_PARALLEL = Need("--context-parallel-size above 1", lambda run: run.cp > 1)
PIPELINE = Need("--pipeline-model-parallel-size above 1", lambda run: run.pp > 1)
DATA_PARALLEL = Need("several data- or context-parallel ranks", lambda run: run.replicas > 1)
SHARDED = Need(
    "--zero-stage 1, 2 or 3", lambda run: run.zero_stage > 0 or not run.has("zero_shard_size")
)
GATHERED = Need(
    "--zero-stage 1, 2 or 3 on several data-parallel ranks", lambda run: run.zero_stage > 0
)
