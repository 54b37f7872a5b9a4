"""The GPT model, or the stages of it that one pipeline rank holds: the layers of each stage in
order, which parallel/pipeline.py runs. s sequence, b batch, h hidden, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.groups import ModelConfig, TrainingConfig
from megatron.config.layers import windows_of
from megatron.model.attention.attention import seen_by_queries
from megatron.model.attention.context_parallel import Places
from megatron.model.attention.rotary import RotaryTables
from megatron.model.dropout import DropoutState
from megatron.model.experts.moe import MoE, expert_tokens
from megatron.model.layer import (
    EmbeddingLayer,
    HeadLayer,
    Layer,
    MicroBatch,
    ScalarSpec,
    TransformerLayer,
    vocabulary_matrix,
)
from megatron.model.model_parallel import ONE_RANK, ModelParallel
from megatron.model.recompute import stage_offload, stage_recompute
from megatron.model.spec import ParameterSpec, spec_of
from megatron.model.stages import Stage, whole


def layer_names(config: ModelConfig) -> list[str]:
    """The units of a whole model, as `GPTModel.named_layers` names those of one rank."""
    return ["embedding", *(f"layers.{i}" for i in range(config.num_layers)), "head"]


class GPTModel(nn.Module):
    """Decoder-only transformer. Parameters are born on the meta device; parallel/blocks.py gives
    them storage, model/init.py values.

    `config` is resolved (no None among its sizes), `vocab_size` the real vocabulary, `padded_vocab`
    the rows of its matrices over all ranks, `stages` those that this rank holds, in order (None:
    the whole model). A tied head apart from the embedding has a copy of its matrix.
    """

    # of all transformer layers; a program with another one sets it before it starts a run
    layer_class: type[TransformerLayer] = TransformerLayer

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        padded_vocab: int,
        dtype: torch.dtype,
        seed: int,
        parallel: ModelParallel = ONE_RANK,
        stages: tuple[Stage, ...] | None = None,
    ):
        super().__init__()
        self.config, self.dtype, self.vocab_size = config, dtype, vocab_size
        self.parallel = parallel
        self.tp, self.cp = parallel.tp, parallel.cp
        self.windows = windows_of(config)
        # Embedding and head exist on ranks that hold their stage.
        stages = whole(config) if stages is None else stages
        self.embedding = None
        if any(stage.embedding for stage in stages):
            table = vocabulary_matrix(config, vocab_size, padded_vocab)
            self.embedding = EmbeddingLayer(table, self.tp)
        self.layers = nn.ModuleDict(
            {
                str(i): self.layer_class(config, seed, i, parallel)
                for stage in stages
                for i in stage.layers
            }
        )
        self.head = None
        if any(stage.head for stage in stages):
            self.head = self._make_head(padded_vocab)
        # One table serves all layers of a micro-batch.
        self.rotary = RotaryTables(config, dtype) if config.is_rotary else None
        self.stages = stages
        self.layers_by_stage = [self._layers_of(stage) for stage in stages]
        self.scalars = self._scalars()

    def _make_head(self, padded_vocab: int) -> HeadLayer:
        config, vocab_size = self.config, self.vocab_size
        if config.untie_embeddings_and_output_weights or self.embedding is None:
            table = vocabulary_matrix(config, vocab_size, padded_vocab, head=True)
            weight = table.parameter(self.tp)
        else:  # tied, and this rank has both ends
            weight = self.embedding.word.weight
        return HeadLayer(config, vocab_size, weight, self.tp)

    def _scalars(self) -> tuple[ScalarSpec, ...]:
        """What the layers of the whole model return alongside their output, the same on every rank.
        Layers that return a number of the same name share its sum.
        """
        config, sequence = self.config, self.tp.sequence
        each = (self.layer_class.scalars(config, i, sequence) for i in range(config.num_layers))
        return tuple(dict.fromkeys(chain.from_iterable(each)))

    def _layers_of(self, stage: Stage) -> list[tuple[str, Any]]:
        """The named layers of a stage."""
        names = [f"layers.{i}" for i in stage.layers]
        if stage.embedding:
            names.insert(0, "embedding")
        if stage.head:
            names.append("head")
        return [(name, self.get_submodule(name)) for name in names]

    def choose_recompute(self, training: TrainingConfig) -> None:
        """Choose what backward passes recompute, and what waits on the host for them."""
        for stage, named in zip(self.stages, self.layers_by_stage, strict=True):
            layers = [layer for _, layer in named if layer.recomputes]
            choices = stage_recompute(training, stage.layers)
            offloaded = stage_offload(training, self.config, stage.layers)
            for layer, choice, modules in zip(layers, choices, offloaded, strict=True):
                layer.choose_recompute(choice)
                layer.offloaded = modules

    def declared(self) -> list[tuple[str, nn.Parameter, ParameterSpec]]:
        """Every parameter by name with its declaration, in order; a tied head adds none."""
        named = self.named_parameters()
        return [(name, each, spec_of(name, each, self.config)) for name, each in named]

    def named_layers(self) -> list[tuple[str, Layer]]:
        """Named layers in the order of the forward pass, embedding and head among them."""
        return [each for named in self.layers_by_stage for each in named]

    def micro_batch(
        self,
        tokens: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        position_ids: Tensor,
        sample_ids: Tensor,
        document_starts: Tensor | None = None,
        places: Tensor | None = None,
        *,
        training: bool,
    ) -> MicroBatch:
        """What layers read, of a loader's [b, s] tensors; sample_ids [b] number the run's samples.
        Under CP the first four are of this rank's positions, and `places` [C, s / C] of all ranks.
        """
        # sequence first, as all activations are
        tokens, labels, loss_mask, position_ids = (
            x.t().contiguous() for x in (tokens, labels, loss_mask, position_ids)
        )
        held = None if places is None else Places.of(places, self.cp)
        # Dropout counts positions in the whole sample, whatever part of it this rank holds.
        length = tokens.shape[0] * self.cp.size
        token_index = torch.arange(length, device=tokens.device) if held is None else held.own
        hidden_positions = slice(None)  # of the hidden states that this rank holds
        if self.tp.sequence:
            # Under SP a rank has an equal part of the sequence between attention and MLP. Masks of
            # hidden dropout and learned positions are of that part, attention sees the whole.
            part = tokens.shape[0] // self.tp.size
            first = self.tp.axis.rank * part
            hidden_positions = slice(first, first + part)
        return MicroBatch(
            training=training,
            tokens=tokens,
            labels=labels,
            loss_mask=loss_mask,
            position_ids=position_ids[hidden_positions],
            seen=tuple(
                seen_by_queries(self.config, window, length, document_starts, self.cp, held)
                for window in self.windows
            ),
            rotary=None if self.rotary is None else self.rotary.table(position_ids),
            dropout=DropoutState(sample_ids, token_index) if training else None,
            hidden_dropout=(
                DropoutState(sample_ids, token_index[hidden_positions]) if training else None
            ),
            places=held,
            token_index=token_index[hidden_positions],
        )

    @torch.no_grad()
    def update_routers(self, counts: Mapping[str, Tensor], skipped: Tensor) -> None:
        """After a step: give this rank's routers how many tokens of the whole batch each expert
        had, by the names of `scalars`, summed over all ranks. `skipped`: 1 for a skipped step, else
        0.
        """
        for layer in self.layers.values():
            if isinstance(mlp := layer.mlp, MoE):
                # The last count is of choices beyond an expert's capacity.
                mlp.router.update(counts[expert_tokens(mlp.index)][:-1], 1 - skipped)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [b, s, v] of sequences of tokens [b, s], without dropout."""
        b, s = tokens.shape
        positions = torch.arange(s, device=tokens.device).expand(b, s)
        micro = self.micro_batch(tokens, tokens, tokens, positions, positions[:, 0], training=False)
        x = None
        for unit in (self.embedding, *self.layers.values()):
            x = unit(x, micro)  # in evaluation there are no auxiliary outputs
        return self.head.logits(x).transpose(0, 1)
