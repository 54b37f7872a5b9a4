"""The layers a model is made of: word embedding, transformer layers, head. s sequence, b batch, h
hidden, v vocabulary.

Each layer owns the parameters of its flat buffers (parallel/blocks.py). Learned positions belong to
the first transformer layer and the final norm to the last, so embedding and head hold one matrix
each. parallel/pipeline.py runs them, through parallel/layer_runner.py.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.config.groups import ModelConfig
from megatron.config.layers import layer_records, windows_of
from megatron.model.attention.attention import Seen, SelfAttention
from megatron.model.attention.context_parallel import Places
from megatron.model.attention.latent_attention import LatentAttention
from megatron.model.attention.rotary import Rotary
from megatron.model.dropout import Dropout, DropoutState
from megatron.model.embedding import Embedding
from megatron.model.experts.moe import MoE, Routing, aux_outputs
from megatron.model.experts.router import AUX_LOSS
from megatron.model.linear import column_function
from megatron.model.loss import cross_entropy, linear_cross_entropy, sharded_cross_entropy
from megatron.model.mlp import MLP, TiledMLP
from megatron.model.model_parallel import ONE_RANK, ModelParallel, TensorParallel
from megatron.model.norm import AddNorm
from megatron.model.recompute import NO_RECOMPUTE, LayerRecompute, always_rebuilt
from megatron.model.recompute_context import ParkedTensors, RecomputeContext
from megatron.model.spec import ParameterSpec, Shard, matrix, normal, spec_of, whole_on_every_rank


@dataclass(frozen=True)
class MicroBatch:
    """What every layer may read of one micro-batch; sequence first."""

    training: bool  # else an evaluation: nothing is dropped
    tokens: Tensor  # [s, b]
    labels: Tensor  # [s, b]
    loss_mask: Tensor  # [s, b]
    # [s, b]; under sequence parallelism this rank's part, as the hidden states are
    position_ids: Tensor
    # what attention sees, for each of the different windows of the layers (`windows_of`)
    seen: tuple[Seen, ...]
    rotary: Rotary | None
    dropout: DropoutState | None  # in training, of the whole sequence
    hidden_dropout: DropoutState | None  # under sequence parallelism of this rank's part
    # under context parallelism; all else is of the positions that this rank holds
    places: Places | None = None
    # [s] positions in the sample of the hidden states that this rank holds
    token_index: Tensor | None = None
    # by layer, where its forward pass comes twice: where tokens went in the first
    routings: dict[int, Routing] = field(default_factory=dict)


def vocabulary_matrix(
    config: ModelConfig, vocab_size: int, padded_vocab: int, *, head: bool = False
) -> ParameterSpec:
    """The matrix [v, h] of the word embedding, or of the `head`, if it is another one."""
    tied = not config.untie_embeddings_and_output_weights
    name = "head" if head and not tied else "embedding.word"
    return matrix(
        f"{name}.weight",
        (vocab_size, config.hidden_size),
        normal(config),
        is_gemm=False,
        shard=Shard(0),
        # Tied: the first and the last pipeline stage hold copies, whose gradients are summed.
        copies="tied" if tied else None,
        grad_sum=tied,
        stored=padded_vocab,
        decoupled_lr=True,
    )


@functools.lru_cache  # a search for a layout asks thousands of times
def layer_parameters(config: ModelConfig, index: int) -> dict[str, ParameterSpec]:
    """All parameters of a transformer layer by their names in it, in the order of its buffer."""
    layer = TransformerLayer(config, 0, index)
    named = layer.named_parameters()
    return {name: spec_of(name, parameter, config) for name, parameter in named}


def representative_layer(config: ModelConfig, index: int) -> int:
    """The first layer whose record is that of layer `index`."""
    records = layer_records(config)
    return records.index(records[index])


@dataclass(frozen=True)
class ScalarSpec:
    """A number that layers return alongside their output: a sum over the tokens of a micro-batch,
    as the loss is, added up over all layers that return one of this name. Metrics divide it by all
    tokens of the step, masked ones included. `size`: several numbers are counts, for
    update_routers.
    """

    name: str
    in_objective: bool = False  # differentiated along with the loss, as an auxiliary loss is
    # each tensor-parallel rank returns a part of the sum, as under sequence parallelism
    is_part: bool = False
    size: int = 1


class WithScalars(NamedTuple):
    """What a layer may return in place of its output."""

    output: Tensor
    scalars: dict[str, Tensor]  # by the names of the layer's `scalars`; 0-dimensional, or [size]


class Layer(nn.Module):
    """What the executor runs: x [s, b, h] (None for the embedding) -> output or WithScalars."""

    recomputes = False  # whether it supports recomputation
    recompute: LayerRecompute = NO_RECOMPUTE  # what its backward pass recomputes
    offloaded: frozenset[str] = frozenset()  # modules whose inputs wait for it on the host
    splits_backward = False  # a split backward pass leaves its weight gradients for later
    reads_weight_backward = True
    of_vocabulary = False  # its matrix may be far larger than those of other layers

    def choose_recompute(self, choice: LayerRecompute) -> None:
        """What backward passes compute again, from the next forward pass on."""
        self.recompute = choice


class EmbeddingLayer(Layer):
    """Token ids -> [s, b, h]."""

    reads_weight_backward = False
    of_vocabulary = True

    def __init__(self, table: ParameterSpec, tp: TensorParallel):
        super().__init__()
        self.word = Embedding(table, tp)

    def forward(self, _: None, micro: MicroBatch) -> Tensor:
        return self.word(micro.tokens)


# Where activations are offloaded: the names under which a module of a transformer layer has its
# inputs filed, and what comes behind it (None: as before; additions and dropout under no name), see
# RecomputeContext.parking.
FILED_UNDER: dict[str, tuple[str, str | None]] = {
    "input_norm": ("attn_norm", None),
    "attention": ("qkv_linear", ""),
    "attention.qkv": ("qkv_linear", "core_attn"),  # norms and rotation read what the core reads
    "attention.core": ("core_attn", None),
    "attention.proj": ("attn_proj", None),
    "mlp_norm": ("mlp_norm", None),
    "mlp": ("mlp_fc1", ""),  # an MLP that is recomputed saves its input before it calls fc1
    "mlp.fc1": ("mlp_fc1", "mlp_act"),
    "mlp.fc2": ("mlp_fc2", None),
    # of experts the shared one alone
    "mlp.shared_expert": ("mlp_fc1", ""),
    "mlp.shared_expert.fc1": ("mlp_fc1", "mlp_act"),
    "mlp.shared_expert.fc2": ("mlp_fc2", None),
    "mlp.shared_expert_gate": ("mlp_fc1", ""),  # saves a number a token more
    "final_norm": ("final_norm", None),
}


class TransformerLayer(Layer):
    """One transformer layer, [s, b, h] -> [s, b, h] (under SP this rank's part of s)."""

    recomputes = splits_backward = True

    def __init__(
        self,
        config: ModelConfig,
        seed: int,
        index: int,
        parallel: ModelParallel = ONE_RANK,
    ):
        super().__init__()
        self.config = config
        self.record = record = layer_records(config)[index]
        self.rotates = record.rotary
        self.window_number = windows_of(config).index(record.window)

        def norm(name: str) -> AddNorm:
            return AddNorm(config, name, config.hidden_size, grad_sum=parallel.tp.sequence)

        def dropout(*names: object) -> Dropout:
            return Dropout(config.hidden_dropout, seed, *names, backend=config.dropout_backend)

        self.drops = config.hidden_dropout > 0
        self.position = self._learned_positions(parallel.tp)
        self.embedding_dropout = None
        if record.first and self.drops:
            self.embedding_dropout = dropout("embedding.dropout")
        self.input_norm = norm(f"layers.{index}.input_norm")
        attention = LatentAttention if record.latent else SelfAttention
        self.attention = attention(config, seed, index, parallel)
        self.attention_output_dropout = dropout("layers", index, "attention.output_dropout")
        self.mlp_norm = norm(f"layers.{index}.mlp_norm")
        self.mlp = self._make_mlp(seed, index, parallel)
        self.mlp_output_dropout = dropout("layers", index, "mlp.output_dropout")
        self.final_norm = norm("final_norm") if record.last else None
        self.recompute_context = RecomputeContext()
        self.choose_recompute(NO_RECOMPUTE)

    def _make_mlp(self, seed: int, index: int, parallel: ModelParallel) -> MLP | MoE:
        config = self.config
        if self.record.experts:
            return MoE(config, seed, index, parallel)
        mlp = TiledMLP if config.tiled_mlp > 1 else MLP
        return mlp(config, f"layers.{index}.mlp", parallel.tp)

    def _learned_positions(self, tp: TensorParallel) -> Embedding | None:
        """The table of learned positions, in the first layer, if any, whole on every rank."""
        config = self.config
        if not self.record.first or config.position_embedding_type != "learned_absolute":
            return None
        # A hook, so that --torch-compile can compile `forward`: the table's gradient is added
        # to main_grad, which no compiled graph sees.
        self.register_forward_pre_hook(_add_positions)
        table = matrix(
            "embedding.position.weight",
            (config.max_position_embeddings, config.hidden_size),
            normal(config),
            is_gemm=False,
            **whole_on_every_rank(tp),
        )
        return Embedding(table)

    @classmethod
    def scalars(cls, config: ModelConfig, index: int, sequence: bool) -> tuple[ScalarSpec, ...]:
        """What layer `index` returns alongside its output, on every rank the same."""
        if not layer_records(config)[index].experts:
            return ()
        return tuple(
            # under SP each rank sums over its part of the sequence
            ScalarSpec(name, in_objective=name == AUX_LOSS, is_part=sequence, size=size)
            for name, size in aux_outputs(config, index)
        )

    def choose_recompute(self, choice: LayerRecompute) -> None:
        super().choose_recompute(choice)
        modules = choice.modules | always_rebuilt(self.config)
        self.recompute_context.wrap(self, modules, (self.input_norm, self.mlp_norm))

    def parking(self) -> AbstractContextManager[ParkedTensors]:
        """Around a forward pass: the tensors that it saves."""
        modules = dict(self.named_modules())
        filed = FILED_UNDER | ({"mlp": ("", "")} if self.record.experts else {})
        return self.recompute_context.parking(
            (modules[path], *names) for path, names in filed.items() if path in modules
        )

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor | WithScalars:
        """x + attention(norm(x)), then that + mlp(norm(that)); without dropout the MLP's norm and
        the final norm add the residual. The first layer drops out the embedding (`_add_positions`
        adds learned positions), the last ends with the final norm. --torch-compile compiles this.
        """
        stream = x
        # None where nothing is dropped: then the norms' kernels add the residual themselves
        drop = micro.hidden_dropout if self.drops else None
        if self.embedding_dropout is not None:
            stream = self.embedding_dropout.hidden(stream, drop)

        # attention
        branch, stream = self.input_norm(stream)
        rotary = micro.rotary if self.rotates else None
        seen = micro.seen[self.window_number]
        branch = self.attention(branch, rotary, seen, micro.dropout)

        # residual connection, and the norm in front of the MLP
        if drop is None:
            branch, stream = self.mlp_norm(branch, stream)
        else:
            branch, stream = self.mlp_norm(self.attention_output_dropout.add(branch, stream, drop))

        # MLP; experts also return the numbers that the loss and the metrics need
        scalars: dict[str, Tensor] = {}
        if isinstance(self.mlp, MoE):
            branch, scalars = self.mlp(branch, micro, self.recompute.whole)
        else:
            branch = self.mlp(branch)

        # residual connection; behind the last layer the final norm, the only reader of the stream
        if drop is not None:
            y = self.mlp_output_dropout.add(branch, stream, drop)
            y = y if self.final_norm is None else self.final_norm(y)[0]
        elif self.final_norm is None:
            y = stream + branch
        else:
            y, _ = self.final_norm(branch, stream)
        return WithScalars(y, scalars) if scalars else y


def _add_positions(layer: TransformerLayer, inputs: tuple[Tensor, MicroBatch]) -> tuple[Any, ...]:
    """A forward pre-hook of the first layer: adds the learned positions to its input [s, b, h]."""
    x, micro = inputs
    return x + layer.position(micro.position_ids), micro


OBJECTIVE_SUM, REPORTED_SUM = 0, 1  # places in the output of HeadLayer


class HeadLayer(Layer):
    """[s, b, h] -> logits -> sums of the loss over unmasked tokens, on every tensor-parallel rank.
    `weight`: its own or, tied, the word embedding's.
    """

    of_vocabulary = True

    def __init__(
        self, config: ModelConfig, vocab_size: int, weight: nn.Parameter, tp: TensorParallel
    ):
        super().__init__()
        self.config, self.vocab_size, self.tp = config, vocab_size, tp
        self.weight = weight
        self.project = column_function(tp)
        self.cross_entropy = sharded_cross_entropy(
            self.weight.shape[0],
            vocab_size,
            config.final_logit_softcapping,
            tp,
            config.cross_entropy_backend,
        )

    def logits(self, x: Tensor) -> Tensor:
        """[s, b, h] -> soft-capped logits [s, b, v] of the real vocabulary; not under TP."""
        # For generation and comparisons: all columns are here.
        assert self.tp.size == 1
        cap = self.config.final_logit_softcapping
        z = self.project(x, self.weight, None, self.tp)[..., : self.vocab_size]
        return z if cap is None else cap * torch.tanh(z / cap)

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor:
        """Sums over unmasked tokens [2]: the objective (with z-loss in training) and the loss."""
        if self.config.fused_linear_cross_entropy:
            loss, lse = linear_cross_entropy(x, self.weight, micro.labels, self.cross_entropy)
        else:
            logits = self.project(x, self.weight, None, self.tp)
            loss, lse = cross_entropy(logits, micro.labels, self.cross_entropy)
        # Sums over tokens, not means: the step scales all of them alike, however tokens are masked.
        mask = micro.loss_mask.to(loss.dtype)
        reported = (loss.detach() * mask).sum()
        objective = (loss * mask).sum()
        if self.config.z_loss_coeff > 0 and micro.training:
            # z-loss (PaLM): keeps log Z near 0; in training alone
            objective = objective + self.config.z_loss_coeff * (lse.square() * mask).sum()
        return torch.stack([objective, reported])
