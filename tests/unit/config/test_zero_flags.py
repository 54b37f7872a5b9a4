"""ZeRO flags in a layout: what is derived, what is refused, and that each fix is accepted."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rule_rows import answers

from megatron.config.arguments import parse_arguments
from megatron.config.groups import Config
from megatron.config.validate import Resolved, cross_field_faults, resolve

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 1 --lr 1e-3 --train-iters 10 --mock-data "
    "--vocab-size 100 --save new --dry-run"
)


def configure(extra: str, world: int) -> Config:
    return parse_arguments(f"{BASE} --world-size {world} {extra}".split()).config


def faults(extra: str, world: int) -> list[str]:
    return cross_field_faults(configure(extra, world), world, 101)


def resolved(extra: str, world: int) -> Resolved:
    return resolve(configure(extra, world), world, 101)


def zero_notes(found: Resolved) -> list[str]:
    return [
        note
        for note in found.notes
        if re.match("-*(zero|no-overlap-param|optimizer|main-grads|exp-avg)", note)
    ]


# Ranks and flags, and the notes about ZeRO.
NOTES = """
4 --zero-stage 3 --zero-shard-size 4 --zero3-keep-gathered
1 --zero-stage 1
    note zero-stage = 0: one data-parallel rank has nothing to shard over
4 --zero-stage 3 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    note zero-stage = 0: one data-parallel rank has nothing to shard over
1 --zero-stage 3 --zero3-keep-gathered --zero-shard-size 8
    note zero-stage = 0: one data-parallel rank has nothing to shard over
    note zero-shard-size = None: one data-parallel rank has nothing to shard over
    note zero3-keep-gathered = False: one data-parallel rank has nothing to shard over
4 --zero-stage 2 --zero-shard-size 1
    note zero-stage = 0: --zero-shard-size 1 shards over a single rank
    note zero-shard-size = None: --zero-shard-size 1 shards over a single rank
4 --no-overlap-param-gather
    note --no-overlap-param-gather: has no effect without --zero-stage 1, 2 or 3 on several
1 --zero-stage 3 --zero3-keep-gathered --param-cpu-offload
    note optimizer-cpu-offload = True: --param-cpu-offload keeps weights where they are stepped
1 --zero-stage 3 --zero-shard-size 4 --param-cpu-offload
    note optimizer-cpu-offload = True: --param-cpu-offload keeps weights where they are stepped
    note zero-shard-size = None: one data-parallel rank has nothing to shard over
4 --zero-stage 3 --param-cpu-offload --optimizer-nvme-offload disk
    note optimizer-cpu-offload = True: --optimizer-nvme-offload moves on from host memory
"""


@pytest.mark.parametrize("line, wanted", answers(NOTES, "note"))
def test_the_same_flags_run_in_every_layout(line, wanted):
    world, _, extra = line.partition(" ")
    found, texts = resolved(extra, int(world)), wanted.get("note", [])
    notes = zero_notes(found)
    assert len(notes) == len(texts) and all(map(str.startswith, notes, texts)), notes
    again = resolve(
        Config.from_dict(json.loads(json.dumps(found.config.to_dict()))), int(world), 101
    )
    assert again.config == found.config and not any(note.startswith("zero") for note in again.notes)


# Ranks and flags, and the beginning of the fault.
FAULTS = """
8 --zero-stage 1 --zero-shard-size 3
    fault --zero-shard-size 3: must divide the 8 data-parallel rank(s); the nearest that fits is 2
24 --zero-stage 3 --zero-shard-size 4 --tensor-model-parallel-size 2 \\
--pipeline-model-parallel-size 2
    fault --zero-shard-size 4: must divide the 6 data-parallel rank(s); the nearest that fits is 3
8 --zero-stage 0 --zero-shard-size 4
    fault --zero-shard-size 4: has no effect without --zero-stage 1, 2 or 3; remove it or set
1 --zero-stage 2 --zero3-keep-gathered
    fault --zero3-keep-gathered: has no effect without --zero-stage 3
""".replace("\\\n", "")


@pytest.mark.parametrize("line, wanted", answers(FAULTS, "fault"))
def test_one_fault(line, wanted):
    world, _, extra = line.partition(" ")
    found = faults(extra, int(world))
    assert len(found) == 1 and found[0].startswith(wanted["fault"][0]), found


@given(
    st.integers(0, 3),
    st.integers(1, 40),
    st.sampled_from((1, 2, 4)),
    st.integers(1, 40),
    st.booleans(),
)
def test_a_proposed_shard_size_is_accepted(stage, size, tp, replicas, keep):
    """Every size runs, is without effect, or has a fix with which the same stage runs."""
    extra = f"--zero-stage {stage} --tensor-model-parallel-size {tp}" + (
        " --zero3-keep-gathered" if keep and stage == 3 else ""
    )
    found = faults(f"{extra} --zero-shard-size {size}", tp * replicas)
    if stage == 0:
        assert len(found) == 1 and "has no effect without" in found[0]
        return
    if found:
        assert replicas % size and len(found) == 1
        size = int(re.search(r"nearest that fits is (\d+)$", found[0])[1])
    distributed = resolved(f"{extra} --zero-shard-size {size}", tp * replicas).config.distributed
    assert distributed.zero_stage == (0 if size == 1 or replicas == 1 else stage)
    assert (
        distributed.zero_shard_size is None
        if distributed.zero_stage == 0
        else replicas % distributed.zero_shard_size == 0
    )
    assert found == [] or replicas == 1 or distributed.zero_stage == stage


def test_a_huge_dry_run_is_checked_at_once():
    found = faults("--zero-stage 1 --zero-shard-size 7 --global-batch-size 1048576", 2**20)
    assert found[0].endswith("the nearest that fits is 8")
