"""What a rank of a job builds at its start, without other processes and without memory."""

from __future__ import annotations

import torch
from megatron.tools._plan.silent import SilentGroup

from megatron.config.groups import Config
from megatron.distributed.groups import Groups, build_groups, group_options, layout_of
from megatron.model.build import build_model
from megatron.model.gpt import GPTModel
from megatron.parallel.blocks import Block, build_run_blocks

META = torch.device("meta")


def build_rank(
    config: Config, vocabulary: int, world: int, rank: int = 0
) -> tuple[Groups, GPTModel, list[Block]]:
    """Groups that send nothing, and the model and its blocks on the meta device."""
    groups = build_groups(
        layout_of(config, world),
        rank,
        lambda *_, **__: SilentGroup(gloo=True),
        **group_options(config),
    )
    model = build_model(config, vocabulary, groups, META)
    return groups, model, build_run_blocks(config, model, META, groups)
