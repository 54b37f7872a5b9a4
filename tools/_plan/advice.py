"""What the numbers mean for a choice: whether communication hides behind computation, and whether
memory falls with each stage of ZeRO.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from megatron.tools._plan.activations import Shape, leaving_bytes
from megatron.tools._plan.memory import MemoryPlan, RankMemory, stage_expert_parameters
from megatron.tools._plan.state import precisions, shard_size

from megatron.config.derive import data_parallel_size, expert_ranks, replica_count
from megatron.config.groups import Config, TrainingConfig
from megatron.model.arithmetic import unit_flops, unit_parameters
from megatron.model.recompute import stage_offload, stage_recompute
from megatron.model.stages import pipeline_stages

# H100, a share of its peak that training reaches, GB/s of its 400 Gb/s network adapter
PEAK_TFLOPS = 989.0
MFU = 0.4
BANDWIDTH = 50.0
# GB/s from pinned host memory over PCI Express 5.0 x16: assumed, of 63 there are
HOST_BANDWIDTH = 50.0


@dataclass(frozen=True)
class Machine:
    """What one rank computes and sends: peak TFLOP/s, the share of it that is reached, GB/s each
    way; and GB/s from its host's memory.
    """

    peak_tflops: float = PEAK_TFLOPS
    mfu: float = MFU
    bandwidth: float = BANDWIDTH
    host_bandwidth: float = HOST_BANDWIDTH

    def __str__(self) -> str:
        return f"{self.bandwidth:g} GB/s a rank and {self.mfu:.0%} of {self.peak_tflops:g} TFLOP/s"

    def flops_per_byte(self, *, host: bool = False) -> float:
        """Of a byte that is sent, or that comes from the host."""
        return (
            self.peak_tflops
            * 1e12
            * self.mfu
            / ((self.host_bandwidth if host else self.bandwidth) * 1e9)
        )


@dataclass(frozen=True)
class Transfer:
    """Something sent alongside computation, and the tokens a micro-batch must have for it to be
    over in time.
    """

    what: str
    tokens_needed: int
    tokens: int
    flags: str  # that help

    @property
    def hides(self) -> bool:
        return self.tokens >= self.tokens_needed

    def line(self) -> str:
        """One sentence."""
        verdict = "hides" if self.hides else "does not hide"
        needed = f"{self.tokens:,} tokens a micro-batch of {self.tokens_needed:,} needed"
        return f"{self.what} {verdict}: {needed}{'' if self.hides else f'; {self.flags} helps'}"


def _accumulates(config: Config, world_size: int) -> bool:
    """Whether a step has several micro-batches."""
    training = config.training
    return training.global_batch_size > (
        training.micro_batch_size * data_parallel_size(config, world_size)
    )


def transfers(config: Config, world_size: int, machine: Machine = Machine()) -> list[Transfer]:
    """What the ranks that hold the same parameters send alongside computation, nothing where there
    is one; and weights that come from host memory.

    A transfer hides when its bytes take no longer than the FLOPs alongside it: 2 for each parameter
    and token in a forward pass, 4 in a backward pass (6 where every layer is recomputed). Latency
    and what else is on the wire are not counted.
    """
    size = precisions(config)
    stage = config.distributed.zero_stage
    replicas = replica_count(config, world_size)
    shard = shard_size(config, world_size)
    backward = _backward_flops(config.training)
    accumulates = _accumulates(config, world_size)
    gathers = stage == 3 and not config.distributed.zero3_keep_gathered
    weight = _sent_for_each_active(config, world_size)
    transfer = partial(_transfer, config, machine, gathers and accumulates, weight)
    gather = partial(transfer, sent=size.compute, flops=2)
    often = f"of {'every' if stage >= 2 and accumulates else 'the last'} micro-batch"
    found = []
    if stage == 3 and config.optimizer.param_cpu_offload:
        where = f"host memory ({machine.host_bandwidth:g} GB/s)"
        what = f"copy of the weights from {where} in a forward pass"
        found.append(transfer(what, size.compute / shard, 2, host=True))
    if replicas == 1 or (stage and shard == 1):
        return found
    if gathers:
        both = f"gather and reduce-scatter {often} in its backward pass"
        return [
            *found,
            gather("gather of the weights in a forward pass"),
            transfer(both, size.compute + size.wire, backward, size.compute + 2),
        ]
    if stage == 0:  # there and back
        return [*found, transfer(f"reduction {often}", 2 * size.wire, backward, 4)]
    return [
        *found,
        transfer(f"reduce-scatter {often}", size.wire, backward, 2),
        gather("gather of the new weights in the next forward pass"),
    ]


@dataclass(frozen=True)
class HostCopy:
    """What a layer sends to the host in a forward pass, and the time alongside it: bytes, seconds
    of the copy and of the next layer's forward pass.
    """

    size: int
    seconds: float
    window: float
    host_bandwidth: float

    @property
    def hides(self) -> bool:
        return self.seconds <= self.window

    def line(self) -> str:
        """One sentence."""
        text = (
            f"copy of a layer's activations to host memory ({self.host_bandwidth:g} GB/s) "
            f"{'hides' if self.hides else 'does not hide'}: {gib(self.size)} GiB take "
            f"{self.seconds * 1e3:.3g} ms alongside {self.window * 1e3:.3g} ms of the next layer's "
            "forward pass"
        )
        return text if self.hides else f"{text}; fewer --offload-modules helps"


def host_copies(config: Config, machine: Machine = Machine()) -> list[HostCopy]:
    """The largest that a layer sends, of one micro-batch, if any does."""
    shape = Shape(config, 0)
    layers = range(config.model.num_layers)
    kinds = set(
        zip(
            stage_recompute(config.training, layers),
            stage_offload(config.training, config.model, layers),
            strict=True,
        )
    )
    found = [leaving_bytes(shape, 1, choice, modules) for choice, modules in kinds]
    size = max((leaving.total for leaving in found if leaving is not None), default=0)
    if not size:
        return []
    flops = shape.tokens * unit_flops(shape.model, config.data.seq_length, 0)[1]
    window = flops / (machine.peak_tflops * 1e12 * machine.mfu)
    host = machine.host_bandwidth
    return [HostCopy(size, size / (host * 1e9), window, host)]


def _sent_for_each_active(config: Config, world_size: int) -> float:
    """Parameters of a rank's layers that are sent, for each that a token goes through: 1 without
    experts, of which a token has a few, and which are sent where other ranks hold the same ones.
    """
    model = config.model
    if model.num_experts is None:
        return 1.0
    tp, ranks = config.distributed.tensor_model_parallel_size, expert_ranks(config)
    layers = unit_parameters(model, 0, tp, ranks)[1:-1]
    stages = pipeline_stages(config, 0)
    experts = sum(stage_expert_parameters(config, stages))
    dense = sum(layers) - experts
    held = math.prod(ranks)  # by that many ranks together
    copied = tp * replica_count(config, world_size) > held
    share = model.moe_router_topk * held / (model.num_experts * tp)
    return (dense + experts * copied) / (dense + experts * share)


def _backward_flops(training: TrainingConfig) -> int:
    """FLOPs for each parameter and token that overlap with a layer's gradients at least."""
    whole = training.recompute_granularity == "full" and training.recompute_method != "block"
    return 6 if whole else 4


