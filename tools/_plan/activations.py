"""What one micro-batch keeps of each unit of a model, and what a unit needs besides while it runs.

Counts what this code keeps with the kernels that it takes, not what a perfect implementation would:
tests compare it with the tensors that autograd saves and with the bytes that live while a step
runs. What attention, MLP, norm, dropout and loss keep is stated by the layer, beside its forward
pass; here it is put together as model/block.py puts the layers together. Per token: h hidden, f ffn
width, q and k widths of queries and keys, V vocabulary, all of this rank.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from megatron.kernels.attention_masks import table_bytes
from megatron.tools._plan.state import element_sizes

from megatron.config.derive import attention_ranks, expert_ranks
from megatron.config.fp8 import layer_in_fp8, wide_linears
from megatron.config.groups import Config
from megatron.model.arithmetic import local_shape
from megatron.model.attention.attention_bytes import AttentionBytes
from megatron.model.attention.latent_bytes import LatentBytes
from megatron.model.block import like_layer
from megatron.model.dropout import drawing_bytes, saved_mask
from megatron.model.embedding import embedding_grad_scratch
from megatron.model.experts.moe import ExpertBytes
from megatron.model.fp8 import Scratch, scratch
from megatron.model.kernels import choose_kernels
from megatron.model.linear import weight_grad_scratch
from megatron.model.linear_cross_entropy import chunk_tokens
from megatron.model.loss import widened_bytes
from megatron.model.mlp import always_rebuilt, bias_sum_bytes, saved_widths
from megatron.model.norm import saved_statistics, temporary_bytes
from megatron.model.offload import kept_inputs, stage_offload
from megatron.model.recompute import LayerRecompute, stage_recompute
from megatron.model.stages import Stage


@dataclass(frozen=True)
class LeavingBytes:
    """What one forward pass of a layer sends to the host: bytes of its storages, and whether the
    layer's input is one of them, or something that nobody reads.
    """

    storages: tuple[int, ...]
    input_leaves: bool
    input_is_unread: bool

    @property
    def total(self) -> int:
        return sum(self.storages)


@dataclass(frozen=True)
class UnitBytes:
    """What one micro-batch keeps of a unit, and what running it takes beside that."""

    saved: int  # from the forward pass to the backward pass, its input included, logits not
    logits: int
    deferred: int  # from the input gradient to the weight gradient, where they are apart
    # at the forward pass's worst moment, beside `saved`, `logits` and what other units keep
    forward: int
    # at the backward pass's worst moment, beside the same and the gradient of its output
    backward: int
    split: int  # at that of a backward pass that leaves the weight gradients for later
    forming: int  # the same at the moment when weight gradients are formed
    weight: int  # during a weight gradient's pass alone, beside `deferred`
    scratch: int  # in which weight gradients are formed
    head: bool = False
    # of a layer that is recomputed whole: the same when its graph is there again
    rebuilt: UnitBytes | None = None
    keeps_input: bool = True  # itself, or else a share of it or nothing
    leaving: LeavingBytes | None = None  # where tensors go to the host
    # of a layer with experts on other ranks: what it holds more than `saved` while tokens go there
    # or their gradients come back, and while outputs come back
    dispatched: int = 0
    combined: int = 0


@dataclass(frozen=True)
class DroppedBytes:
    """What selective recomputation makes again instead of keeping it."""

    norm: int  # the output of a norm, of which there are two
    attention: int  # from the QKV projection's output to the output projection's input
    inner: int  # fc1's output
    activated: int  # fc2's input

    @property
    def mlp(self) -> int:
        return self.inner + self.activated

    @property
    def total(self) -> int:
        return 2 * self.norm + self.attention + self.mlp


class Shape:
    """The sizes that the formulas below share, of one rank and one micro-batch."""

    def __init__(self, config: Config, padded_vocab: int, device: str = "cuda"):
        tp = config.distributed.tensor_model_parallel_size
        chosen, _ = choose_kernels(config, torch.device(device))
        self.config, self.padded_vocab = config, padded_vocab
        self.model = local_shape(chosen.model, tp)
        self.device = device
        self.compute, self.wide = element_sizes(config.precision)
        self.samples = config.training.micro_batch_size
        cp = config.distributed.context_parallel_size
        self.seq = config.data.seq_length // cp  # that this rank holds
        self.tokens = self.samples * self.seq
        # outside the pairs of matrices
        self.sequence_parallel = config.distributed.sequence_parallel
        self.own = self.tokens // tp if self.sequence_parallel else self.tokens
        self.hidden = self.own * self.model.hidden_size * self.compute
        self.whole = self.tokens * self.model.hidden_size * self.compute
        self.vocab = padded_vocab // tp
        self.shares_inputs = config.training.distribute_saved_activations
        self.narrow_grads = config.optimizer.main_grads_dtype == "bf16"
        self.attention = self._attention()
        self.inner, self.activated = self._mlp()

    def _attention(self) -> AttentionBytes:
        """What attention keeps and takes."""
        distributed, sizes = self.config.distributed, (self.compute, self.wide, self.device)
        given = (
            *(self.model, self.seq, self.samples, *sizes, self.config.data.reset_attention_mask),
            *(distributed.context_parallel_size, *attention_ranks(distributed)),
        )
        if not self.model.multi_latent_attention:
            return AttentionBytes(*given)
        return LatentBytes(*given, sharing=self.tokens // self.own)

    def _mlp(self) -> tuple[int, int]:
        """Bytes of fc1's output, and of fc2's input."""
        inner, activated = saved_widths(self.model)
        return self.tokens * self.compute * inner, self.tokens * self.compute * activated

    @cached_property
    def with_experts(self) -> ExpertShape:
        """The sizes of layers with experts."""
        return ExpertShape(self.config, self.padded_vocab, self.device)

    @property
    def pieces(self) -> int:
        """Of the sequence, that the MLP is computed in."""
        return self.model.tiled_mlp

    @property
    def statistics(self) -> int:
        """Bytes of a norm of the hidden states."""
        return self.own * saved_statistics(self.model.normalization, self.wide)

    @property
    def mask(self) -> int:
        """Bytes of the mask of a dropout of the hidden states."""
        model = self.model
        kept = saved_mask(model.hidden_dropout, model.dropout_backend, model.hidden_size)
        return self.own * kept

    @property
    def norm_temporaries(self) -> tuple[int, int]:
        """Bytes in which a norm of the hidden states is computed, and differentiated."""
        model = self.model
        kind, backend = model.normalization, model.norm_backend
        elements = self.own * model.hidden_size
        forward, backward = temporary_bytes(kind, backend, self.compute, self.wide)
        return elements * forward, elements * backward

    def layer(self) -> int:
        """Bytes that a layer keeps, its input included, without recomputation: before attention and
        MLP the residual stream, norm output and dropout mask.
        """
        return (
            2 * (2 * self.hidden + self.statistics + self.mask)
            + self.attention.saved()
            + self.inner
            + self.activated
        )

    def dropped(self, modules: frozenset[str]) -> DroppedBytes:
        """Bytes of these that a layer does not keep where it makes these modules again."""
        modules = modules | always_rebuilt(self.model)
        whole = "mlp" in modules
        return DroppedBytes(
            self.hidden if "layernorm" in modules else 0,
            self.attention.saved() - self.attention.saved(modules),
            self.inner if whole else 0,
            self.activated if whole or "mlp_act" in modules else 0,
        )

    def ends(self, index: int) -> int:
        """What the first layer keeps beside: the embedding before positions and dropout, the mask;
        and the last: the final norm's input.
        """
        model = self.model
        total = 0
        if index == 0 and (
            model.hidden_dropout > 0 or model.position_embedding_type == "learned_absolute"
        ):
            total += self.hidden + self.mask
        return total + _final_norm(self, index)

    def dropout(self) -> int:
        """Bytes in which random words are drawn."""
        return drawing_bytes(self.own * self.model.hidden_size, self.device) if self.mask else 0

    def weight_scratch(
        self, inputs: int, outputs: int, tokens: int | None = None, rows_vary: bool = False
    ) -> int:
        """Temporary bytes of the gradient of a weight [outputs, inputs], over all tokens or over
        `tokens` at a time.
        """
        grad = self.compute if self.narrow_grads else self.wide
        rounded = self.config.precision.bf16 and not rows_vary
        return weight_grad_scratch(
            tokens or self.tokens, inputs, outputs, self.compute, grad, self.device, rounded
        )

    def mlp_scratch(self) -> tuple[int, int]:
        """The same of the MLP: of fc2's and of fc1's weight."""
        return self._mlp_scratch(self.model.ffn_hidden_size, self.tokens // self.pieces)

    def _mlp_scratch(self, width: int, tokens: int, rows_vary: bool = False) -> tuple[int, int]:
        """Of an MLP of this width, over `tokens` at a time."""
        columns, _ = saved_widths(replace(self.model, ffn_hidden_size=width))
        h = self.model.hidden_size
        return (
            self.weight_scratch(width, h, tokens, rows_vary),
            self.weight_scratch(h, columns, tokens, rows_vary),
        )

    def mlp_inputs(self) -> dict[str, list[tuple[int, int]]]:
        """(elements, bytes) of the storages that the MLP's modules keep and let go to the host."""
        compute = self.compute
        return {
            "mlp_fc1": [(self.hidden // compute, self.hidden)],
            "mlp_act": [(self.inner // compute, self.inner)],
            "mlp_fc2": [(self.activated // compute, self.activated)],
        }


class ExpertShape(Shape):
    """The same of a layer with experts that have as many tokens each. Not exact: temporaries of the
    exchange are those of its worst moment, whatever else is alive then.
    """

    def __init__(self, config: Config, padded_vocab: int, device: str = "cuda"):
        super().__init__(config, padded_vocab, device)
        ranks = expert_ranks(config)
        self.model = local_shape(self.model, 1, ranks.etp)
        sizes = self.own, self.tokens, self.compute, self.wide
        self.experts = ExpertBytes.of(self.model, *sizes, *ranks)
        self.inner = self.experts.inner + self.experts.shared_inner
        self.activated = self.experts.activated + self.experts.shared_activated

    def layer(self) -> int:
        return super().layer() + self.experts.rows + self.experts.beside

    def mlp_scratch(self) -> tuple[int, int]:
        """Of one expert after another, or of the shared expert."""
        model = self.model
        assert model.num_experts is not None and model.moe_ffn_hidden_size is not None
        rows = self.experts.rows // (model.hidden_size * self.compute)
        held = model.num_experts // expert_ranks(self.config).ep
        fc2, fc1 = self._mlp_scratch(model.moe_ffn_hidden_size, max(1, rows // held), True)
        if model.moe_shared_expert_intermediate_size:
            shared = self._mlp_scratch(model.moe_shared_expert_intermediate_size, self.tokens)
            return max(fc2, shared[0]), max(fc1, shared[1])
        return fc2, fc1

    def mlp_inputs(self) -> dict[str, list[tuple[int, int]]]:
        """Of experts the shared one alone lets anything go."""
        own, compute = self.experts, self.compute
        return {
            "mlp_fc1": [],
            "mlp_act": [(own.shared_inner // compute, own.shared_inner)],
            "mlp_fc2": [(own.shared_activated // compute, own.shared_activated)],
        }

    def dropped(self, modules: frozenset[str]) -> DroppedBytes:
        own, whole = self.experts, "mlp" in modules
        shared_activated = own.shared_activated if whole or "mlp_act" in modules else 0
        activated = own.activated if modules & {"moe", "moe_act"} else 0
        return DroppedBytes(
            self.hidden if "layernorm" in modules else 0,
            self.attention.saved() - self.attention.saved(modules),
            (own.rows + own.inner if "moe" in modules else 0) + (own.shared_inner if whole else 0),
            activated + shared_activated,
        )


def layer_bytes(shape: Shape, index: int, choice: LayerRecompute) -> UnitBytes:
    """One transformer layer."""
    if not shape.config.model.expert_layers()[index]:
        return _layer_bytes(shape, index, choice)
    of_experts = shape.with_experts
    beside = of_experts.experts, of_experts.dropped(choice.modules)
    found = _with_exchange(_layer_bytes(of_experts, index, choice), *beside)
    if found.rebuilt is not None:
        found = replace(found, rebuilt=_with_exchange(found.rebuilt, *beside))
    return found


def _with_exchange(layer: UnitBytes, experts: ExpertBytes, dropped: DroppedBytes) -> UnitBytes:
    """What rows on their way to experts and back take, and what a split backward pass leaves of
    them.
    """
    in_experts = experts.rows + experts.inner + experts.activated
    in_experts += experts.shared_inner + experts.shared_activated - dropped.mlp
    back = max(experts.exchange, experts.differentiating)
    return replace(
        layer,
        deferred=layer.deferred + 2 * experts.rows,
        forward=layer.forward + experts.exchange,
        backward=layer.backward + back,
        split=layer.split + back,
        forming=layer.forming + experts.exchange,
        dispatched=2 * experts.rows - in_experts,
        combined=experts.exchange,
    )


def _layer_bytes(shape: Shape, index: int, choice: LayerRecompute) -> UnitBytes:
    products = _fp8_scratch(shape, index)
    modules = choice.modules | always_rebuilt(shape.model)
    own = _with_fp8(_kept_layer(shape, index, modules), products)
    if not choice.whole:
        return own
    hidden, attention = shape.hidden, shape.attention
    mlp = shape.inner + shape.activated
    tp = shape.config.distributed.tensor_model_parallel_size
    saved = hidden // tp if shape.shares_inputs else hidden
    # nothing is kept: the MLP has its input and the residual stream beside it, and in pieces its
    # output
    pieces = shape.pieces
    in_mlp = max(mlp, hidden) if pieces == 1 else hidden + (mlp + hidden) // pieces
    in_attention = max(hidden + attention.unkept(), 2 * hidden + _sharing_forward(shape))
    forward = max(in_attention, 2 * hidden + in_mlp) + shape.dropout()
    return replace(
        own,
        saved=saved if choice.first else 0,
        forward=forward + products.forward,
        rebuilt=own,
        keeps_input=choice.first and not shape.shares_inputs,
    )


def _fp8_scratch(shape: Shape, index: int) -> Scratch:
    """The most that any linear layer takes to form its products of 8-bit floats."""
    config = shape.config
    if not layer_in_fp8(config.precision, index, config.model.num_layers):
        return Scratch(0, 0, 0)
    grad = shape.compute if shape.narrow_grads else shape.wide
    found = []
    for linear in wide_linears(config.model, config.precision):
        outputs, inputs = linear.on_rank(config.distributed.tensor_model_parallel_size)
        tokens = shape.tokens // (shape.pieces if linear.name.startswith("mlp.") else 1)
        found.append(scratch(tokens, outputs, inputs, config.precision, shape.device, grad))
    return Scratch(*map(max, zip(*found, strict=True)))


def _with_fp8(layer: UnitBytes, products: Scratch) -> UnitBytes:
    """Products of 8-bit floats take their factors beside what a layer takes anyway."""
    return replace(
        layer,
        forward=layer.forward + products.forward,
        backward=layer.backward + products.input_grad,
        split=layer.split + products.input_grad,
        scratch=max(layer.scratch, products.weight_grad),
    )


def _kept_layer(shape: Shape, index: int, modules: frozenset[str]) -> UnitBytes:
    """A layer whose graph is kept from its forward to its backward pass, but for these modules."""
    attention, hidden = shape.attention, shape.hidden
    dropped = shape.dropped(modules)
    whole = shape.layer() + shape.ends(index)
    gathered = shape.whole if shape.sequence_parallel else 0
    mlp = shape.inner + shape.activated
    in_mlp = dropped.mlp // shape.pieces + (dropped.norm if "mlp" in modules else 0)
    backward, split = _backward(shape, index, dropped, modules, in_mlp)
    forming, scratch = _forming(shape, index, gathered, dropped, in_mlp)
    # inputs and output gradients of the linear layers
    deferred = 4 * hidden + attention.deferred() + mlp
    return UnitBytes(
        whole - dropped.total,
        0,
        deferred,
        _forward(shape, index, dropped),
        backward,
        split,
        forming,
        2 * gathered,
        scratch,
    )


def _backward(
    shape: Shape, index: int, dropped: DroppedBytes, modules: frozenset[str], in_mlp: int
) -> tuple[int, int]:
    """Bytes at the worst moment of a backward pass, and of one that leaves weight gradients for
    later; `in_mlp`: of what has been made again for the MLP, of one of its pieces.

    What is made again is there when it is read: of the MLP first, of attention when the MLP's is
    gone. A norm's output is read again for a product that is made again, else when its weight
    gradient is formed.
    """
    model, attention, hidden, pieces = shape.model, shape.attention, shape.hidden, shape.pieces
    gathered = shape.whole if shape.sequence_parallel else 0
    mlp = shape.inner + shape.activated
    in_attention = dropped.total - (0 if "qkv" in modules else dropped.norm)
    # Of the MLP: the gradients of the activation's output and input, when fc2's input is gone; of
    # attention when the MLP's tensors are gone.
    inner = shape.inner // pieces + bias_sum_bytes(model, shape.tokens // pieces)
    in_piece = max(inner, (gathered + shape.activated) // pieces) + in_mlp
    outside = _outside_mlp(shape, index, dropped, "qkv" in modules) - (mlp - dropped.mlp)
    if pieces == 1:
        again = in_attention + attention.behind_core() - mlp - hidden
        backward = max(in_piece, again, outside)
        # fc2's input stays, and dropout's gradient beside that of its output; behind the MLP all
        # that its products read, and the output projection's
        left = hidden + mlp + attention.copied_output
        split = max(backward + shape.activated, outside + left)
    else:
        backward = max(hidden + in_piece, outside)  # beside the gradient of the MLP's input
        # what pieces leave stays, in the last one also fc2's input
        left = (mlp * (pieces - 1) + shape.activated) // pieces
        split = max(outside + hidden + mlp, hidden + in_piece + left)
    return backward, split + (hidden if model.hidden_dropout > 0 else 0)


def _outside_mlp(shape: Shape, index: int, dropped: DroppedBytes, again: bool) -> int:
    """Bytes at a backward pass's worst moment when the MLP's tensors are gone: in the norm, in the
    attention core and behind it. `again`: the projection of queries, keys and values is made again.
    """
    gone = _behind_mlp(shape, index, dropped)
    saved = shape.attention.saved() - dropped.attention
    return max(
        shape.hidden + shape.norm_temporaries[1],
        _in_core(shape) + dropped.attention + (dropped.norm if again else 0) - gone,
        max(shape.attention.gradients(), _sharing(shape)) - gone - saved,
    )


def _in_core(shape: Shape) -> int:
    """Bytes of the gradients of the attention core's output and inputs."""
    attention = shape.attention
    if attention.blocks:
        return attention.blocks_backward()
    if attention.is_plain:
        return attention.gradients() - attention.copied_output
    (q, k), cp = attention.widths, attention.cp
    if attention.is_repeated:
        k = q
    elif cp > 1:
        k = k * cp if attention.gathers else attention.repeated
    element = shape.wide if attention.is_widened else shape.compute
    sums = 0
    if attention.is_ours:  # two numbers of each query, and where the order is free a sum
        sums = 2 * shape.wide * shape.model.num_attention_heads
        sums += 0 if shape.model.deterministic_mode else shape.wide * q
    return shape.tokens * (element * (2 * q + 2 * k) + sums) - attention.copied_output


def _forward(shape: Shape, index: int, dropped: DroppedBytes) -> int:
    """Of a layer whose graph is kept: the outputs of attention and MLP, and the layer's. What is
    not kept lives until it has been read.
    """
    hidden = shape.hidden
    kept_of_mlp = shape.inner + shape.activated - dropped.mlp
    pieces = shape.pieces
    last = index == shape.model.num_layers - 1
    in_norm = shape.norm_temporaries[0] + (0 if last else dropped.norm - hidden)
    shared = _sharing_forward(shape)
    in_mlp = (
        max(2 * hidden + dropped.norm + dropped.activated, dropped.norm + dropped.mlp)
        if pieces == 1
        else hidden + max(hidden, dropped.norm + (hidden + dropped.mlp) // pieces, in_norm)
    )
    return shape.dropout() + max(
        in_mlp,
        hidden + dropped.norm + dropped.attention - kept_of_mlp,
        shape.attention.making() + dropped.attention - kept_of_mlp - hidden,
        2 * hidden + shared + dropped.total - shape.layer() - _final_norm(shape, index)
        if shared
        else 0,
    )


def _forming(
    shape: Shape, index: int, gathered: int, dropped: DroppedBytes, in_mlp: int
) -> tuple[int, int]:
    """Bytes while weight gradients are formed, and those in which they are; `gathered`: of hidden
    states of the whole sequence under sequence parallelism; `in_mlp`: of what has been made again.
    """
    pieces, hidden = shape.pieces, shape.hidden
    # of fc2's weight; and of fc1's, when fc2's input is gone
    again = dropped.mlp // pieces + dropped.norm
    fc2 = (gathered + shape.activated) // pieces + in_mlp
    fc1 = (2 * gathered + hidden - shape.activated) // pieces + again
    # beside the gradient of the MLP's input; else attention's may be the worst
    beside = hidden if pieces > 1 else 0
    found = [
        (most + beside, scratch)
        for most, scratch in zip((fc2, fc1), shape.mlp_scratch(), strict=True)
    ]
    found += _forming_of_attention(shape, index, dropped)
    return max(found, key=sum)


def _behind_mlp(shape: Shape, index: int, dropped: DroppedBytes) -> int:
    """Bytes that a layer has kept and that are gone when attention is differentiated, without the
    gradient of the residual stream that is there instead.
    """
    beside = shape.statistics + shape.mask + _final_norm(shape, index)
    return shape.hidden - dropped.norm + beside


def _final_norm(shape: Shape, index: int) -> int:
    """Bytes that the final norm keeps, if layer `index` has it."""
    last = index == shape.model.num_layers - 1
    return shape.hidden + shape.statistics if last else 0


def _received(shape: Shape) -> int:
    """What Gloo receives for a reduce-scatter of hidden states, beside its result."""
    tp = shape.config.distributed.tensor_model_parallel_size
    return (tp - 1) * shape.hidden if shape.sequence_parallel and shape.device != "cuda" else 0


def _forming_of_attention(shape: Shape, index: int, dropped: DroppedBytes) -> list[tuple[int, int]]:
    """`_forming` of attention's weights, when the MLP's tensors are gone."""
    attention, h = shape.attention, shape.model.hidden_size
    gathered = shape.whole if shape.sequence_parallel else 0
    gone = _behind_mlp(shape, index, dropped) + shape.inner + shape.activated - dropped.mlp
    saved = attention.saved() - dropped.attention
    outputs = shape.tokens * shape.compute * attention.outputs
    proj = gathered + outputs - gone + dropped.attention
    beside = 2 * gathered + shape.hidden + _received(shape) + dropped.norm - gone - saved
    return [
        (proj, shape.weight_scratch(attention.outputs, h)),
        *((beside + most, shape.weight_scratch(*sizes)) for most, sizes in attention.forming()),
    ]


def _sharing_forward(shape: Shape) -> int:
    """Bytes while context-parallel ranks exchange what attention reads, with what it is made of."""
    q, k = shape.attention.widths
    cp = shape.attention.cp
    if cp == 1:
        return 0
    element = shape.tokens * shape.compute
    # put together, sent, received in their order; keys and values are all gathered
    sent = 2 * k * (1 + 2 * cp)
    if not shape.attention.gathers:
        repeated = shape.attention.repeated  # heads that fewer key heads are made
        sent = 3 * (q + 2 * repeated) + (2 * repeated if repeated > k else 0)
    before = shape.attention.saved(frozenset({"core_attn"}))
    in_blocks = before + shape.attention.blocks_forward() if shape.attention.blocks else 0
    return max(before + element * sent if shape.attention.blocks < cp else 0, in_blocks)


def _sharing(shape: Shape) -> int:
    """Bytes while context-parallel ranks exchange gradients of what attention has read: as autograd
    gives them, in the order of the ranks, and what arrives.
    """
    q, k = shape.attention.widths
    cp = shape.attention.cp
    if cp == 1:
        return 0
    element = shape.tokens * shape.compute
    if shape.attention.blocks == cp:
        return 0
    if not shape.attention.gathers:
        return 3 * element * (q + 2 * shape.attention.repeated)
    # Gloo copies what it sends, and receives parts
    gloo = 1 if shape.device != "cuda" else 0
    return element * (q + (2 + gloo) * 2 * k * cp + 2 * k + gloo * (cp - 1) * 2 * k)


def leaving_bytes(
    shape: Shape, index: int, choice: LayerRecompute, modules: frozenset[str]
) -> LeavingBytes | None:
    """What of a layer goes to the host where these modules' inputs do, and is large enough."""
    smallest = max(1, shape.config.training.min_offloaded_tensor_size)
    model = shape.model
    if not modules:
        return None
    if choice.whole:
        tp = shape.config.distributed.tensor_model_parallel_size
        size = shape.hidden // tp if shape.shares_inputs else shape.hidden
        goes = size // shape.compute >= smallest
        return LeavingBytes((size,) if goes else (), goes and not shape.shares_inputs, False)
    of_layer = shape.with_experts if shape.config.model.expert_layers()[index] else shape
    kept = _inputs_of_modules(of_layer, choice.modules | always_rebuilt(model))
    going = {
        module: [size for elements, size in kept[module] if size and elements >= smallest]
        for module in kept
        if module in modules & kept_inputs(choice, model)
    }
    # positions or dropout come first
    is_changed = model.hidden_dropout > 0 or model.position_embedding_type == "learned_absolute"
    unread = index == 0 and is_changed
    return LeavingBytes(
        tuple(size for sizes in going.values() for size in sizes),
        not unread and shape.hidden in going.get("attn_norm", ()),
        unread,
    )


def _inputs_of_modules(
    shape: Shape, recomputed: frozenset[str]
) -> dict[str, list[tuple[int, int]]]:
    """(elements, bytes) of the storages that each module of a layer keeps."""
    model, compute = shape.model, shape.compute
    attention, output = shape.attention.leaving(recomputed)
    hidden = shape.hidden // compute, shape.hidden
    together = model.norm_backend == "triton" or model.normalization != "LayerNorm"
    numbers = shape.statistics // shape.wide // (1 if together else 2)
    norm = [hidden, *([(numbers, numbers * shape.wide)] * (1 if together else 2))]
    return {
        "attn_norm": norm,
        "qkv_linear": [hidden, *shape.attention.inputs(recomputed)],
        "core_attn": attention,
        "attn_proj": [(output // compute, output)],
        "mlp_norm": norm,
        **shape.mlp_inputs(),
    }


def embedding_bytes(shape: Shape) -> UnitBytes:
    """The word embedding: ids alone are kept."""
    parallel = shape.config.distributed.tensor_model_parallel_size > 1
    forward = shape.whole + (shape.hidden if shape.sequence_parallel else 0)
    backward = (shape.whole if parallel else 0) + (shape.whole if shape.sequence_parallel else 0)
    narrow = shape.compute != shape.wide and not shape.narrow_grads
    scratch = (
        embedding_grad_scratch(shape.tokens, shape.model.hidden_size, shape.wide, shape.device)
        if narrow
        else 0
    )
    return UnitBytes(0, 0, 0, forward, backward, backward, backward, 0, scratch)


def head_bytes(shape: Shape) -> UnitBytes:
    """Head and loss: the gradient of the logits takes their place, in chunks that are widened.
    Fused, the logits themselves are made in chunks.
    """
    fused = shape.model.fused_linear_cross_entropy
    h = shape.model.hidden_size
    tokens = (
        min(shape.tokens, chunk_tokens(shape.vocab, shape.compute, shape.device))
        if fused
        else shape.tokens
    )
    logits = tokens * shape.vocab * shape.compute
    gathered, own = (shape.whole, shape.hidden) if shape.sequence_parallel else (0, 0)
    sizes = tokens, shape.vocab, shape.compute, shape.wide
    widened = widened_bytes(shape.model, *sizes, shape.device)
    scratch = shape.weight_scratch(h, shape.vocab, tokens)
    kept = 0 if fused else logits
    forward = gathered + logits + widened if fused else max(gathered, widened)
    forming = shape.whole + gathered + own
    backward = max(widened, forming + _received(shape))
    if fused:
        forming = shape.whole + gathered + logits
        backward = max(forming + widened, backward)
    return UnitBytes(
        shape.hidden, kept, 0, forward, backward, backward, forming, 0, scratch, head=True
    )


def unit_bytes(shape: Shape, stage: Stage) -> list[UnitBytes]:
    """The units of a stage in the order of the forward pass."""
    config = shape.config
    choices = stage_recompute(config.training, stage.layers)
    going = stage_offload(config.training, shape.model, stage.layers)
    kinds: dict[tuple[Hashable, ...], UnitBytes] = {}

    def layer(index: int, choice: LayerRecompute, modules: frozenset[str]) -> UnitBytes:
        in_fp8 = layer_in_fp8(config.precision, index, config.model.num_layers)
        kind = (like_layer(config.model, index), in_fp8, choice, modules)
        if kind not in kinds:
            leaving = leaving_bytes(shape, index, choice, modules)
            kinds[kind] = replace(layer_bytes(shape, index, choice), leaving=leaving)
        return kinds[kind]

    return [
        *([embedding_bytes(shape)] if stage.embedding else []),
        *map(layer, stage.layers, choices, going),
        *([head_bytes(shape)] if stage.head else []),
    ]


def input_bytes(shape: Shape) -> int:
    """Token ids, labels, loss mask and positions of a micro-batch, the rotary tables, and what our
    attention reads of documents' bounds.
    """
    model = shape.model
    rotating = model.rotary_width if model.position_embedding_type in ("rope", "yarn") else 0
    attention = shape.attention
    table = table_bytes(shape.seq, shape.samples if attention.documents else 1)
    if attention.blocks:  # one for each block of keys
        simple = not attention.documents and model.window_size is None
        tables = 0 if simple and model.attention_dropout == 0 else attention.blocks * table
    else:
        tables = table if attention.is_ours and attention.documents else 0
    return shape.tokens * (8 + 8 + 4 + 2 * rotating * shape.wide) + shape.own * 8 + tables


def loss_bytes(shape: Shape) -> int:
    """What the loss keeps of a micro-batch: shifted labels and three numbers a token."""
    return shape.tokens * (8 + 3 * shape.wide)
