"""The memory estimate of pipeline ranks against the stages that are built and the bytes that live
while the executor runs them, and the lines about stages.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import test_memory
import torch
import torch.distributed as dist
from megatron.benchmarks.peers.pipeline_rank import VIRTUAL, memory
from megatron.tools._plan.engine import CountedBlock
from megatron.tools._plan.memory import (
    MemoryPlan,
    PlannedSteps,
    rank_memories,
    schedule_of,
    stage_parameters,
)
from megatron.tools._plan.stages import stage_lines
from test_memory import BATCH, DRY, GROUPED, ROPE, SEQ, VOCAB

from megatron.config.groups import Config
from megatron.distributed.groups import Axis, Layout
from megatron.distributed.setup import make_groups
from megatron.model.arithmetic import padded_vocab_size
from megatron.model.gpt import GPTModel
from megatron.model.spec import TensorParallel
from megatron.model.stages import pipeline_stages
from megatron.parallel.blocks import Block, build_blocks

LLAMA = {
    **DRY,
    **ROPE,
    **GROUPED,
    "activation": "swiglu",
    "normalization": "RMSNorm",
    "untie_embeddings_and_output_weights": True,
}


def configure(
    pp: int,
    layers: int,
    model: dict | None = None,
    micro_batches: int = 8,
    tp: int = 1,
    recompute: bool = False,
    **distributed,
) -> Config:
    return test_memory.configure(
        training={
            "global_batch_size": BATCH * micro_batches,
            "recompute_granularity": "full" if recompute else None,
        },
        distributed={"pipeline_model_parallel_size": pp, **distributed},
        tp=tp,
        world=pp * tp,
        **{"num_layers": layers, **(model or {})},
    )


@pytest.mark.parametrize(
    "pp, layers, model, distributed",
    [
        (2, 4, LLAMA, {}),
        (2, 4, {}, {"pipeline_schedule": "zero-bubble-v"}),
        (4, 12, DRY, {"num_virtual_stages_per_pipeline_rank": 3}),
        (3, 5, {}, {"pipeline_model_parallel_layout": "auto"}),
        (3, 4, {"position_embedding_type": "none"}, {"pipeline_model_parallel_layout": "E|tttt|L"}),
    ],
)
def test_static_bytes_are_those_of_the_stages_that_are_built(pp, layers, model, distributed):
    tp = 2
    config = configure(pp, layers, model, tp=tp, **distributed)
    padded = padded_vocab_size(VOCAB, config.model, tp)
    stages, placement = pipeline_stages(config, padded), schedule_of(config, pp * tp).placement
    estimates = [rank.sizes() for rank in rank_memories(config, VOCAB, pp * tp)]
    for rank in range(pp):
        local = GPTModel(
            config.model,
            vocab_size=VOCAB,
            padded_vocab=padded,
            dtype=torch.float32,
            seed=1,
            tp=TensorParallel(Axis("tp", 0, tuple(range(tp)))),
            stages=tuple(
                stage for stage, where in zip(stages, placement, strict=True) if where == rank
            ),
        )
        blocks = build_blocks(local, torch.device("cpu"))
        count = sum(math.prod(entry.shape) for block in blocks for entry in block.entries)
        sizes = estimates[rank]
        planned = rank_memories(config, VOCAB, pp * tp)[rank]
        assert count == planned.parameters
        stored = sum(block.size for block in blocks)
        assert planned.static == {
            "parameters": 4 * stored,
            "gradients": 4 * stored,
            "optimizer": 8 * stored,
            "host": 0,
            "disk": 0,
        }
        assert sizes["total"] == sum(size for name, size in sizes.items() if name != "total")
    largest = max(estimates, key=lambda sizes: sizes["total"])
    assert MemoryPlan(config, VOCAB, pp * tp).fullest.sizes() == largest
    ranks = PlannedSteps(config, VOCAB, pp * tp, "cuda").largest_ranks()
    assert max(estimates[rank]["total"] for rank in ranks) == largest["total"]


def test_the_estimate_follows_schedule_and_recompute():
    def activations(micro_batches: int, schedule: str = "1f1b", **options) -> list[int]:
        config = configure(4, 8, micro_batches=micro_batches, pipeline_schedule=schedule, **options)
        return [rank.peak.most["activations"] for rank in rank_memories(config, VOCAB, 4)]

    assert (
        activations(8) == activations(64) and activations(64, "gpipe")[0] > 15 * activations(64)[0]
    )
    message = SEQ * BATCH * 64 * 4  # of which two are on their way to a stage in the middle
    assert (
        activations(8, "gpipe")[1] - 2 * message
        == 8 * activations(1)[1]
        == 8 * (activations(8)[1] - 2 * message) // 3
    )
    one, two = (activations(m, recompute=True)[1] for m in (1, 2))
    # Another micro-batch costs the inputs of a stage's two layers, its output, ids and positions of
    # tokens and samples, and the two messages.
    assert two - one == (3 + 2) * message + 28 * SEQ * BATCH + 8 * (SEQ + BATCH)
    saved, again = (
        activations(8, "zero-bubble")[0],
        activations(8, "zero-bubble", recompute=True)[0],
    )
    # recomputed once: linear layers keep theirs for the weight gradient
    assert activations(8, recompute=True)[0] < again < saved
    split = configure(4, 8, pipeline_schedule="zero-bubble")
    assert schedule_of(split, 4).micro_batches == 8
    accumulated = dataclasses.replace(
        split, distributed=dataclasses.replace(split.distributed, world_size=8)
    )
    assert schedule_of(accumulated, 8).micro_batches == 4  # two data-parallel ranks


SHAPE = {
    "layers": 8,
    "hidden": 64,
    "heads": 4,
    "ffn": 160,
    "seq": SEQ,
    "batch": BATCH,
    "vocab": 384,
}
NAMES = ["gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v"]


def measure(micro_batches: int) -> list[dict]:
    return memory(
        make_groups(Layout(pp=dist.get_world_size()), None), NAMES, [micro_batches], SHAPE
    )


def test_the_estimate_is_what_lives_while_the_executor_runs(gloo_world, monkeypatch):
    """In addition to the gradients, which all live there from the start."""
    monkeypatch.setattr(CountedBlock, "open", Block.open)
    model = {
        **LLAMA,
        "group_query_attention": False,
        "num_query_groups": None,
        "ffn_hidden_size": 160,
        "add_bias_linear": False,
    }
    measured = gloo_world(2).run(measure, 6)
    for index, name in enumerate(NAMES):
        config = configure(
            2,
            8,
            model,
            6,
            pipeline_schedule=name,
            num_virtual_stages_per_pipeline_rank=VIRTUAL.get(name, 1),
        )
        for rank, planned in enumerate(rank_memories(config, VOCAB, 2, "cpu")):
            row = measured[rank][index]
            assert row["schedule"] == name
            assert row["peak"] == pytest.approx(sum(planned.peak.bytes.values()), rel=0.03), (
                name,
                rank,
            )


def test_the_table_of_stages():
    config = configure(
        2, 4, LLAMA, num_virtual_stages_per_pipeline_rank=2, pipeline_schedule="interleaved"
    )
    lines = stage_lines(MemoryPlan(config, VOCAB, 2))
    assert lines[0].startswith(
        "interleaved: 2 pipeline ranks x 2 stage(s), 8 micro-batches; "
    ) and lines[0].endswith("% idle, by FLOPs alone")
    assert [line.split(":")[0] for line in lines[1:5]] == [
        "stage 0 on rank 0",
        "stage 1 on rank 1",
        "stage 2 on rank 0",
        "stage 3 on rank 1",
    ]
    assert ["embedding, layer 0", "layer 1", "layer 2", "layer 3, head"] == [
        line.split(": ")[1].split("; ")[0] for line in lines[1:5]
    ]
    stored = stage_parameters(config, pipeline_stages(config, 384), (0, 1, 0, 1), 384)
    assert [
        f"{count:,} parameters" in line for count, line in zip(stored, lines[1:5], strict=True)
    ] == [True] * 4
    assert [line.split("; ")[-1] for line in lines[1:5]] == [
        "4 in flight",
        "3 in flight",
        "2 in flight",
        "1 in flight",
    ]
    shares = [float(line.split("% of the FLOPs")[0].split()[-1]) for line in lines[1:5]]
    assert (
        sum(shares) == pytest.approx(100, abs=0.3)
        and shares[0] == shares[1] == shares[2] < shares[3]
    )
    assert stage_lines(MemoryPlan(configure(1, 4), VOCAB, 1)) == []
    assert lines[5].startswith("GiB by pipeline rank: ") and len(lines) == 6


def test_the_bubble_that_a_dry_run_tells():
    def idle(
        layers: int, micro_batches: int, layout: str | None = None, recompute: bool = False
    ) -> float:
        # a head that costs next to nothing
        model = {**DRY, "ffn_hidden_size": 4096, "untie_embeddings_and_output_weights": True}
        config = configure(
            4,
            layers,
            model,
            micro_batches,
            recompute=recompute,
            pipeline_model_parallel_layout=layout,
        )
        return (
            float(
                stage_lines(MemoryPlan(config, 8, 4))[0].split("micro-batches; ")[1].split("%")[0]
            )
            / 100
        )

    # (P - 1) / (m + P - 1)
    assert idle(8, 9) == pytest.approx(3 / 12, abs=0.01) == idle(8, 9, recompute=True)
    assert idle(8, 9, "Et|tt|tt|tttL") > idle(8, 9) + 0.1  # all wait for the largest stage
