"""What one micro-batch keeps of each unit of a model, and what a unit needs besides while it runs.

Counts what this code keeps with the kernels that it takes, not what a perfect implementation would: tests compare it with the tensors that autograd
saves and with the bytes that live while a step runs. Kernels that keep the same as PyTorch's operators are not mentioned. Per token: h hidden, f ffn
width, q and k widths of queries and keys, V vocabulary, all of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.config.derive import GATED
from megatron.config.groups import Config, ModelConfig
from megatron.config.workspace import DROPOUT_COUNTER_BYTES, DROPOUT_COUNTERS, HEAD_CHUNK_BYTES, LOSS_CHUNK_BYTES, SCRATCH_BYTES
from megatron.kernels import activation as activation_kernel
from megatron.kernels.attention_masks import TILE
from megatron.model.arithmetic import head_widths, local_shape
from megatron.model.kernels import OURS, choose_kernels, repeats_heads
from megatron.model.stages import Stage
from megatron.plan.state import element_sizes


@dataclass(frozen=True)
class UnitBytes:
    """What one micro-batch keeps of a unit, and what running it takes beside that."""

    saved: int  # from the forward pass to the backward pass, its input included, logits not
    logits: int
    stashed: int  # from the input gradient to the weight gradient, where they are apart
    forward: int  # at the forward pass's worst moment, beside `saved`, `logits` and what other units keep
    backward: int  # at the backward pass's worst moment, beside the same and the gradient of its output
    split: int  # at that of a backward pass that leaves the weight gradients for later
    forming: int  # the same at the moment when weight gradients are formed
    weight: int  # during a weight gradient's pass alone, beside `stashed`
    scratch: int  # in which weight gradients are formed
    head: bool = False


class Shape:
    """The sizes that the formulas below share, of one rank and one micro-batch."""

    def __init__(self, config: Config, padded_vocab: int, device: str = "cuda"):
        tp = config.distributed.tensor_model_parallel_size
        chosen, _ = choose_kernels(config, torch.device(device))
        self.config, self.model, self.device = config, local_shape(chosen.model, tp), device
        self.compute, self.wide = element_sizes(config.precision)
        self.seq, self.sequence_parallel = config.data.seq_length, config.distributed.sequence_parallel
        self.tokens = config.training.micro_batch_size * self.seq
        self.own = self.tokens // tp if self.sequence_parallel else self.tokens  # outside the pairs of matrices
        self.hidden = self.own * self.model.hidden_size * self.compute
        self.whole = self.tokens * self.model.hidden_size * self.compute
        self.vocab = padded_vocab // tp
        self.recomputed = config.training.recompute_granularity == "full"
        self.dropped = self.model.hidden_dropout > 0
        self.widened = device == "cpu" and self.compute < self.wide and self.model.attention_backend not in OURS  # by torch's fused attention

    @property
    def repeated(self) -> bool:
        """Whether torch's fused attention reads repeated keys and values."""
        masked = self.config.data.reset_attention_mask or self.model.window_size is not None
        fused = self.model.attention_backend not in OURS and not uses_plain_attention(self.model)
        return fused and repeats_heads(self.device, masked, self.model.num_attention_heads, self.model.num_query_groups)

    @property
    def inner(self) -> int:
        """Bytes of fc1's output."""
        return self.tokens * self.compute * self.model.ffn_hidden_size * (2 if self.model.activation in GATED else 1)

    @property
    def activated(self) -> int:
        """Bytes of fc2's input."""
        return self.tokens * self.compute * self.model.ffn_hidden_size

    def layer(self) -> int:
        """Bytes that a layer keeps, its input included."""
        model, compute, wide = self.model, self.compute, self.wide
        layer = self.tokens * inner_bytes_per_token(model, self.seq, compute, wide, widened=self.widened, repeated=self.repeated)
        layer += self.own * outer_bytes_per_token(model, compute, wide)
        return layer + mask_bytes(self)

    def ends(self, index: int) -> int:
        """What the first layer keeps beside: the embedding before positions and dropout, the mask; and the last: the final norm's input."""
        model, total = self.model, 0
        if index == 0 and (self.dropped or model.position_embedding_type == "learned_absolute"):
            total += self.hidden + self.own * dropout_mask_per_token(model)
        if index == model.num_layers - 1:
            total += self.hidden + self.own * norm_statistics(model, self.wide)
        return total

    def dropout(self) -> int:
        """Bytes in which random words are drawn: a kernel has them in registers."""
        if not dropout_mask_per_token(self.model):
            return 0
        return DROPOUT_COUNTER_BYTES * min(self.own * self.model.hidden_size // 4, DROPOUT_COUNTERS[self.device])

    def bias_sums(self) -> int:
        """Bytes in which our activation's backward pass adds up the gradient of fc1's bias."""
        if self.model.activation_backend != "triton" or not self.model.add_bias_linear:
            return 0
        programs = activation_kernel.configuration("backward", self.model.activation, self.model.ffn_hidden_size, True).programs
        return 4 * min(programs, self.tokens) * self.inner // (self.tokens * self.compute)

    def weight_scratch(self, columns: int, rows: int, tokens: int | None = None) -> int:
        """Bytes in which the gradient of a weight of `columns` inputs and `rows` outputs is formed, of all tokens or of so many at a time: none where
        the product is added by the GEMM."""
        if self.compute == self.wide or self.config.optimizer.main_grads_dtype == "bf16":
            return 0
        if self.device == "cuda":
            return min(SCRATCH_BYTES, rows * columns * self.wide)
        tokens = min(tokens or self.tokens, max(1, SCRATCH_BYTES // (self.wide * max(rows, columns))))
        return tokens * self.wide * (rows + columns)


def layer_bytes(shape: Shape, index: int) -> UnitBytes:
    """One transformer layer."""
    model, tokens, hidden = shape.model, shape.tokens, shape.hidden
    f, h = model.ffn_hidden_size, model.hidden_size
    q, k = head_widths(model)
    whole = shape.layer() + shape.ends(index)
    attention = tokens * attention_bytes_per_token(model, shape.seq, shape.compute, shape.wide, widened=shape.widened, repeated=shape.repeated)
    attention += mask_bytes(shape)
    gathered = shape.whole if shape.sequence_parallel else 0
    mlp = shape.inner + shape.activated
    forward = 3 * hidden + shape.dropout()  # the outputs of attention and MLP, and the layer's
    # Of the MLP: the gradients of the activation's output and input, when fc2's input is gone; of attention when the MLP's tensors are gone.
    gradients = (1 if takes_projection(model) else 2) * (q + 2 * k) + (2 * q if shape.repeated else 0)  # of queries, keys and values apart, then of the projection
    attention_backward = tokens * shape.compute * gradients + score_gradients(shape) - mlp - hidden
    backward = max(shape.inner + shape.bias_sums(), gathered + shape.activated, attention_backward)
    columns = shape.inner // (tokens * shape.compute)
    # While the gradient of fc2's weight is formed, and of fc1's, when fc2's input is gone.
    pieces = (gathered + shape.activated, shape.weight_scratch(f, h)), (2 * gathered + hidden - shape.activated, shape.weight_scratch(h, columns))
    forming, scratch = max(pieces, key=sum)
    stashed = 4 * hidden + tokens * stashed_bytes_per_token(model, shape.compute)
    split = backward + shape.activated + (hidden if shape.dropped else 0)  # fc2's input stays, and dropout's gradient beside that of its output
    if shape.recomputed:
        again = whole - hidden
        once = max(hidden + attention, 3 * hidden + mlp) + shape.dropout()  # nothing is kept
        forward, backward, split, forming = once, again + max(forward, backward), again + max(forward, split), again + forming
    return UnitBytes(hidden if shape.recomputed else whole, 0, stashed, forward, backward, split, forming, 2 * gathered, scratch)


def embedding_bytes(shape: Shape) -> UnitBytes:
    """The word embedding: ids alone are kept."""
    parallel = shape.config.distributed.tensor_model_parallel_size > 1
    forward = shape.whole + (shape.hidden if shape.sequence_parallel else 0)
    backward = (shape.whole if parallel else 0) + (shape.whole if shape.sequence_parallel else 0)
    narrow = shape.compute != shape.wide and shape.config.optimizer.main_grads_dtype != "bf16"
    return UnitBytes(0, 0, 0, forward, backward, backward, backward, 0, min(SCRATCH_BYTES, shape.whole // shape.compute * shape.wide) if narrow else 0)


def head_bytes(shape: Shape) -> UnitBytes:
    """Head and loss: the gradient of the logits takes their place, in chunks that are widened. Fused, the logits themselves are made in chunks."""
    fused, h = shape.model.fused_linear_cross_entropy, shape.model.hidden_size
    tokens = min(shape.tokens, max(1, HEAD_CHUNK_BYTES[shape.device] // (shape.vocab * shape.compute))) if fused else shape.tokens
    logits = tokens * shape.vocab * shape.compute
    rows = min(tokens, max(1, LOSS_CHUNK_BYTES[shape.device] // (4 * shape.vocab)))
    chunk = rows * shape.vocab * shape.wide
    widened, capped = shape.compute != shape.wide, shape.model.final_logit_softcapping is not None
    gathered, own = (shape.whole, shape.hidden) if shape.sequence_parallel else (0, 0)
    pieces = 0 if shape.model.cross_entropy_backend == "triton" else 4 if capped else 2 if widened else 1
    loss = pieces * chunk  # in whichever pass takes more
    scratch = shape.weight_scratch(h, shape.vocab, tokens)
    if fused:
        forming = shape.whole + gathered + logits
        backward = max(forming + loss, shape.whole + gathered + own)
        return UnitBytes(shape.hidden, 0, 0, gathered + logits + loss, backward, backward, forming, 0, scratch, head=True)
    backward = shape.whole + gathered + own
    return UnitBytes(shape.hidden, logits, 0, max(gathered, loss), backward, backward, backward, 0, scratch, head=True)


def unit_bytes(shape: Shape, stage: Stage) -> list[UnitBytes]:
    """The units of a stage in the order of the forward pass."""
    layers = [layer_bytes(shape, index) for index in stage.layers]
    return [*([embedding_bytes(shape)] if stage.embedding else []), *layers, *([head_bytes(shape)] if stage.head else [])]


def input_bytes(shape: Shape) -> int:
    """Token ids, labels, loss mask and positions of a micro-batch, the rotary tables, and what our attention reads of documents' bounds."""
    model = shape.model
    rotating = int(model.kv_channels * model.rotary_percent) // 2 * 2 if model.position_embedding_type in ("rope", "yarn") else 0
    tables = 0
    if model.attention_backend in OURS and shape.config.data.reset_attention_mask:
        rows = shape.seq + 4 * (-(-shape.seq // TILE)) * 2
        tables = 4 * shape.config.training.micro_batch_size * rows
    return shape.tokens * (8 + 8 + 4 + 2 * rotating * shape.wide) + shape.own * 8 + tables


def loss_bytes(shape: Shape) -> int:
    """What the loss keeps of a micro-batch: shifted labels and three numbers a token."""
    return shape.tokens * (8 + 3 * shape.wide)


def score_gradients(shape: Shape) -> int:
    """Bytes of the gradients of attention scores, where they are all in memory: of the probabilities and of the scores."""
    if not uses_plain_attention(shape.model):
        return 0
    return 3 * shape.wide * shape.tokens * shape.seq * shape.model.num_attention_heads


def norm_statistics(model: ModelConfig, wide: int) -> int:
    """Bytes per token that a norm keeps beside its input: the reciprocal deviation, and LayerNorm's mean."""
    return wide * (2 if model.normalization == "LayerNorm" else 1)


def outer_bytes_per_token(model: ModelConfig, compute: int, wide: int) -> int:
    """Bytes per token that one layer keeps outside its pairs of matrices: residual stream, norm output and dropout mask, before attention and MLP."""
    h = model.hidden_size
    return 2 * (compute * 2 * h + norm_statistics(model, wide) + dropout_mask_per_token(model))


def dropout_mask_per_token(model: ModelConfig) -> int:
    """Bytes per token of a mask of the hidden states' dropout: the kernel draws it again."""
    return model.hidden_size if model.hidden_dropout > 0 and model.dropout_backend == "torch" else 0


def inner_bytes_per_token(model: ModelConfig, seq: int, compute: int, wide: int, *, widened: bool = False, repeated: bool = False) -> int:
    """Bytes per token that one layer keeps between the matrices of attention and of the MLP; `model` is the local shape."""
    mlp = (3 if model.activation in GATED else 2) * model.ffn_hidden_size  # fc1's output and the activation's
    return compute * mlp + attention_bytes_per_token(model, seq, compute, wide, widened=widened, repeated=repeated)


def stashed_bytes_per_token(model: ModelConfig, compute: int) -> int:
    """Bytes per token that a layer's linear layers keep of their inputs and output gradients between their pairs; four more are [s, b, h]."""
    q, k = head_widths(model)
    return compute * (q + 2 * k + q + (3 if model.activation in GATED else 2) * model.ffn_hidden_size)


def attention_bytes_per_token(model: ModelConfig, seq: int, compute: int, wide: int, *, widened: bool = False, repeated: bool = False) -> int:
    """Bytes per token from the QKV projection's output to the output projection's input; `widened`: the fused attention computes in fp32;
    `repeated`: it reads keys and values that were repeated for each query head."""
    q, k = head_widths(model)
    heads, groups = model.num_attention_heads, model.num_query_groups
    norms, rotates = model.qk_layernorm, model.position_embedding_type in ("rope", "yarn") and model.rotary_backend == "torch"  # the kernel in place
    statistics = (heads + groups) * norm_statistics(model, wide) if norms else 0
    # A copy of the queries, which stand between their groups' keys and values: our kernels read them there where nothing else does.
    gathered = q if 1 < groups < heads and not takes_projection(model) else 0
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
    if repeated:
        width = 4 * q  # queries, repeated keys and values, the output; the inputs of the norms, or the projection where the queries are read in it
        width += q + 2 * k + gathered if norms else 2 * k if groups == 1 and not rotates else 0
        return compute * width + wide * heads + statistics
    if widened:
        width = q + (q + 2 * k + gathered if norms else 0)  # the output; inputs of the norms
        return compute * width + wide * (2 * q + 2 * k + heads) + statistics  # the kernel's own inputs and output
    width = q + 2 * k + q  # the fused projection, kept through its values; the output
    width += gathered if norms or not rotates else 0
    width += q + k if norms or rotates else 0
    return compute * width + wide * heads + statistics  # with log-sum-exp


def takes_projection(model: ModelConfig) -> bool:
    """Whether attention reads the fused projection itself, and writes its gradient."""
    turned = model.rotary_backend == "triton" or model.position_embedding_type not in ("rope", "yarn")
    return model.attention_backend in OURS and turned and not model.qk_layernorm


def uses_plain_attention(model: ModelConfig) -> bool:
    """Whether training computes attention with all scores in memory."""
    needed = model.attention_dropout > 0 or model.attn_logit_softcapping is not None or model.attention_backend == "plain"
    return needed and model.attention_backend not in OURS


def mask_bytes(shape: Shape) -> int:
    """Bytes of one layer's attention mask: none when the fused attention is causal and no more, one per sample with document masking. Our kernels
    have none."""
    plain, documents = uses_plain_attention(shape.model), shape.config.data.reset_attention_mask
    if shape.model.attention_backend in OURS or not (plain or documents or shape.model.window_size is not None):
        return 0
    element = 1 if plain else shape.compute  # torch's fused attention turns a boolean mask into numbers that are added to the scores
    return element * shape.seq**2 * (shape.config.training.micro_batch_size if documents else 1)