def _transfer(
    config: Config,
    machine: Machine,
    keeping_helps: bool,
    weight: float,
    what: str,
    sent: float,
    flops: int,
    narrower: float = 0.0,
    host: bool = False,
) -> Transfer:
    """`sent` bytes for each parameter alongside `flops` FLOPs for each that a token goes through;
    `weight`: how many of the first there are for each of the second. `narrower`: the bytes with
    --grad-reduce-in-bf16; `keeping_helps`: so would --zero3-keep-gathered.
    """
    sent, narrower = weight * sent, weight * narrower
    seq = config.data.seq_length // config.distributed.context_parallel_size
    tokens = config.training.micro_batch_size * seq
    needed = math.ceil(sent * machine.flops_per_byte(host=host) / flops)
    flags = [f"--micro-batch-size {-(-needed // seq)}"]
    if 0 < narrower < sent and tokens >= narrower * machine.flops_per_byte() / flops:
        flags.insert(0, "--grad-reduce-in-bf16")
    elif keeping_helps:
        flags.insert(0, "--zero3-keep-gathered")
    return Transfer(what, needed, tokens, " or ".join(flags))


@dataclass(frozen=True)
class Order:
    """Memory at the worst moment by stage of ZeRO, on the pipeline rank that needs the most of
    each; `broken`: why a stage does not need less than the one before.
    """

    totals: list[int]
    broken: list[str]


def order_of_peaks(plan: MemoryPlan) -> Order:
    """Whether each stage of ZeRO needs less than the one before on every pipeline rank, and which
    block prevents it where it does not.
    """
    stages = [plan.with_stage(stage).ranks for stage in range(4)]
    broken = []
    for stage in (1, 2, 3):
        for rank, (before, after) in enumerate(zip(stages[stage - 1], stages[stage], strict=True)):
            if after.total >= before.total:
                where = f" on pipeline rank {rank}" if len(stages[0]) > 1 else ""
                broken.append(
                    f"stage {stage} needs {gib(after.total)} and stage {stage - 1} "
                    f"{gib(before.total)} GiB{where}: "
                    f"{_culprit(after, stage, plan.config.distributed.zero3_keep_gathered)}"
                )
                break
    return Order([max(rank.total for rank in ranks) for ranks in stages], broken)


def _culprit(rank: RankMemory, stage: int, keeps: bool) -> str:
    """What outweighs that which the stage shares out: the largest block, of which its gradient or
    its weights are whole for a time.
    """
    if stage == 3 and keeps:
        return "--zero3-keep-gathered holds all weights whole"
    elements = sum(block.size for block in rank.blocks)
    block = max(rank.blocks, key=lambda block: block.size)
    what = "weights are" if stage == 3 else "gradient is"
    name = block.name.replace("layers.", "layer ")
    share = f"{block.size / elements:.0%} of the rank's parameters"
    return f"the {name}, {share}, whose {what} whole in the {rank.peak.when}"


def gib(size: int) -> str:
    """Three digits of GiB."""
    return f"{size / 2**30:.3g}"
