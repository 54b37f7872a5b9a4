"""Memory of one rank, predicted from the flags: what the banner and --dry-run print.

Counts what this code keeps, not what a perfect implementation would: a test compares the activations with the tensors that
autograd saves. Not counted: the allocator's fragmentation, the device's context and kernels (0.5 to 0.9 GiB on a GPU), temporaries (among
them what is gathered from other ranks, and what pipeline ranks are about to receive), token ids, positions and the loss (about 30 bytes a token of each
micro-batch in flight).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.config.derive import GATED, data_parallel_size
from megatron.config.groups import Config, ModelConfig, PrecisionConfig
from megatron.model.arithmetic import head_widths, local_shape, padded_vocab_size, unit_parameters
from megatron.model.stages import Stage, pipeline_stages
from megatron.parallel.schedule import Action, Kind, Schedule, build_schedule


@dataclass(frozen=True)
class StageBytes:
    """What one micro-batch keeps of a stage."""

    saved: int  # from the forward pass to the backward pass, without logits; also the output that is sent, as only what comes back proves its arrival
    logits: int
    stashed: int  # from the input gradient to the weight gradient, where they are apart
    running: int  # beside `saved` or `stashed` while a backward pass runs: the layer that is recomputed


def estimate(config: Config, vocab_size: int, world_size: int) -> dict[str, int]:
    """Bytes of parameters, gradients, optimizer, activations and logits, and their total, on the ranks of the pipeline rank that needs the most."""
    return max(estimate_ranks(config, vocab_size, world_size), key=lambda sizes: sizes["total"])


def estimate_ranks(config: Config, vocab_size: int, world_size: int) -> list[dict[str, int]]:
    """What `estimate` says, for each pipeline rank.

    Static bytes per local parameter with Adam: 18 in bf16 and fp16 (2 weights, 4 gradients, 4 master weights, 8 moments), 16 in fp32; a tied
    head that is not on the embedding's rank has a copy of its matrix. Activations are those kept between forward and backward of the micro-batches
    that the schedule has in flight at the worst moment. Tensor parallelism divides what lies between a column- and a row-parallel matrix, and the
    logits; sequence parallelism divides the rest too.
    """
    compute, wide = element_sizes(config.precision)
    moments = 2 if config.optimizer.optimizer == "adam" else 1
    padded = padded_vocab_size(vocab_size, config.model, config.distributed.tensor_model_parallel_size)
    stages, schedule = pipeline_stages(config, padded), schedule_of(config, world_size)
    stored = stage_parameters(config, stages, schedule.placement, padded)
    following = [*schedule.placement[1:], schedule.placement[-1]]  # the last stage sends nothing
    each = [stage_bytes(config, stage, padded, sends=here != there)
            for stage, here, there in zip(stages, schedule.placement, following, strict=True)]
    result = []
    for rank, actions in enumerate(schedule.actions):
        count = sum(number for number, where in zip(stored, schedule.placement, strict=True) if where == rank)
        activations, logits = activation_peak(actions, each)
        sizes = {
            "parameters": compute * count,
            "gradients": wide * count,
            "optimizer": (moments + (compute != wide)) * wide * count,
            "activations": activations,
            "logits": logits,
        }
        result.append({**sizes, "total": sum(sizes.values())})
    return result


def schedule_of(config: Config, world_size: int) -> Schedule:
    """What one training step runs, of the full global batch."""
    training, distributed = config.training, config.distributed
    ranks = data_parallel_size(config, world_size)
    assert ranks > 0
    micro_batches = training.global_batch_size // (training.micro_batch_size * ranks)
    return build_schedule(distributed.pipeline_schedule, distributed.pipeline_model_parallel_size, distributed.num_virtual_stages_per_pipeline_rank,
                          micro_batches)


def stage_parameters(config: Config, stages: Sequence[Stage], placement: Sequence[int], padded_vocab: int) -> list[int]:
    """Parameters of each stage on each of its ranks."""
    units = unit_parameters(config.model, padded_vocab, config.distributed.tensor_model_parallel_size, copied=placement[0] != placement[-1])
    return [sum(units[i] for i in stage.units) for stage in stages]


def stage_bytes(config: Config, stage: Stage, padded_vocab: int, *, sends: bool) -> StageBytes:
    """What one micro-batch keeps of a stage on one rank; `sends`: the next stage is on another."""
    model, tp = config.model, config.distributed.tensor_model_parallel_size
    compute, wide = element_sizes(config.precision)
    local, seq = local_shape(model, tp), config.data.seq_length
    tokens = config.training.micro_batch_size * seq
    own = tokens // tp if config.distributed.sequence_parallel else tokens  # outside the pairs of matrices
    hidden = own * model.hidden_size * compute
    layer = own * outer_bytes_per_token(model, compute, wide) + tokens * inner_bytes_per_token(local, seq, compute, wide)
    layer += mask_bytes(config, compute)
    ends = 0
    if 0 in stage.layers and (model.hidden_dropout > 0 or model.position_embedding_type == "learned_absolute"):
        ends += hidden + (own * model.hidden_size if model.hidden_dropout > 0 else 0)  # the embedding before positions and dropout, the mask
    if model.num_layers - 1 in stage.layers:
        ends += hidden + own * norm_statistics(model, wide)  # the final norm's input
    recomputed = config.training.recompute_granularity == "full"
    return StageBytes(
        saved=len(stage.layers) * (hidden if recomputed else layer) + (0 if recomputed else ends) + hidden * (stage.head + sends),
        logits=tokens * (padded_vocab // tp) * compute if stage.head else 0,
        stashed=len(stage.layers) * (4 * hidden + tokens * stashed_bytes_per_token(local, compute)),
        running=layer - hidden + ends if recomputed and len(stage.layers) else 0,
    )


def activation_peak(actions: Sequence[Action], each: Sequence[StageBytes]) -> tuple[int, int]:
    """Bytes of activations and of logits when their sum is largest, on the rank that carries out these actions; `each` by stage."""
    activations = logits = 0
    peak = (0, 0)
    for kind, stage, _ in actions:
        own = each[stage]
        if kind is Kind.FORWARD:
            activations, logits = activations + own.saved, logits + own.logits
        elif kind is Kind.BACKWARD or kind is Kind.BACKWARD_INPUT:
            peak = max(peak, (activations + own.running, logits), key=sum)  # at its first layer
            activations, logits = activations - own.saved + (own.stashed if kind is Kind.BACKWARD_INPUT else 0), logits - own.logits
            peak = max(peak, (activations + own.running, logits), key=sum)  # at its last
        elif kind is Kind.BACKWARD_WEIGHT:
            activations -= own.stashed
        peak = max(peak, (activations, logits), key=sum)
    assert activations == logits == 0
    return peak


def element_sizes(precision: PrecisionConfig) -> tuple[int, int]:
    """Bytes of an element in the compute precision, and in the precision of gradients, master weights and moments."""
    if precision.fp64:
        return 8, 8
    return (2 if precision.bf16 or precision.fp16 else 4), 4


def norm_statistics(model: ModelConfig, wide: int) -> int:
    """Bytes per token that a norm keeps beside its input: the reciprocal deviation, and LayerNorm's mean."""
    return wide * (2 if model.normalization == "LayerNorm" else 1)


