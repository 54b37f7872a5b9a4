"""ZeRO flags in a layout: what is derived, and that each fix is accepted."""

from __future__ import annotations

import json
import re

import pytest
from config_lines import faults, ranked, resolved
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.groups import Config
from megatron.config.validate import resolve

# Ranks and flags, and the notes about ZeRO.
NOTES = """
4 --zero-stage 3 --zero-shard-size 4 --zero3-keep-gathered
4 --zero-stage 3 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    zero-stage = 0: one data-parallel rank has nothing to shard over
1 --zero-stage 3 --zero3-keep-gathered --zero-shard-size 8
    zero3-keep-gathered = False: one data-parallel rank has nothing to shard over
    zero-shard-size = None: one data-parallel rank has nothing to shard over
    zero-stage = 0: one data-parallel rank has nothing to shard over
4 --zero-stage 2 --zero-shard-size 1
    zero-stage = 0: --zero-shard-size 1 shards over a single rank
    zero-shard-size = None: --zero-shard-size 1 shards over a single rank
4 --no-overlap-param-gather
    --no-overlap-param-gather: has no effect without --zero-stage above 0 over several ranks
1 --zero-stage 3 --no-overlap-param-gather
    zero-stage = 0: one data-parallel rank has nothing to shard over
    --no-overlap-param-gather: has no effect without --zero-stage above 0 over several ranks
1 --zero-stage 3 --zero-shard-size 4 --param-cpu-offload
    optimizer-cpu-offload = True: --param-cpu-offload keeps weights where they are stepped
    zero-shard-size = None: one data-parallel rank has nothing to shard over
4 --zero-stage 3 --param-cpu-offload --optimizer-nvme-offload disk
    optimizer-cpu-offload = True: --optimizer-nvme-offload moves on from host memory
"""


@pytest.mark.parametrize("ranks, flags, texts", ranked(NOTES))
def test_the_same_flags_run_in_every_layout(ranks, flags, texts):
    found = resolved(flags, ranks)
    notes = [note for note in found.notes if re.match("-*(zero|no-overlap-param|optimizer)", note)]
    assert len(notes) == len(texts) and all(map(str.startswith, notes, texts)), notes
    again = resolve(Config.from_dict(json.loads(json.dumps(found.config.to_dict()))), ranks, 101)
    assert again.config == found.config and not any(note.startswith("zero") for note in again.notes)


@given(
    st.integers(1, 3),
    st.integers(1, 40),
    st.sampled_from((1, 2, 4)),
    st.integers(1, 40),
    st.booleans(),
)
def test_a_proposed_shard_size_is_accepted(stage, size, tp, replicas, keep):
    """Every size runs or has a fix with which the same stage runs."""
    flags = f"--zero-stage {stage} --tensor-model-parallel-size {tp} " + (
        "--zero3-keep-gathered" if keep and stage == 3 else ""
    )
    found = faults(f"{flags} --zero-shard-size {size}", tp * replicas)
    if found:
        assert replicas % size and len(found) == 1
        size = int(re.search(r"nearest that fits is (\d+)$", found[0])[1])
    distributed = resolved(f"{flags} --zero-shard-size {size}", tp * replicas).config.distributed
    assert distributed.zero_stage == (0 if size == 1 or replicas == 1 else stage)
    assert (
        distributed.zero_shard_size is None
        if distributed.zero_stage == 0
        else replicas % distributed.zero_shard_size == 0
    )
    assert found == [] or replicas == 1 or distributed.zero_stage == stage
