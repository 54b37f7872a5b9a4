"""What the passes of experts compute, move and send on one rank, where all have as many tokens.

They are what a layer has in the place of its MLP: router, the way of rows to experts and back, a
product for each expert of the rank, and the shared expert. Symbols: T tokens of this rank, k
experts a token, h hidden, f width of an expert on this rank, N = T k etp rows of this rank's
experts, E of them in all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatron.tools._plan.state import precisions
from megatron.tools._plan.work import Exchange, Product, Work

from megatron.config.derive import GATED, expert_ranks
from megatron.config.groups import Config
from megatron.model.kernels import grouped_gemm_on_gpu

# Kernels that a layer launches alongside those of a layer with an MLP, with two choices a token and
# without the products of experts, and of each more choice: counted as docs/results/launches.json
# is, without losses that balance. What rows take that other ranks have is read from the code.
FORWARD_LAUNCHES = 33
BACKWARD_LAUNCHES = 15
CHOICE_LAUNCHES = 2
EXCHANGE_LAUNCHES = (18, 3)  # of a forward and a backward pass
NUMBER = 8  # bytes of an integer


class ExpertOperations:
    """The passes of a run's experts. `tokens` of a micro-batch on the tensor-parallel ranks
    together, `own` on this rank.
    """

    def __init__(self, config: Config, tokens: float, own: float):
        model = config.model
        assert model.num_experts is not None and model.moe_ffn_hidden_size is not None
        self.config, self.tokens, self.own = config, tokens, own
        self.etp, self.ep = expert_ranks(config)
        self.hidden, self.count = model.hidden_size, model.num_experts
        self.k = model.moe_router_topk
        self.size = precisions(config)
        gated = 2 if model.activation in GATED else 1
        self.ffn = model.moe_ffn_hidden_size / self.etp
        self.inner = gated * self.ffn
        tp = config.distributed.tensor_model_parallel_size
        self.shared = (model.moe_shared_expert_intermediate_size or 0) / tp
        self.shared_inner = gated * self.shared
        self.rows = own * self.k * self.etp
        self.gathers = model.moe_token_dispatcher_type == "allgather"
        self.backend = grouped_gemm_on_gpu(config)

    @property
    def here(self) -> float:
        """Experts of this rank that have rows."""
        return min(self.count / self.ep, self.rows)

    def router(self) -> Product:
        """The logits, in fp32 or wider."""
        return Product(self.own, self.count, self.hidden, wide=True)

    def experts(self) -> tuple[Product, ...]:
        """fc1 and fc2 of each expert of this rank."""
        each = self.rows / self.here
        return (
            Product(each, self.inner, self.hidden, self.here),
            Product(each, self.hidden, self.ffn, self.here),
        )

    def shared_expert(self) -> tuple[Product, ...]:
        """fc1 and fc2 of the shared expert, and its gate."""
        if not self.shared:
            return ()
        products = (
            Product(self.tokens, self.shared_inner, self.hidden),
            Product(self.tokens, self.hidden, self.shared),
        )
        gate = Product(self.own, 1, self.hidden)
        return products + ((gate,) if self.config.model.moe_shared_expert_gate else ())

    def products(self) -> tuple[Product, ...]:
        """All forward products."""
        return (self.router(), *self.experts(), *self.shared_expert())

    def exchanges(self, *, is_plan: bool) -> tuple[Exchange, ...]:
        """What goes to experts and comes back in a pass, with the rows' weights; `is_plan`: and who
        has how many rows.
        """
        row = self.hidden * self.size.compute
        if self.gathers:
            extra = self.size.wide + (NUMBER if is_plan else 0)  # weights, experts' numbers
            return (*self._gathered(row), *list(self._gathered(self.k * extra))[::2])
        found = []
        if self.ep > 1:
            assignments = self.own * self.k
            found += [Exchange("all-to-all", "ep", assignments * row)] * 2
            found.append(Exchange("all-to-all", "ep", assignments * self.size.wide))
            if is_plan:
                found.append(Exchange("all-to-all", "ep", self.count * NUMBER))
        if self.etp > 1:
            found += [
                Exchange("all-gather", "etp", self.rows * row),
                Exchange("reduce-scatter", "etp", self.rows * row),
                Exchange("all-gather", "etp", self.rows * self.size.wide),
            ]
        return tuple(found)

    def _gathered(self, row: float) -> Iterator[Exchange]:
        """Tokens with that many bytes each that every rank has, and the sums of all parts."""
        ranks = 1
        for axis, size in (("ep", self.ep), ("etp", self.etp)):
            if size > 1:
                ranks *= size
                yield Exchange("all-gather", axis, ranks * self.own * row)
                yield Exchange("reduce-scatter", axis, ranks * self.own * row)

    def rows_moved(self) -> float:
        """Bytes that putting rows in order and adding them up reads and writes, in either pass."""
        width, size = self.hidden, self.size.compute
        taken = 2 * self.rows * width * size
        if self.gathers:
            # every rank adds up for the tokens of all, and clears what it has no expert of
            tokens = self.own * self.ep * self.etp
            return taken + self._added_up(tokens) + 2 * tokens * self.k * width * size
        ordered = 2 * taken if self.ep * self.etp > 1 else 0.0
        parts = self.rows * width * size if self.etp > 1 else 0.0
        return taken / self.etp + ordered + 3 * parts + self._added_up(self.own)

    def _added_up(self, tokens: float) -> float:
        """Bytes of the sum of each token's k rows, in fp32 or wider."""
        size, wide = self.size.compute, self.size.wide
        widened = 2 * (size + wide) if size != wide else 0
        each = 2 * size * self.k + (self.k - 1) * (2 * wide + size) + widened
        return tokens * self.hidden * each

    def activation(self, *, backward: bool) -> float:
        """Bytes of the activation of fc1's output, and of its product with a row's weight."""
        size, wide, f, inner = self.size.compute, self.size.wide, self.ffn, self.inner
        value = (inner + f) * size
        weighted = f * 2 * (size + wide) if size != wide else 2 * f * size
        if backward:  # the value once more, the weight's gradient, and the activation's
            value += 4 * f * size + (2 * inner + f) * size
        shared = self.shared_inner * (2 if backward else 1) + self.shared
        return self.rows * (value + weighted) + self.tokens * shared * size

    def scores(self) -> float:
        """Bytes of the router's input in fp32, of logits and scores."""
        wide = self.size.wide
        return self.own * (self.hidden * (self.size.compute + wide) + 4 * self.count * wide)

    def _launches(self, base: float, exchanged: float) -> float:
        """Kernels of a pass: the products of experts, and the rest."""
        more = CHOICE_LAUNCHES * (self.k - 2)
        exchanged = exchanged if self.ep * self.etp > 1 else 0
        return base + more + exchanged + self._product_launches(self.backend != "torch")

    def _product_launches(self, grouped: bool) -> float:
        """Kernels of two products over all experts of this rank."""
        return 2 if grouped else 2 * self.here

    def forward(self) -> Work:
        """A forward pass."""
        return Work(
            self.products(),
            streams=(self.scores(), self.rows_moved(), self.activation(backward=False)),
            exchanges=self.exchanges(is_plan=True),
            launches=self._launches(FORWARD_LAUNCHES, EXCHANGE_LAUNCHES[0]),
        )

    def backward_input(self) -> Work:
        """The gradients of tokens and of their weights."""
        inputs = tuple(dataclasses.replace(each, n=each.k, k=each.n) for each in self.products())
        return Work(
            inputs,
            streams=(self.scores(), self.rows_moved(), self.activation(backward=True)),
            exchanges=self.exchanges(is_plan=False),
            launches=self._launches(BACKWARD_LAUNCHES, EXCHANGE_LAUNCHES[1]),
        )

    def backward_weight(self) -> Work:
        """Weight gradients, each of which is added to a buffer: read and written."""
        products = self.products()
        weights = tuple(dataclasses.replace(each, m=each.k, k=each.m) for each in products)
        sums = tuple(2.0 * self.size.gradient * each.n * each.k * each.count for each in products)
        return Work(
            weights, streams=sums, launches=self._product_launches(self.backend == "triton") + 2
        )

    def again(self, modules: frozenset[str]) -> Work:
        """What a backward pass computes again of these modules."""
        found = Work()
        if "moe" in modules:  # the way there and back, both products and the activation
            found += Work(
                self.experts(),
                streams=(self.rows_moved(), self.activation(backward=False)),
                exchanges=self.exchanges(is_plan=False),
                launches=self._launches(FORWARD_LAUNCHES // 2, EXCHANGE_LAUNCHES[1]),
            )
        elif "moe_act" in modules:
            found += Work(streams=(self.activation(backward=False),), launches=4)
        if "mlp" in modules:
            found += Work(self.shared_expert()[:1], launches=1)
        return found
