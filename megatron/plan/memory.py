"""Memory of one rank, predicted from the flags: what the banner and --dry-run print.

Counts what this code keeps, not what a perfect implementation would: a test compares the activations with the tensors that
autograd saves. Not counted: the allocator's fragmentation, the device's context and kernels (0.5 to 0.9 GiB on a GPU), temporaries (among
them what is gathered from other ranks), token ids and the loss (about 20 bytes a token).
"""

from __future__ import annotations

from megatron.config.derive import GATED
from megatron.config.groups import Config, ModelConfig, PrecisionConfig
from megatron.model.arithmetic import head_widths, local_parameter_count, local_shape, padded_vocab_size


def estimate(config: Config, vocab_size: int, world_size: int) -> dict[str, int]:
    """Bytes of parameters, gradients, optimizer, activations and logits on each of `world_size` ranks, and their total.

    Static bytes per local parameter with Adam: 18 in bf16 and fp16 (2 weights, 4 gradients, 4 master weights, 8 moments), 16 in fp32.
    Activations are those kept between forward and backward of one micro-batch. Tensor parallelism divides what lies between a column- and
    a row-parallel matrix, and the logits; sequence parallelism divides the rest too.
    """
    model, training, tp = config.model, config.training, config.distributed.tensor_model_parallel_size
    assert world_size % tp == 0  # data-parallel ranks hold everything: nothing is sharded over them yet
    compute, wide = element_sizes(config.precision)
    padded = padded_vocab_size(vocab_size, model, tp)
    stored = local_parameter_count(model, padded, tp)["total"]
    moments = 2 if config.optimizer.optimizer == "adam" else 1
    tokens = training.micro_batch_size * config.data.seq_length
    own = tokens // tp if config.distributed.sequence_parallel else tokens  # outside the pairs of matrices
    inside = inner_bytes_per_token(local_shape(model, tp), config.data.seq_length, compute, wide)
    one = own * outer_bytes_per_token(model, compute, wide) + tokens * inside + mask_bytes(config, compute)
    layers = model.num_layers * one
    if training.recompute_granularity == "full":
        layers = one + model.num_layers * own * model.hidden_size * compute
    ends = own * (model.hidden_size * compute * 2 + norm_statistics(model, wide))  # the final norm's input and output
    if model.hidden_dropout > 0 or model.position_embedding_type == "learned_absolute":
        mask = 1 if model.hidden_dropout > 0 else 0
        ends += own * model.hidden_size * (compute + mask)  # the embedding before positions and dropout
    sizes = {
        "parameters": compute * stored,
        "gradients": wide * stored,
        "optimizer": (moments + (compute != wide)) * wide * stored,
        "activations": layers + ends,
        "logits": tokens * (padded // tp) * compute,
    }
    return {**sizes, "total": sum(sizes.values())}


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
