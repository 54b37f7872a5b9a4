"""What self-attention (attention.py) keeps and takes of a micro-batch on one rank, in bytes, for
the plan. Called from tools/_plan/activations.py; latent_bytes.py counts latent attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.groups import ModelConfig
from megatron.config.workspace import ROUND_BYTES
from megatron.model.attention.attention import (
    OURS,
    choose_attention,
    computes_blocks,
    repeats_heads,
)
from megatron.model.norm import saved_statistics


@dataclass(frozen=True)
class AttentionBytes:
    """What SelfAttention keeps and takes of a micro-batch of [seq, samples] on one rank, in bytes,
    for the plan.

    `model` has this rank's heads; `compute` and `wide` are bytes of an element of activations and
    of fp32 or fp64 statistics.
    """

    model: ModelConfig
    seq: int
    samples: int
    compute: int
    wide: int
    device: str  # cpu or cuda
    documents: bool  # attention ends at their bounds
    # ranks that hold parts of the sequence, of which this one holds `seq` positions; how many of
    # them exchange heads for positions, and how many make a ring. Without either, keys and values
    # of all are gathered.
    cp: int = 1
    exchanging: int = 1
    ring: int = 1

    @property
    def gathers(self) -> bool:
        """Whether keys and values of all ranks are gathered."""
        return self.cp > 1 and self.exchanging == self.ring == 1

    @property
    def blocks(self) -> int:
        """Blocks of keys that attention is computed over, see `steps_of`; 0 where it is not."""
        if self.ring > 1:
            return self.ring
        return self.cp if self.gathers and computes_blocks(self.model, self.device) else 0

    @property
    def widths(self) -> tuple[int, int]:
        """Elements a token of all queries, and of all keys."""
        return (
            self.model.kv_channels * self.model.num_attention_heads,
            self.model.kv_channels * self.model.num_query_groups,
        )

    @property
    def is_plain(self) -> bool:
        """Whether all scores are in memory."""
        return choose_attention(self.model, training=True) == "plain"

    @property
    def is_ours(self) -> bool:
        return self.model.attention_backend in OURS

    @property
    def rotates(self) -> bool:
        """Whether queries and keys are turned into tensors of their own: our kernel turns them in
        place.
        """
        return (
            self.model.position_embedding_type in ("rope", "yarn")
            and self.model.rotary_backend == "torch"
        )

    @property
    def takes_projection(self) -> bool:
        """Whether attention reads the fused projection itself, or a normed one of its shape, and
        writes its gradient.
        """
        is_fused = not self.model.qk_layernorm or self.norms_projection
        return self.is_ours and not self.rotates and is_fused

    @property
    def norms_projection(self) -> bool:
        """Whether the norms of queries and keys make a second tensor of the projection's shape."""
        is_fused = self.is_ours and not self.rotates and self.model.norm_backend == "triton"
        return self.model.qk_layernorm and is_fused

    @property
    def is_repeated(self) -> bool:
        """Whether torch's fused attention reads keys and values that were repeated for each query
        head.
        """
        masked = self.documents or self.model.window_size is not None
        fused = not self.is_ours and not self.is_plain
        return fused and repeats_heads(
            self.device, masked, self.model.num_attention_heads, self.model.num_query_groups
        )

    def saved(self, recomputed: frozenset[str] = frozenset()) -> int:
        """From the QKV projection's output to the output projection's input, and the mask, without
        what these modules of `Rebuilder` make again.
        """
        tokens = self.seq * self.samples
        if "core_attn" in recomputed:
            return 0 if "qkv" in recomputed else tokens * self._heads_per_token()
        if self.blocks:
            heads = 0 if "qkv" in recomputed else self._heads_for_blocks()
            return tokens * (heads + self._blocks_per_token())
        if "qkv" in recomputed:
            return tokens * (self._core_per_token() + self._exchanged_per_token()) + self._mask()
        shared = self._shared_per_token() if self.cp > 1 else 0
        return tokens * (self._saved_per_token() + shared) + self._mask()

    def inputs(self, recomputed: frozenset[str] = frozenset()) -> list[tuple[int, int]]:
        """(elements, bytes) of storages kept between the layer's input and what the core reads."""
        return []

    @property
    def outputs(self) -> int:
        """Elements a token of the output projection's input."""
        return self.widths[0]

    @property
    def copied_output(self) -> int:
        """Bytes of the output projection's input where the core does not keep it, so that it is
        gone when the core is differentiated.
        """
        return 0

    def deferred(self) -> int:
        """Inputs and output gradients of the linear layers that a split backward pass leaves,
        without those of the hidden states' width.
        """
        q, k = self.widths
        return self.seq * self.samples * self.compute * (q + 2 * k + q)

    def forming(self) -> list[tuple[int, tuple[int, int]]]:
        """(bytes, (inputs, outputs)) of each weight in front of the core: what is there while its
        gradient is formed.
        """
        q, k = self.widths
        size = self.seq * self.samples * self.compute * (q + 2 * k)
        return [(size, (self.model.hidden_size, q + 2 * k))]

    def unkept(self) -> int:
        """At the worst moment of a forward pass that keeps nothing."""
        return self.saved()

    def making(self) -> int:
        """While what the core reads is made, less all that attention keeps."""
        return -self.saved()

    def behind_core(self) -> int:
        """Gradients that are there while all that attention keeps is."""
        return self.gradients()

    def leaving(
        self, recomputed: frozenset[str] = frozenset()
    ) -> tuple[list[tuple[int, int]], int]:
        """What `saved` counts, apart: (elements, bytes) of tensors, statistics and mask, and the
        bytes of the output projection's input. Of tensors that are taken together, elements of the
        smallest.
        """
        tokens, (q, k) = self.seq * self.samples, self.widths
        output = 0 if "core_attn" in recomputed else tokens * self.compute * q
        mask = self._mask() if output else 0
        sizes = [(each, self.wide * each) for each in self._statistics(recomputed)]
        rest = self.saved(recomputed) - output - mask - sum(size for _, size in sizes)
        apart = self.is_plain or self.is_widened or self.is_repeated or self.cp > 1
        projections = 0 if apart or recomputed else 2 if self.norms_projection else 1
        for width in [q + 2 * k] * projections + [q] * (2 * (projections == 1)):
            if tokens * self.compute * width <= rest:
                sizes.append((tokens * width, tokens * self.compute * width))
                rest -= sizes[-1][1]
        return [*sizes, (tokens * k, rest), (mask // self.compute, mask)], output

    def _statistics(self, recomputed: frozenset[str]) -> list[int]:
        """Elements of the log-sum-exp, and of what the norms of queries and keys keep."""
        tokens, model = self.seq * self.samples, self.model
        heads, groups = model.num_attention_heads, model.num_query_groups
        has_sums = (self.blocks or not self.is_plain) and "core_attn" not in recomputed
        found = [tokens * heads] if has_sums else []
        if model.qk_layernorm and "qkv" not in recomputed:
            each = saved_statistics(model.normalization, 1)
            if self.norms_projection:
                return [*found, tokens * (heads + 2 * groups) * each]
            return [*found, *[tokens * heads, tokens * groups] * each]
        return found

    @property
    def is_widened(self) -> bool:
        """Whether torch's fused attention computes a narrow run in fp32, as it does on a CPU."""
        narrow = self.device == "cpu" and self.compute < self.wide
        return narrow and not self.is_ours and not self.is_plain

    def _shared_per_token(self) -> int:
        """What context parallelism adds to what attention keeps for each position of this rank; may
        be negative, since parts of the projection are copied before attention reads them.
        """
        (q, k), norms = self.widths, self.model.qk_layernorm
        if self.is_plain:
            # keys and values repeated for each query head, or the output before it is exchanged
            copies = 2 * q * (self.cp - 1) if self.gathers else q
            return self.compute * copies + (self.cp - 1) * self._scores_per_token()
        if self.gathers:
            own = k if norms else q + 3 * k if self.rotates else 0
            return self.compute * (2 * k * self.cp - own)
        repeated = self.repeated
        if self.is_widened:
            return self.wide * 2 * (repeated - k)
        if norms:
            return self.compute * (q + 2 * repeated - k)
        own = 3 * k if self.rotates else 2 * k + self._gathered - q
        return self.compute * (2 * repeated - own)

    def _exchanged_per_token(self) -> int:
        """What the core reads of other context-parallel ranks and is kept, whatever is made again
        of this rank's projection; where heads are exchanged the output too, before it goes back.
        """
        if self.cp == 1:
            return 0
        if self.is_plain or self.is_widened:
            return self._shared_per_token()
        (q, k), repeated = self.widths, self.repeated
        if self.gathers:
            return self.compute * 2 * k * self.cp
        return self.compute * (2 * q + (0 if self.is_repeated else 2 * repeated))

    @property
    def repeated(self) -> int:
        """Elements a token of all keys, repeated where fewer heads than ranks are exchanged."""
        return max(self.widths[1], self.exchanging * self.model.kv_channels)

    def _heads_for_blocks(self) -> int:
        """What is kept of the projection and its parts, where attention is computed by blocks,
        which keeps the queries, and keys and values of its own.
        """
        model, (q, k) = self.model, self.widths
        copied = 1 < model.num_query_groups < model.num_attention_heads
        if model.qk_layernorm:
            statistics = saved_statistics(model.normalization, self.wide)
            inputs = q + 2 * k + (q if copied else 0)
            normed = 0 if self.exchanging > 1 else q
            groups = model.num_attention_heads + model.num_query_groups
            return self.compute * (inputs + normed) + statistics * groups
        if self.exchanging > 1:
            return 0
        return self.compute * (q if copied or self.rotates else q + 2 * k)

    def _blocks_per_token(self) -> int:
        """Keys and values of this rank, or of all where they are gathered, the output and the
        log-sum-exp; what was exchanged, and the output before it is.
        """
        (q, _), repeated = self.widths, self.repeated
        exchanged = 2 * q + 2 * repeated if self.exchanging > 1 else 0
        width = q + 2 * repeated * (self.cp if self.gathers else 1) + exchanged
        return self.compute * width + self.wide * self.model.num_attention_heads

    def _block_mask(self) -> int:
        """Bytes of a mask of one block of keys, as bits and as what torch's kernel adds to scores;
        our kernels have none.
        """
        masked = self.documents or self.model.window_size is not None
        if not masked or self.is_plain or self.is_ours:
            return 0
        pairs = (self.seq * self.exchanging) ** 2
        return (1 + self.wide) * pairs * (self.samples if self.documents else 1)

    def blocks_forward(self) -> int:
        """Bytes that attention by blocks takes in the forward pass: in fp32 or fp64 the output, the
        part of a block and what joins them; two blocks of keys and values on their way, or all.
        """
        (q, _), repeated = self.widths, self.repeated
        held = 2 * repeated * (1 + self.cp if self.gathers else 2)
        tokens = self.seq * self.samples
        return tokens * (self.wide * 4 * q + self.compute * held) + self._block_mask()

    def _in_block(self) -> int:
        """Bytes of what one block gives in the backward pass and of what is made for that, its
        scores where they are in memory; beside the gradient of all queries, which the first block
        begins. Where no mask is read, others are halves: of the keys, or of the queries.
        """
        (q, _), repeated = self.widths, self.repeated
        element = self.wide if self.is_widened else self.compute
        masked = self.documents or self.model.window_size is not None or self.is_plain
        count = 6 if self.model.attention_dropout > 0 else 5  # what has the scores' shape
        scores = count * self.wide * self.seq * self.model.num_attention_heads

        def given(q: int, keys: int) -> int:
            copies = self.wide * (3 * q + 2 * keys) if self.is_widened else 0
            return element * (q + 2 * keys) + copies

        most = (
            given(q, repeated)
            if masked
            else max(
                given(q, repeated) - self.wide * q,
                given(q, repeated // 2),
                given(q // 2, repeated),
            )
        )
        return self.seq * self.samples * (most + scores * self.is_plain) + self._block_mask()

    def blocks_backward(self) -> int:
        """Bytes that attention by blocks takes in the backward pass: the gradient of its output; in
        fp32 or fp64 that of the queries. Beside them in a ring blocks of keys and values on their
        way and, in fp32 or fp64, two of their gradients, of which two ranks have one while a block
        is computed. Else the gradients of all, and what Gloo takes to reduce-scatter them.
        """
        (q, _), repeated, tokens = self.widths, self.repeated, self.seq * self.samples
        own = tokens * self.compute * 2 * repeated
        kept = tokens * (self.wide * q + self.compute * q)
        if self.gathers:
            whole = own * self.cp
            received = min(whole - own, max(ROUND_BYTES, whole // 2))
            return kept + whole + max(self._in_block(), own + received)
        others = min(2, self.ring - 1)
        gradient = tokens * self.wide * 2 * repeated
        part = own if not self.is_widened else gradient
        return kept + others * own + max(others * gradient + self._in_block(), 2 * gradient + part)

    def _heads_per_token(self) -> int:
        """What `SelfAttention._heads` keeps and returns: the projection and what is made of it."""
        model, (q, k) = self.model, self.widths
        norms, rotates = model.qk_layernorm, self.rotates
        groups = model.num_query_groups * (2 if self.norms_projection else 1)
        statistics = saved_statistics(model.normalization, self.wide) if norms else 0
        width = q + 2 * k
        if self.norms_projection:
            width *= 2
        else:
            width += self._gathered if norms or not rotates else 0
            width += q + k if norms or rotates else 0
        return self.compute * width + statistics * (model.num_attention_heads + groups)

    def _core_per_token(self) -> int:
        """What the attention core makes and keeps beside what it reads."""
        model, compute, wide, (q, k) = self.model, self.compute, self.wide, self.widths
        if self.is_plain:
            # one key head: queries that lie in the projection are copied for the product
            lie = not model.qk_layernorm and not self.rotates and model.num_query_groups == 1
            copied = q if lie and model.num_attention_heads > 1 else 0
            return compute * (3 * q + copied) + self._scores_per_token()
        log_sum_exp = wide * model.num_attention_heads
        if self.is_repeated:
            return compute * 3 * q + log_sum_exp
        if self.is_widened:
            return compute * q + wide * (2 * q + 2 * k) + log_sum_exp
        return compute * q + log_sum_exp

    def _saved_per_token(self) -> int:
        model, compute, wide = self.model, self.compute, self.wide
        (q, k), heads, groups = self.widths, model.num_attention_heads, model.num_query_groups
        norms, rotates = model.qk_layernorm, self.rotates
        statistics = (heads + groups) * saved_statistics(model.normalization, wide) if norms else 0
        gathered = self._gathered
        if self.is_plain:
            return self._saved_per_token_plain() + statistics
        statistics += wide * heads  # log-sum-exp
        if self.is_repeated:
            return compute * self._repeated_width() + statistics
        if self.is_widened:
            width = q + (q + 2 * k + gathered if norms else 0)  # the output; inputs of the norms
            # the kernel's own inputs and output
            return compute * width + wide * (2 * q + 2 * k) + statistics
        if self.norms_projection:
            # values have statistics too, which nothing reads
            statistics += groups * saved_statistics(model.normalization, wide)
            return compute * (2 * (q + 2 * k) + q) + statistics
        width = q + 2 * k + q  # the fused projection, kept through its values; the output
        width += gathered if norms or not rotates else 0
        width += q + k if norms or rotates else 0
        return compute * width + statistics

    def _repeated_width(self) -> int:
        """Elements a token that are kept where keys and values are repeated."""
        q, k = self.widths
        width = 4 * q  # queries, repeated keys and values, the output
        if self.model.qk_layernorm:
            return width + q + 2 * k + self._gathered  # inputs of the norms
        if self.model.num_query_groups == 1 and not self.rotates:
            return width + 2 * k  # the projection, in which the queries are read
        return width

    @property
    def _gathered(self) -> int:
        """Elements a token of a copy of the queries, which stand between their groups' keys and
        values: our kernels read them there where nothing else does.
        """
        between = 1 < self.model.num_query_groups < self.model.num_attention_heads
        return self.widths[0] if between and not self.takes_projection else 0

    def _saved_per_token_plain(self) -> int:
        """Where all scores are in memory."""
        model, (q, k) = self.model, self.widths
        heads = model.num_attention_heads
        if model.qk_layernorm:
            # inputs of the norms; queries, repeated keys and values; the output
            width = q + 2 * k + self._gathered + 4 * q
        elif model.num_query_groups == heads and not self.rotates:
            width = q + 2 * k + 3 * q  # one head each: the values stay in the projection
        else:
            width = 4 * q
        return self.compute * width + self._scores_per_token()

    def _scores_per_token(self) -> int:
        """All that has the shape of the scores, where these are in memory."""
        model, dropped = self.model, self.model.attention_dropout > 0
        scores = self.wide  # softmax
        if model.attn_logit_softcapping is not None:
            scores += self.wide  # tanh
        if dropped:
            scores += 1  # mask
        if dropped or self.compute != self.wide:
            scores += self.compute  # the probabilities that multiply the values
        return scores * model.num_attention_heads * self.seq

    def _mask(self) -> int:
        """None when the fused attention is causal and no more, one for each sample with document
        masking. Our kernels have none.
        """
        masked = self.documents or self.gathers or self.model.window_size is not None
        if self.is_ours or self.blocks or not (self.is_plain or masked):
            return 0
        # torch's fused attention turns a boolean mask into numbers that are added to the scores
        element = 1 if self.is_plain else self.wide if self.is_widened else self.compute
        keys = self.seq * self.cp
        queries = self.seq if self.gathers else keys
        return element * queries * keys * (self.samples if self.documents else 1)

    def gradients(self) -> int:
        """Of queries, keys and values apart, then of the projection; where all scores are in
        memory, of probabilities and scores, beside those of the output and the values.
        """
        q, k = self.widths
        if self.blocks:
            return self.seq * self.samples * self.compute * 2 * (q + 2 * k)
        is_one = self.takes_projection and not self.norms_projection
        width = (1 if is_one else 2) * (q + 2 * k) + (2 * q if self.is_repeated else 0)
        per_token = self.compute * width
        if self.is_plain:
            scores = self.wide * self.seq * self.model.num_attention_heads
            per_token = max(per_token, 2 * scores + self.compute * 2 * q)
        return self.seq * self.samples * per_token
