"""What the passes of a layer compute, move and send on one rank, as operations with sizes.

They follow from the flags alone; plan/step.py prices them for a device. Symbols: T tokens of a
micro-batch on a rank, h hidden, q and k widths of the query heads and of the key heads, f ffn
width, s sequence, V padded vocabulary. q, k, f and V are a tensor-parallel rank's part.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property

from megatron.tools._plan import latent_operations
from megatron.tools._plan.expert_operations import ExpertOperations
from megatron.tools._plan.latent_operations import LatentOperations
from megatron.tools._plan.program import OURS, Program
from megatron.tools._plan.state import precisions
from megatron.tools._plan.work import Core, Exchange, Product, UnitWork, Work

from megatron.config.derive import GATED, attention_ranks
from megatron.config.fp8 import layer_in_fp8
from megatron.config.groups import Config
from megatron.model.arithmetic import head_widths, local_shape, padded_vocab_size
from megatron.model.mlp import always_rebuilt
from megatron.model.recompute import LayerRecompute

# Kernels that a layer launches in a pass of a micro-batch. Ours are counted in
# docs/results/launches.json; attention that is not fused and dropout launch more.
FORWARD_LAUNCHES = 12
BACKWARD_LAUNCHES = 23
CALL_LAUNCHES = 5  # a collective takes the host as long as that many kernels
# Bytes that torch's operators read and write for a bf16 logit: widened, its log-probability, the
# largest one for the accuracy; zeros for the gradient, the gradient before and after the softmax,
# narrowed.
WHOLE_FORWARD = (2 + 4) + (4 + 4) + 4
WHOLE_BACKWARD = 4 + (4 + 4 + 4) + (4 + 2)


class Operations:
    """The passes of the units of a run of `program`. `vocab_size`: entries of the tokenizer."""

    def __init__(self, config: Config, vocab_size: int, program: Program = OURS):
        distributed = config.distributed
        self.config, self.program = config, program
        self.tp = distributed.tensor_model_parallel_size
        self.cp = distributed.context_parallel_size
        self.micro_batch = config.training.micro_batch_size
        self.seq = config.data.seq_length
        self.tokens = self.micro_batch * self.seq / self.cp
        self.model = local_shape(config.model, self.tp)
        self.hidden = config.model.hidden_size
        self.q, self.k = head_widths(self.model)
        self.ffn = self.model.ffn_hidden_size
        self.inner = self.ffn * (2 if config.model.activation in GATED else 1)
        self.vocab = padded_vocab_size(vocab_size, config.model, self.tp) // self.tp
        self.size = precisions(config)
        # norms and residuals are shared by the tensor-parallel ranks under sequence parallelism
        self.share = self.tokens / (self.tp if distributed.sequence_parallel else 1)
        self.fused = config.model.attention_backend != "plain"
        self.of_experts = (
            None
            if config.model.num_experts is None
            else ExpertOperations(config, self.tokens, self.share)
        )
        self.of_latent = (
            LatentOperations(config, self.tokens, self.share)
            if config.model.multi_latent_attention
            else None
        )

    @cached_property
    def hidden_bytes(self) -> float:
        """Of the hidden states of a micro-batch on a context-parallel rank."""
        return self.tokens * self.hidden * self.size.compute

    def is_fp8(self, index: int) -> bool:
        """Whether a layer computes with 8-bit floats."""
        return layer_in_fp8(self.config.precision, index, self.config.model.num_layers)

    def has_experts(self, index: int) -> bool:
        """Whether a layer has experts in the place of its MLP."""
        return self.config.model.expert_layers()[index]

    def linears(self, fp8: bool) -> dict[str, Product]:
        """The forward products of a layer with an MLP."""
        tokens, hidden = self.tokens, self.hidden

        def linear(n: float, k: float, whole_n: float, whole_k: float) -> Product:
            wide = min(whole_n, whole_k) >= self.config.precision.fp8_min_width
            return Product(tokens, n, k, fp8=fp8 and wide)

        q, k, out = self.q, self.k, self.model.num_attention_heads * self.model.value_channels
        front = (
            {"qkv": linear(q + 2 * k, hidden, (q + 2 * k) * self.tp, hidden)}
            if self.of_latent is None
            else self.of_latent.linears()
        )
        return {
            **front,
            "proj": linear(hidden, out, hidden, out * self.tp),
            "fc1": linear(self.inner, hidden, self.inner * self.tp, hidden),
            "fc2": linear(hidden, self.ffn, hidden, self.ffn * self.tp),
        }

    def visible(self) -> float:
        """Keys that a query sees, in the mean."""
        window = self.config.model.window_size
        return self.seq / 2 if window is None else min(self.seq / 2, float(window))

    def _core(self, backward: bool) -> Work:
        """The attention core: a backward pass of fused attention computes five products where a
        forward pass computes two. Without fusing the whole square of scores is computed, written
        and read.
        """
        heads, head_dim = self.model.num_attention_heads, self.model.kv_channels
        if self.fused:
            flops = 4.0 * self.q * self.visible() * self.tokens * (2.5 if backward else 1)
            length = self.seq
            return Work(cores=(Core(flops, length, heads, head_dim, backward),))
        each = heads * self.micro_batch
        pairs = self.tokens * self.seq
        keys, values = (
            Product(self.tokens / self.micro_batch, self.seq, width, each)
            for width in (head_dim, self._value_channels())
        )
        dropout = 5 if self.config.model.attention_dropout else 0
        touched = heads * pairs * ((16 if backward else 10) + dropout)
        return Work(
            (keys, values) * (2 if backward else 1),
            streams=(touched,),
            launches=16 if backward else 8,
        )

    def _value_channels(self) -> int:
        """Channels of a head's values that the core reads."""
        if self.of_latent is None:
            return self.model.kv_channels
        return self.of_latent.values // self.model.num_attention_heads

    def _hidden(self, backward: bool) -> float:
        """Bytes of two norms and two residual sums, with dropout."""
        dropout = 3 if self.config.model.hidden_dropout else 0
        tensors = 2 * (3 if backward else 2) + 2 * (3 + dropout)
        return self.share * self.hidden * self.size.compute * tensors

    def _streams(self, backward: bool, experts: bool) -> tuple[float, ...]:
        """Bytes of rotary embedding, or of all that latent attention makes heads of, and, in a
        layer with an MLP, activation.
        """
        size = self.size.compute
        turned = self.config.model.position_embedding_type in ("rope", "yarn")
        heads: tuple[float, ...] = (2 * self.tokens * (self.q + self.k) * size * turned,)
        if self.of_latent is not None:
            heads = self.of_latent.streams(backward=backward)
        parts = self.inner + self.ffn + (self.inner if backward else 0)
        return heads if experts else (*heads, self.tokens * parts * size)

    def _tp(self, backward: bool, experts: bool) -> tuple[Exchange, ...]:
        """What tensor parallelism sends for a layer: all-reduces, or with sequence parallelism
        gathers and reduce-scatters of the same bytes, and one more gather alongside products. Of
        experts it is the shared one alone whose matrices tensor-parallel ranks share.
        """
        pairs = 1 if experts and not (self.of_experts and self.of_experts.shared) else 2
        if self.tp == 1:
            return ()
        distributed = self.config.distributed
        size = self.hidden_bytes
        overlapped = distributed.tp_comm_overlap
        if distributed.sequence_parallel:
            hidden_by = "products" if overlapped else ""
            pair = (
                Exchange("all-gather", "tp", size, hidden_by),
                Exchange("reduce-scatter", "tp", size, hidden_by),
            )
            again = Exchange("all-gather", "tp", size, "products")
            if self.of_latent is not None:
                pairs -= 1  # of attention its output alone is as wide as the hidden states
                out = pair[:1] if backward else pair[1:]
                latents = self.of_latent.exchanges(backward=backward)
                return latents + out + pair * pairs + ((again,) * pairs if backward else ())
            return pair * pairs + ((again,) * pairs if backward else ())
        hidden_by = "products" if overlapped and backward else ""
        whole = Exchange("all-reduce", "tp", size, hidden_by)
        if self.of_latent is not None and backward:
            return self.of_latent.exchanges(backward=True) + (whole,) * (pairs - 1)
        return (whole,) * pairs

    def _cp(self, backward: bool) -> tuple[Exchange, ...]:
        """What context parallelism sends for a layer; `docs/parallelism.md` has the formulas."""
        if self.cp == 1:
            return ()
        size = self.tokens * self.size.compute
        heads, ring = attention_ranks(self.config.distributed)
        keys = 2 * self.k * size  # keys and values of this rank's positions
        found = []
        if heads > 1:
            each = Exchange("all-to-all", "cp_heads", (2 * self.q + 2 * self.k) * size)
            found.append(each)
        if ring > 1:
            hops = (ring - 1) * (2 if backward else 1)
            found += [Exchange("message", "cp_ring", keys, "cores")] * hops
        if heads == ring == 1:
            found.append(Exchange("all-gather", "cp", keys * self.cp))
            if backward:
                found.append(Exchange("reduce-scatter", "cp", 2 * keys * self.cp))
        return tuple(found)

    def _more(self, *, backward: bool) -> int:
        """Kernels that latent attention launches alongside those of other attention."""
        if self.of_latent is None:
            return 0
        either = latent_operations.FORWARD_LAUNCHES, latent_operations.BACKWARD_LAUNCHES
        return either[backward]

    def layer(self, index: int, choice: LayerRecompute) -> UnitWork:
        """The passes of one transformer layer, with what its backward pass computes again."""
        experts = self.of_experts if self.has_experts(index) else None
        linears = self.linears(self.is_fp8(index))
        if experts is not None:
            del linears["fc1"], linears["fc2"]
        products = tuple(linears.values())
        # read in bf16, written twice in 8 bits: as it is and transposed
        quantised = tuple(4.0 * self.tokens * each.k for each in products if each.fp8)
        forward = Work(
            products,
            streams=self._streams(False, experts is not None) + quantised,
            exchanges=(sent := self._tp(False, experts is not None) + self._cp(False)),
            launches=FORWARD_LAUNCHES + self._more(backward=False) + CALL_LAUNCHES * len(sent),
            hidden=self._hidden(False),
        ) + self._core(False)
        back, weight = self._layer_backward(products, experts is not None)
        if experts is not None:
            forward += _calling(experts.forward())
            back += _calling(experts.backward_input())
            weight += experts.backward_weight()
        again = self._again(choice, forward, linears, experts)
        return UnitWork(forward, again + back, weight)

    def _layer_backward(self, products: tuple[Product, ...], experts: bool) -> tuple[Work, Work]:
        """The two halves of a layer's backward pass, of the forward products; of one with
        `experts` without these.
        """
        again = tuple(4.0 * self.tokens * each.n for each in products if each.fp8)
        inputs = tuple(dataclasses.replace(each, n=each.k, k=each.n) for each in products)
        weights = tuple(
            dataclasses.replace(
                each,
                m=each.k,
                k=each.m,
                fp8=each.fp8 and self.config.precision.fp8_wgrad,
            )
            for each in products
        )
        back = Work(
            inputs,
            streams=self._streams(True, experts) + again,
            exchanges=(sent := self._tp(True, experts) + self._cp(True)),
            launches=BACKWARD_LAUNCHES - 4 + self._more(backward=True) + CALL_LAUNCHES * len(sent),
            hidden=self._hidden(True),
        ) + self._core(True)
        # each weight gradient is added to a buffer: read and written
        sums = tuple(2.0 * self.size.gradient * each.n * each.k for each in products)
        weight = Work(weights, streams=sums, launches=len(products))
        return back, weight

    def _again(
        self,
        choice: LayerRecompute,
        forward: Work,
        linears: dict[str, Product],
        experts: ExpertOperations | None,
    ) -> Work:
        """What a layer's backward pass computes again."""
        if choice.whole:
            return forward
        modules = choice.modules | always_rebuilt(self.config.model)
        again = Work()
        if "core_attn" in modules:
            again += self._core(False)
        if self.of_latent is not None:
            again += _calling(self.of_latent.again(modules))
        elif "qkv" in modules:
            again += Work((linears["qkv"],), launches=1)
        if experts is not None:
            again += _calling(experts.again(modules))
        elif "mlp" in modules:
            again += Work((linears["fc1"],), launches=1)
        if "layernorm" in modules:
            again += Work(hidden=self._hidden(False) * 4 / 10, launches=2)
        if "mlp_act" in modules and experts is None:
            again += Work(streams=(self.tokens * (self.inner + self.ffn) * self.size.compute,))
        return again

    def embedding(self) -> UnitWork:
        """Rows are read and added up; tensor-parallel ranks add theirs."""
        size = self.tokens * self.hidden * self.size.compute
        sent: tuple[Exchange, ...] = ()
        back: tuple[Exchange, ...] = ()
        if self.tp > 1:
            shared = self.config.distributed.sequence_parallel
            sent = (Exchange("reduce-scatter" if shared else "all-reduce", "tp", size),)
            back = (Exchange("all-gather", "tp", size),) if shared else ()
        return UnitWork(
            Work(streams=(2 * size,), exchanges=sent, launches=4),
            Work(streams=(3 * size,), exchanges=back, launches=4),
        )

    def head(self) -> UnitWork:
        """The final norm, logits and loss; the weight gradient is formed with the input's."""
        size = self.size.compute
        product = Product(self.tokens, self.vocab, self.hidden)
        logits = self.tokens * self.vocab
        exchanges: tuple[Exchange, ...] = ()
        if self.tp > 1:
            exchanges = (Exchange("all-reduce", "tp", 4 * self.tokens),) * 3
            gathers = self.config.distributed.sequence_parallel
            operation = "all-gather" if gathers else "all-reduce"
            exchanges += (Exchange(operation, "tp", self.hidden_bytes),)
        forward = Work((product,), (), (2 * logits * size,), exchanges, launches=10)
        back = Work((product, product), (), (3 * logits * size,), exchanges[3:], launches=8)
        if self.program.whole_logits:
            forward, back = self._whole_logits(forward, back)
        if self.config.model.fused_linear_cross_entropy:
            back += Work((product,))
        return UnitWork(forward, back)

    def _whole_logits(self, forward: Work, back: Work) -> tuple[Work, Work]:
        """The head's passes where every tensor-parallel rank computes the loss of all logits, which
        it gathers and copies into their order.
        """
        logits = self.tokens * self.vocab * self.tp
        gathered = logits * self.size.compute
        exchanges, copied = forward.exchanges[3:], 0.0
        if self.tp > 1:
            exchanges += (Exchange("all-gather", "tp", gathered),)
            copied = 2 * gathered
        forward = dataclasses.replace(
            forward, streams=(copied, WHOLE_FORWARD * logits), exchanges=exchanges
        )
        return forward, dataclasses.replace(back, streams=(WHOLE_BACKWARD * logits,))


def _calling(work: Work) -> Work:
    """With what its collectives take of the host."""
    return dataclasses.replace(work, launches=work.launches + CALL_LAUNCHES * len(work.exchanges))
