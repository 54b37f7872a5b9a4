"""Memory of one rank, predicted from the flags: what the banner and --dry-run print.

Counts what this code keeps, not what a perfect implementation would: a test compares the activations with the tensors that
autograd saves. Not counted: the allocator's fragmentation, the device's context and kernels (0.5 to 0.9 GiB on a GPU), temporaries.
"""

from __future__ import annotations

from megatron.config.derive import GATED
from megatron.config.groups import Config, ModelConfig, PrecisionConfig
from megatron.model.arithmetic import head_widths, padded_vocab_size, parameter_count


def estimate(config: Config, vocab_size: int, world_size: int) -> dict[str, int]:
    """Bytes of parameters, gradients, optimizer, activations and logits on each of `world_size` replicas, and their total.

    Static bytes per parameter with Adam: 18 in bf16 and fp16 (2 weights, 4 gradients, 4 master weights, 8 moments), 16 in fp32.
    Activations are those kept between forward and backward of one micro-batch.
    """
    assert world_size >= 1  # data-parallel replicas hold everything: nothing is sharded yet
    model, training = config.model, config.training
    compute, wide = element_sizes(config.precision)
    stored = parameter_count(model, padded_vocab_size(vocab_size, model))["total"]
    moments = 2 if config.optimizer.optimizer == "adam" else 1
    tokens = training.micro_batch_size * config.data.seq_length
    one = tokens * layer_bytes_per_token(model, config.data.seq_length, compute, wide) + mask_bytes(config, compute)
    layers = model.num_layers * one
    if training.recompute_granularity == "full":
        layers = one + model.num_layers * tokens * model.hidden_size * compute
    ends = tokens * (model.hidden_size * compute * 2 + norm_statistics(model, wide))  # the final norm's input and output
    if model.hidden_dropout > 0 or model.position_embedding_type == "learned_absolute":
        mask = 1 if model.hidden_dropout > 0 else 0
        ends += tokens * model.hidden_size * (compute + mask)  # the embedding before positions and dropout
    sizes = {
        "parameters": compute * stored,
        "gradients": wide * stored,
        "optimizer": (moments + (compute != wide)) * wide * stored,
        "activations": layers + ends,
        "logits": tokens * padded_vocab_size(vocab_size, model) * compute,
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


def layer_bytes_per_token(model: ModelConfig, seq: int, compute: int, wide: int) -> int:
    """Bytes per token that one layer keeps for its backward pass, its own input included."""
    h, f = model.hidden_size, model.ffn_hidden_size
    dropout_masks = 2 * h if model.hidden_dropout > 0 else 0
    mlp = (3 if model.activation in GATED else 2) * f  # fc1's output and the activation's
    # residual stream and norm output before attention, and again before the MLP
    return compute * (4 * h + mlp) + 2 * norm_statistics(model, wide) + dropout_masks + attention_bytes_per_token(model, seq, compute, wide)


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
