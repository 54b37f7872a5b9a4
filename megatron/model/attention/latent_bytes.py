"""What latent attention (latent_attention.py) keeps and takes of a micro-batch on one rank, for the
plan: the counterpart of `AttentionBytes`, which counts the attention core of both.

Symbols: n heads of this rank, c content, r position and v value channels of a head, q = n (c + r)
width of the queries, of the keys, and of the values where they are filled up to it; l and m widths
of the latents of queries and of keys and values. Down-projections and norms have this rank's part
of the sequence under sequence parallelism. Called from tools/_plan/activations.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.model.attention.attention_bytes import AttentionBytes
from megatron.model.norm import saved_statistics

UP = "mla_up_proj"


@dataclass(frozen=True)
class LatentBytes(AttentionBytes):
    """Of LatentAttention, in bytes."""

    sharing: int = 1  # ranks that share the sequence outside of attention

    @property
    def own(self) -> int:
        """Tokens of this rank outside of attention."""
        return self.seq * self.samples // self.sharing

    @property
    def latents(self) -> tuple[int, ...]:
        """Widths of what queries (if it is not the layer's input), and keys and values are made
        of.
        """
        rank = self.model.q_lora_rank
        return (*(() if rank is None else (rank,)), self.model.kv_lora_rank)

    @property
    def down(self) -> int:
        """Elements a token that the down-projections give."""
        return sum(self.latents) + self.model.qk_pos_emb_head_dim

    @property
    def outputs(self) -> int:
        """Elements a token of the output projection's input."""
        return self.model.num_attention_heads * self.model.v_head_dim

    @property
    def up(self) -> int:
        """Elements a token of the up-projection of keys and values."""
        model = self.model
        return model.num_attention_heads * (model.qk_head_dim + model.v_head_dim)

    @property
    def values(self) -> int:
        """Elements a token of the values that the attention core reads."""
        return self.outputs if self.is_plain and self.cp == 1 else self.widths[0]

    @property
    def is_filled(self) -> bool:
        """Whether values are followed by zeros, of which the output is freed by a copy."""
        return self.values > self.outputs

    @property
    def copied_output(self) -> int:
        if not (self.is_filled or self.is_plain or self.is_widened):
            return 0
        return self.seq * self.samples * self.compute * self.outputs

    def inputs(self, recomputed: frozenset[str] = frozenset()) -> list[tuple[int, int]]:
        """(elements, bytes) of the storages that are kept in front of the attention core, without
        the layer's input: inputs of the latents' norms and of the up-projections.
        """
        if "qkv" in recomputed:
            return []
        model, own, compute = self.model, self.own, self.compute
        if UP in recomputed:  # the latent of keys and values lies beside their position channels
            widths = [*self.latents[:-1], self.latents[-1] + model.qk_pos_emb_head_dim]
            return [(own * width, own * width * compute) for width in widths]
        found = []
        for width in self.latents:
            found.append((own * width, own * width * compute))
            if model.qk_layernorm:
                numbers = own * saved_statistics(model.normalization, 1)
                found += [found[-1], (numbers, numbers * self.wide)]
        return found

    def saved(self, recomputed: frozenset[str] = frozenset()) -> int:
        again = recomputed & {"qkv", UP}
        front = sum(size for _, size in self.inputs(recomputed))
        tokens, (q, _) = self.seq * self.samples, self.widths
        heads = 0 if again else tokens * self.compute * (2 * q + self.values)
        if "core_attn" in recomputed:
            return front + heads
        return front + self._core(bool(again)) + self._mask()

    def _core(self, rebuilt: bool) -> int:
        """What the core keeps: its inputs, but for those of `_heads` where these are `rebuilt`, its
        output, statistics, and the output projection's input.
        """
        tokens, compute, (q, _) = self.seq * self.samples, self.compute, self.widths
        out = tokens * compute * self.outputs
        sums = tokens * self.wide * self.model.num_attention_heads
        made = 0 if rebuilt else tokens * compute * (2 * q + self.values)
        if self.is_plain:
            return self._plain_core(rebuilt)
        if self.blocks:
            again = 0 if rebuilt or self.exchanging > 1 else tokens * compute * q
            # `_blocks_per_token` has the output as wide as queries, once more if it is exchanged
            width = tokens * self._blocks_per_token()
            replaced = tokens * compute * q if self.exchanging > 1 or not self.is_filled else 0
            return again + width + out - replaced
        if self.is_widened:
            return out + tokens * self.wide * 4 * q + sums
        whole = tokens * compute * q if self.is_filled or self.exchanging > 1 else 0
        if self.exchanging > 1:
            made = tokens * compute * 3 * q
        elif self.gathers:
            made = tokens * compute * ((0 if rebuilt else q) + 2 * q * self.cp)
        return made + whole + out + sums

    def _plain_core(self, rebuilt: bool) -> int:
        """Where all scores are in memory: keys and values are copied for the products."""
        tokens, compute, (q, _) = self.seq * self.samples, self.compute, self.widths
        ranks = self.cp if self.gathers else 1
        width = ranks * (q + self.values) + self.outputs
        width += 0 if rebuilt and self.exchanging == 1 else q
        width += q if self.exchanging > 1 else 0
        return tokens * (compute * width + self.cp * self._scores_per_token())

    def leaving(
        self, recomputed: frozenset[str] = frozenset()
    ) -> tuple[list[tuple[int, int]], int]:
        tokens, (q, _) = self.seq * self.samples, self.widths
        output = 0 if "core_attn" in recomputed else tokens * self.compute * self.outputs
        mask = self._mask() if output else 0
        found = []
        if output and (self.blocks or not self.is_plain):
            sums = tokens * self.model.num_attention_heads
            found.append((sums, self.wide * sums))
        front = sum(size for _, size in self.inputs(recomputed))
        rest = self.saved(recomputed) - front - output - mask - sum(size for _, size in found)
        return [*found, (tokens * min(q, self.values), rest), (mask // self.compute, mask)], output

    @property
    def takes_projection(self) -> bool:
        return False

    @property
    def norms_projection(self) -> bool:
        return False

    def gradients(self) -> int:
        """Of what the core reads, and of what it is made of, beside what stands in front of it;
        where all scores are in memory those of probabilities and scores.
        """
        tokens, (q, _), compute = self.seq * self.samples, self.widths, self.compute
        turned = self.model.num_attention_heads * self.model.qk_pos_emb_head_dim
        heads = 2 * q + self.values
        own = tokens * compute * (heads + q + self.up + turned)
        own += sum(size for _, size in self.inputs())
        if not self.is_plain:
            return own
        scores = self.wide * self.seq * self.model.num_attention_heads
        return max(own, tokens * (2 * scores + compute * 2 * q))

    def deferred(self) -> int:
        """Inputs and output gradients of the linear layers that a split backward pass leaves,
        without those of the hidden states' width.
        """
        whole = self.widths[0] + self.up + self.outputs
        outside = sum(self.latents) + self.down
        return self.compute * (self.seq * self.samples * whole + self.own * outside)

    def forming(self) -> list[tuple[int, tuple[int, int]]]:
        tokens, own, compute = self.seq * self.samples, self.own, self.compute
        h, (q, _), rank = self.model.hidden_size, self.widths, self.model.q_lora_rank
        latent, positions = self.model.kv_lora_rank, self.model.qk_pos_emb_head_dim
        front = sum(size for _, size in self.inputs())
        heads = front + compute * tokens * (q + self.up)  # gradients of both up-projections
        gathered = compute * tokens * (max(self.latents) if self.sharing > 1 else 0)
        narrow = front + compute * own * self.down
        return [
            (heads + gathered + compute * tokens * latent, (latent, self.up)),
            (heads + gathered, (rank or h, q)),
            (narrow, (h, latent + positions)),
            *([] if rank is None else [(narrow, (h, rank))]),
        ]

    def _making(self) -> int:
        """Queries, keys and values beside what they are made of."""
        turned = self.model.num_attention_heads * self.model.qk_pos_emb_head_dim
        width = self.widths[0] + self.up + 2 * self.widths[0] + self.values + turned
        return self.seq * self.samples * self.compute * width

    def _in_core(self) -> int:
        """The core with what it reads, which lives on where it is widened."""
        tokens, compute = self.seq * self.samples, self.compute
        heads = tokens * compute * (2 * self.widths[0] + self.values)
        return (heads if self.is_widened else 0) + self._core(rebuilt=False) + self._mask()

    def unkept(self) -> int:
        """At the worst moment of a forward pass that keeps nothing: queries and keys before and
        behind rotation, or the core with what it reads.
        """
        front = sum(size for _, size in self.inputs()) + self.compute * self.own * self.down
        return front + max(self._making(), self._in_core())

    def making(self) -> int:
        front = sum(size for _, size in self.inputs())
        latent = self.compute * self.own * self.model.qk_pos_emb_head_dim
        in_core = self._in_core() if self.is_widened else 0
        return front + max(latent + self._making(), in_core) - self.saved()

    def behind_core(self) -> int:
        return self.gradients() - self.copied_output if self.is_plain else 0