def outer_bytes_per_token(model: ModelConfig, compute: int, wide: int) -> int:
    """Bytes per token that one layer keeps outside its pairs of matrices: residual stream, norm output and dropout mask, before attention and MLP."""
    h = model.hidden_size
    return 2 * (compute * 2 * h + norm_statistics(model, wide) + (h if model.hidden_dropout > 0 else 0))


def inner_bytes_per_token(model: ModelConfig, seq: int, compute: int, wide: int) -> int:
    """Bytes per token that one layer keeps between the matrices of attention and of the MLP; `model` is the local shape."""
    mlp = (3 if model.activation in GATED else 2) * model.ffn_hidden_size  # fc1's output and the activation's
    return compute * mlp + attention_bytes_per_token(model, seq, compute, wide)


def stashed_bytes_per_token(model: ModelConfig, compute: int) -> int:
    """Bytes per token that a layer's linear layers keep of their inputs and output gradients between their pairs; four more are [s, b, h]."""
    q, k = head_widths(model)
    return compute * (q + 2 * k + q + (3 if model.activation in GATED else 2) * model.ffn_hidden_size)


def attention_bytes_per_token(model: ModelConfig, seq: int, compute: int, wide: int) -> int:
    """Bytes per token from the QKV projection's output to the output projection's input."""
    q, k = head_widths(model)
    heads, groups = model.num_attention_heads, model.num_query_groups
    rotates, norms = model.position_embedding_type in ("rope", "yarn"), model.qk_layernorm
    statistics = (heads + groups) * norm_statistics(model, wide) if norms else 0
    gathered = q if 1 < groups < heads else 0  # a copy of the queries, which stand between their groups' keys and values
    if uses_plain_attention(model):
        dropped = model.attention_dropout > 0
        scores = wide + (wide if model.attn_logit_softcapping is not None else 0) + (1 if dropped else 0)  # softmax, tanh, mask
        if dropped or compute != wide:
            scores += compute  # the probabilities that multiply the values
        if norms:
            width = q + 2 * k + gathered + 4 * q  # inputs of the norms; queries, repeated keys and values; the output
        else:
            width = q + 2 * k + 3 * q if groups == heads and not rotates else 4 * q  # one head each: the values stay in the projection
        return compute * width + scores * heads * seq + statistics
    width = q + 2 * k + q  # the fused projection, kept through its values; the output
    width += gathered if norms or not rotates else 0
    width += q + k if norms or rotates else 0
    return compute * width + wide * heads + statistics  # with log-sum-exp


def uses_plain_attention(model: ModelConfig) -> bool:
    """Whether training computes attention with all scores in memory."""
    return model.attention_dropout > 0 or model.attn_logit_softcapping is not None or model.attention_backend == "plain"


def mask_bytes(config: Config, compute: int) -> int:
    """Bytes of one layer's attention mask: none when the fused attention is causal and no more, one per sample with document masking."""
    plain, documents = uses_plain_attention(config.model), config.data.reset_attention_mask
    if not (plain or documents or config.model.window_size is not None):
        return 0
    element = 1 if plain else compute  # the fused attention turns a boolean mask into numbers that are added to the scores
    return element * config.data.seq_length**2 * (config.training.micro_batch_size if documents else 1)
