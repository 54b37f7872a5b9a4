"""NCCL's own buffers on a GPU: an estimate alongside the plan's sum, of what its reserve is for."""

from __future__ import annotations

from typing import NamedTuple

from megatron.config.groups import Config
from megatron.distributed.groups import build_groups, group_options, layout_of
from megatron.distributed.setup import MESSAGE_CTAS

# Of one channel of a ring within a node, by NCCL 2.30's source (init.cc, transport/p2p.cc): buffers
# for each of its three protocols where a rank receives, records where it sends, in pages of 2 MiB.
# NVIDIA/nccl issue 1685 shows allocations of these sizes.
PAGE = 2 << 20
LL = 8 * 512 * 8 * 16  # lines of a thread, threads, steps, bytes of a line
LL128 = 120 * 640 * 8 * 8  # elements of a thread, threads, steps, bytes of an element
SIMPLE = 4 << 20  # NCCL_BUFFSIZE
CHANNEL_BYTES = -(-(LL + LL128 + SIMPLE) // PAGE) * PAGE + PAGE
# NCCL chooses by the links that it finds: its logs of H100s on several nodes show 16 (issues 1453
# and 1538), and 24 within a node (1259). NCCL_MAX_CTAS makes it fewer.
CHANNELS = 16


class NcclBuffers(NamedTuple):
    """What a rank's communicators take, if all are used: NCCL makes buffers at the first use."""

    communicators: int
    bytes: int

    def line(self) -> str:
        """One sentence."""
        return (
            f"in addition NCCL's buffers, about {self.bytes / 2**30:.2g} GiB (assumed: "
            f"{self.communicators} communicators, {CHANNELS} channels each and {MESSAGE_CTAS} for "
            f"messages between stages, {CHANNEL_BYTES >> 20} MiB a channel)"
        )


def nccl_buffers(config: Config, world_size: int) -> NcclBuffers:
    """Of the rank with all coordinates 0, which is in a group of each axis."""
    uses: list[str] = []

    def new_group(ranks: tuple[int, ...], group_desc: str) -> None:
        uses.append(group_desc)

    layout = layout_of(config, world_size)
    build_groups(layout, 0, new_group, own_only=True, **group_options(config))
    channels = [MESSAGE_CTAS if use.startswith("channel") else CHANNELS for use in uses]
    return NcclBuffers(len(uses), sum(channels) * CHANNEL_BYTES)
