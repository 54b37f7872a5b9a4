"""The GPT model: a word embedding, transformer layers and a head, run unit by unit. s sequence, b batch, h hidden, v vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.config.groups import ModelConfig
from megatron.layers.dropout import DropoutState
from megatron.layers.rotary import rotary_table
from megatron.layers.tensor_parallel import DENSE, TensorParallel
from megatron.model.block import BlockWrapper, EmbeddingBlock, HeadBlock, LayerBlock, MicroBatch


class GPTModel(nn.Module):
    """Decoder-only transformer. Parameters are born on the meta device; `optimizer.blocks` gives them storage, `model.init` values.

    `config` is resolved (no None among its sizes), `vocab_size` the real vocabulary, `padded_vocab` the rows of its matrices over all ranks.
    """

    def __init__(self, config: ModelConfig, *, vocab_size: int, padded_vocab: int, dtype: torch.dtype, seed: int, tp: TensorParallel = DENSE):
        super().__init__()
        self.config, self.dtype, self.vocab_size, self.tp = config, dtype, vocab_size, tp
        self.embedding = EmbeddingBlock(config, padded_vocab, tp)
        self.layers = nn.ModuleList(LayerBlock(config, seed, i, tp) for i in range(config.num_layers))
        self.head = HeadBlock(config, vocab_size, padded_vocab, self.embedding.word.weight, tp)

    def units(self) -> list[tuple[str, nn.Module]]:
        """Named units in the order of the forward pass."""
        return [("embedding", self.embedding), *((f"layers.{i}", layer) for i, layer in enumerate(self.layers)), ("head", self.head)]

    def micro_batch(self, tokens: Tensor, labels: Tensor, loss_mask: Tensor, position_ids: Tensor, sample_ids: Tensor,
                    document_starts: Tensor | None = None, *, training: bool) -> MicroBatch:
        """Turn a loader's [b, s] tensors into what the units read; sample_ids [b] number the run's samples."""
        tokens, labels, loss_mask, position_ids = (x.t().contiguous() for x in (tokens, labels, loss_mask, position_ids))
        rotates = self.config.position_embedding_type in ("rope", "yarn")
        token_index = torch.arange(tokens.shape[0], device=tokens.device)
        own = slice(None)  # the positions of the hidden states that this rank holds
        if self.tp.sequence:
            part = tokens.shape[0] // self.tp.size
            own = slice(self.tp.axis.rank * part, (self.tp.axis.rank + 1) * part)
        return MicroBatch(
            tokens=tokens, labels=labels, loss_mask=loss_mask, position_ids=position_ids[own], document_starts=document_starts,
            rotary=rotary_table(self.config, position_ids, self.dtype) if rotates else None,
            dropout=DropoutState(sample_ids, token_index) if training else None,
            hidden_dropout=DropoutState(sample_ids, token_index[own]) if training else None,
        )

    def forward(self, micro: MicroBatch, wrapper: BlockWrapper) -> tuple[Tensor, list[Any]]:
        """The head's output [objective sum, reported loss sum] and what each unit saved for its backward."""
        x, saved = None, []
        for _, unit in self.units():
            x, kept = wrapper.forward(unit, x, micro)
            saved.append(kept)
        return x, saved

    def backward(self, saved: list[Any], scale: float, wrapper: BlockWrapper) -> None:
        """Add d(scale x objective) of one micro-batch into every parameter's main_grad; `saved` is consumed."""
        dy = None
        for _, unit in reversed(self.units()):
            kept = saved.pop()
            if dy is None:
                weight = self.head.weight
                dy = torch.tensor([scale, 0.0], dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
            dy = wrapper.backward(unit, kept, dy)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [b, s, v] of whole sequences of tokens [b, s], without dropout: for generation and comparisons."""
        b, s = tokens.shape
        positions = torch.arange(s, device=tokens.device).expand(b, s)
        micro = self.micro_batch(tokens, tokens, tokens, positions, positions[:, 0], training=False)
        x = None
        for unit in (self.embedding, *self.layers):
            x = unit(x, micro)
        return self.head.logits(x).transpose(0, 1)
