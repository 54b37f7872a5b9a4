"""What latent attention computes, moves and sends on one rank in front of the attention core, in
the place of one projection and its rotary embedding.

Symbols: T tokens of a micro-batch on the tensor-parallel ranks together, T' on this rank outside of
attention, n heads of this rank, c content, r position and v value channels of a head, q = n (c +
r), l and m widths of the latents of queries and of keys and values. Called from plan/operations.py.
"""

from __future__ import annotations

from megatron.tools._plan.state import precisions
from megatron.tools._plan.work import Exchange, Product, Work

from megatron.config.groups import Config
from megatron.model.arithmetic import local_shape

# Kernels of a forward and a backward pass alongside those of a layer whose queries, keys and values
# are one projection, without weight gradients, and those of --recompute-modules mla_up_proj:
# counted as docs/results/launches.json is, with norms of latents and values that are filled up.
FORWARD_LAUNCHES = 26
BACKWARD_LAUNCHES = 30
AGAIN_LAUNCHES = 25
# bytes that turning a channel by torch's operators moves, in elements of the compute precision and
# of fp32 or wider: four products, two sums, and the halves put together
TURNED = (3, 8)


class LatentOperations:
    """The passes of a run's latent attention; `tokens` and `own`: T and T'."""

    def __init__(self, config: Config, tokens: float, own: float):
        self.config, self.tokens, self.own = config, tokens, own
        self.tp = config.distributed.tensor_model_parallel_size
        self.model = model = local_shape(config.model, self.tp)
        self.size = precisions(config)
        self.hidden, self.rank = model.hidden_size, model.q_lora_rank
        self.latent, self.positions = model.kv_lora_rank, model.qk_pos_emb_head_dim
        heads = model.num_attention_heads
        self.q = heads * model.kv_channels
        self.up = heads * (model.qk_head_dim + model.v_head_dim)
        self.outputs = heads * model.v_head_dim
        self.turned = (heads + 1) * self.positions
        plain = model.attention_backend == "plain" and config.distributed.context_parallel_size == 1
        self.values = self.outputs if plain else self.q  # that the core reads

    def linears(self) -> dict[str, Product]:
        """The forward products in front of the core; every tensor-parallel rank computes those
        down.
        """
        down = self.latent + self.positions
        found = {"kv_down": Product(self.own, down, self.hidden)}
        if self.rank is not None:
            found["q_down"] = Product(self.own, self.rank, self.hidden)
        found["q_up"] = Product(self.tokens, self.q, self.rank or self.hidden)
        return found | {"kv_up": Product(self.tokens, self.up, self.latent)}

    def streams(self, *, backward: bool) -> tuple[float, ...]:
        """Bytes of norms and copies of the latents; of queries, keys and values from the
        up-projections; and of the output without the zeros that fill values up.
        """
        compute, wide = self.size.compute, self.size.wide
        widths = self.latent + (self.rank or 0)
        normed = widths * (3 if backward else 2) * self.config.model.qk_layernorm
        narrow = self.own * (normed + 2 * (self.latent + self.positions)) * compute
        heads = self.q + self.up + self.positions + 2 * self.q + self.values
        turned = self.turned * (TURNED[0] * compute + TURNED[1] * wide)
        filled = self.values > self.outputs
        freed = (2 * self.outputs + (self.values if backward else 0)) * compute * filled
        return (narrow, self.tokens * (heads * compute + turned), self.tokens * freed)

    def gathers(self) -> tuple[Exchange, ...]:
        """Latents and positions for the heads of all ranks, under sequence parallelism."""
        return self._of_latents("all-gather") if self.config.distributed.sequence_parallel else ()

    def _of_latents(self, operation: str) -> tuple[Exchange, ...]:
        widths = (self.rank or self.hidden, self.latent, self.positions)
        size = self.tokens * self.size.compute
        return tuple(Exchange(operation, "tp", size * width) for width in widths)

    def exchanges(self, *, backward: bool) -> tuple[Exchange, ...]:
        """What tensor parallelism sends for attention but for the output projection's: of latents
        in the place of hidden states.
        """
        if self.tp == 1:
            return ()
        if not backward:
            return self.gathers()
        if not self.config.distributed.sequence_parallel:
            return self._of_latents("all-reduce")
        again = self.gathers()[:2]  # for the weight gradients
        return self._of_latents("reduce-scatter") + again

    def again(self, modules: frozenset[str]) -> Work:
        """What a backward pass computes again of queries, keys and values."""
        if not modules & {"qkv", "mla_up_proj"}:
            return Work()
        products = self.linears()
        if "qkv" not in modules:
            products = {name: each for name, each in products.items() if "up" in name}
        return Work(
            tuple(products.values()),
            streams=self.streams(backward=False)[:2],
            exchanges=self.gathers(),
            launches=AGAIN_LAUNCHES,
        )
