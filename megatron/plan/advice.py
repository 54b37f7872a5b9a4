"""What the numbers mean for a choice: whether communication hides behind computation, and whether memory falls with each stage of ZeRO."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.config.derive import data_parallel_size
from megatron.config.groups import Config
from megatron.plan.memory import RankMemory, rank_memories, with_stage
from megatron.plan.state import precisions

PEAK_TFLOPS, MFU, BANDWIDTH = 989.0, 0.4, 50.0  # H100, a share of its peak that training reaches, GB/s of its 400 Gb/s network adapter


@dataclass(frozen=True)
class Machine:
    """What one rank computes and sends: peak TFLOP/s, the share of it that is reached, GB/s each way."""

    peak_tflops: float = PEAK_TFLOPS
    mfu: float = MFU
    bandwidth: float = BANDWIDTH

    @property
    def flops_per_byte(self) -> float:
        return self.peak_tflops * 1e12 * self.mfu / (self.bandwidth * 1e9)


@dataclass(frozen=True)
class Transfer:
    """Something sent beside computation, and the tokens a micro-batch must have for it to be over in time: bytes / FLOPs of one parameter and token
    x FLOPs a byte; a forward pass computes 2 FLOPs, a backward pass 4."""

    what: str
    tokens_needed: int
    tokens: int
    flag: str  # that helps

    @property
    def hides(self) -> bool:
        return self.tokens >= self.tokens_needed

    def line(self) -> str:
        """One sentence."""
        verdict = "hides" if self.hides else "does not hide"
        needed = f"{self.tokens:,} tokens a micro-batch of {self.tokens_needed:,} needed"
        return f"{self.what} {verdict}: {needed}{'' if self.hides else f'; {self.flag}'}"


def transfers(config: Config, world_size: int, machine: Machine = Machine()) -> list[Transfer]:
    """What the ranks that hold the same parameters send beside computation; nothing where there is one. Latency and other ranks' traffic are not counted."""
    distributed, training, size = config.distributed, config.training, precisions(config)
    replicas = data_parallel_size(config, world_size)
    if replicas == 1:
        return []
    stage, seq, tokens = distributed.zero_stage, config.data.seq_length, training.micro_batch_size * config.data.seq_length
    often = stage >= 2 and training.global_batch_size > training.micro_batch_size * replicas
    gathers = stage == 3 and not distributed.zero3_keep_gathered

    def transfer(what: str, sent: int, flops: int, half: str = "") -> Transfer:
        needed = math.ceil(sent * machine.flops_per_byte / flops)
        flag = half if half and tokens >= needed - math.ceil((size.wire - 2) * machine.flops_per_byte / flops) else f"--micro-batch-size {-(-needed // seq)}"
        return Transfer(what, needed, tokens, f"{flag} helps")

    narrow = "--grad-reduce-in-bf16" if size.wire > 2 else ""
    reduced = "of every micro-batch" if often else "of the last micro-batch"
    if gathers:
        return [transfer("stage 3's gather in the forward pass", size.compute, 2, "" if tokens >= size.compute * machine.flops_per_byte / 2 else ""),
                transfer(f"gather and reduce-scatter {reduced} in the backward pass", size.compute + size.wire, 4, narrow)]
    found = [transfer(f"reduce-scatter {reduced}", size.wire * (2 if stage == 0 else 1), 4, narrow)]
    return found + ([transfer("gather of the new weights in the next forward pass", size.compute, 2)] if stage else [])


@dataclass(frozen=True)
class Order:
    """Memory at the worst moment by stage of ZeRO, on the pipeline rank that needs the most of each; `broken`: why a stage does not need less than
    the one before."""

    totals: list[int]
    broken: list[str]


def order_of_peaks(config: Config, vocab_size: int, world_size: int, device: str = "cuda") -> Order:
    """Whether each stage of ZeRO needs less than the one before on every pipeline rank, and which block prevents it where it does not."""
    stages = [rank_memories(with_stage(config, stage), vocab_size, world_size, device) for stage in range(4)]
    broken = []
    for stage in (1, 2, 3):
        for rank, (before, after) in enumerate(zip(stages[stage - 1], stages[stage], strict=True)):
            if after.total >= before.total:
                where = f" on pipeline rank {rank}" if len(stages[0]) > 1 else ""
                broken.append(f"stage {stage} needs {gib(after.total)} and stage {stage - 1} {gib(before.total)} GiB{where}: {_culprit(after, stage)}")
                break
    return Order([max(rank.total for rank in ranks) for ranks in stages], broken)


def _culprit(rank: RankMemory, stage: int) -> str:
    """The largest block, where what is alive of blocks at the worst moment outweighs what the stage shares out."""
    block, elements = max(rank.blocks, key=lambda block: block.elements), sum(block.elements for block in rank.blocks)
    held = "gathered" if stage == 3 else "its gradient whole"
    return f"{block.name} is {block.elements / elements:.0%} of what the rank holds, and {held} at the worst moment ({rank.peak.when})"


def gib(size: int) -> str:
    """Three digits of GiB."""
    return f"{size / 2**30:.3g}"
