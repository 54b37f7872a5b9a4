"""Pretrain with a transformer layer that has an adapter behind it; takes all flags."""

import sys

import torch.nn.functional as F
from torch import Tensor, nn

import pretrain_gpt
from megatron.config.groups import ModelConfig
from megatron.model.gpt import GPTModel
from megatron.model.layer import MicroBatch, TransformerLayer, WithScalars
from megatron.model.model_parallel import ModelParallel
from megatron.model.spec import declare_grad_sum

WIDTH = 8


class Adapter(nn.Module):
    """x [s, b, h] -> [s, b, h] through a bottleneck, made of torch's own modules."""

    def __init__(self, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.up = nn.Linear(WIDTH, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(F.gelu(self.down(self.norm(x))))


class AdaptedLayer(TransformerLayer):
    """The transformer layer, and an adapter that is added to its output."""

    def __init__(self, config: ModelConfig, seed: int, index: int, parallel: ModelParallel):
        super().__init__(config, seed, index, parallel)
        self.adapter = Adapter(config.hidden_size)
        # Every tensor-parallel rank holds the adapter. Under sequence parallelism each applies it
        # to its part of the sequence, so gradients are summed over the ranks.
        declare_grad_sum(self.adapter, parallel.tp.sequence)

    def forward(self, x: Tensor, micro: MicroBatch) -> Tensor | WithScalars:
        y = super().forward(x, micro)
        if isinstance(y, WithScalars):  # a layer with experts, in training
            return y._replace(output=y.output + self.adapter(y.output))
        return y + self.adapter(y)


if __name__ == "__main__":
    GPTModel.layer_class = AdaptedLayer
    sys.exit(pretrain_gpt.main())
