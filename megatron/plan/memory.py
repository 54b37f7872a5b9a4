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
    one = tokens * layer_bytes_per_token(model, config.data.seq_length, compute, wide)
    layers = model.num_layers * one
    if training.recompute_granularity == "full":
        layers = one + model.num_layers * tokens * model.hidden_size * compute
    head_input = tokens * (model.hidden_size * compute * 2 + norm_statistics(model, wide))  # input and output of the final norm
    sizes = {
        "parameters": compute * stored,
        "gradients": wide * stored,
        "optimizer": (moments + (compute != wide)) * wide * stored,
        "activations": layers + head_input,
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
    """Bytes per token between the QKV projection's input and the output projection's, both excluded and included."""
    q, k = head_widths(model)
    heads = model.num_attention_heads
    rotates, norms = model.position_embedding_type in ("rope", "yarn"), model.qk_layernorm
    width = q + 2 * k  # the fused projection, kept through its value part
    if model.num_query_groups > 1 and (norms or not rotates):
        width += q  # queries gathered from their groups
    if rotates or norms:
        width += q + k  # rotated or normalised queries and keys
    statistics = (heads + model.num_query_groups) * norm_statistics(model, wide) if norms else 0
    if model.attention_dropout == 0 and model.attn_logit_softcapping is None and model.attention_backend != "plain":
        return compute * (width + 2 * q) + wide * heads + statistics  # the core's output in two layouts, log-sum-exp
    dropped = model.attention_dropout > 0
    scores = wide + (wide if model.attn_logit_softcapping is not None else 0) + (1 if dropped else 0)  # softmax, tanh, mask
    if dropped or compute != wide:
        scores += compute  # the probabilities that multiply the values
    return compute * (width + 3 * q) + scores * heads * seq + statistics  # keys and values repeated for each head; the core's output
