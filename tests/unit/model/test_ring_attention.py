"""Ring attention against whole attention on one process: values, gradients, the order of sends and
computation, and how much of keys and values lives on a rank.
"""

import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.kernels.attention import attention_reference
from megatron.kernels.attention_masks import attention_mask

from megatron.distributed.groups import Layout, build_groups
from megatron.model.attention import ring_attention as ring
from megatron.model.attention.context_parallel import places_of
from megatron.model.attention.ring_attention import BlockAttention, RingAttention, ring_steps

LENGTH, B, HEADS, GROUPS, D = 96, 2, 4, 2, 8
SAMPLES = torch.tensor([5, 11])
STARTS = torch.tensor([[0] * 30 + [30] * 66, [0] * 7 + [7] * 60 + [67] * 29], dtype=torch.int32)
CASES = {  # name: backend, options, of the mask
    "causal": ("sdpa", {}, {}),
    "window": ("sdpa", {}, {"window": 20}),
    "window and documents, plain": ("plain", {}, {"window": 9, "document_starts": STARTS}),
    "softcap": ("plain", {"softcap": 2.0}, {}),
    "dropout": ("plain", {"drop": 0.3, "key": (3, 4), "first_head": 2}, {}),
}


def whole_tensors() -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, of all positions."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(LENGTH, B, heads, D, generator=generator, dtype=torch.float64)
        for heads in (HEADS, GROUPS, GROUPS, HEADS)
    ]


def axis_of_all():
    size = dist.get_world_size()
    return build_groups(Layout(cp=size), dist.get_rank(), dist.new_group, cp_ring=size).cp_ring


def run(case: str, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(this rank's positions, its part of out, dq, dk, dv)."""
    backend, options, masked = CASES[case]
    axis, starts = axis_of_all(), masked.get("document_starts")
    places = torch.from_numpy(
        places_of(
            LENGTH, axis.size, None if starts is None else starts.numpy(), masked.get("window")
        )
    )
    own = places[axis.rank]
    q, k, v, dout = (x[own].to(dtype) for x in whole_tensors())
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    steps = ring_steps(
        places, axis.rank, masked.get("window"), starts, by_positions="drop" in options
    )
    block = BlockAttention(backend, {"scale": 0.3, "sample_ids": SAMPLES, **options})
    out = RingAttention.apply(q, k, v, steps, block, axis)
    out.backward(dout)
    return own, [out.detach(), q.grad, k.grad, v.grad]


def whole(case: str) -> list[torch.Tensor]:
    _, options, masked = CASES[case]
    q, k, v, dout = whole_tensors()
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    mask = attention_mask(LENGTH, LENGTH, **masked)
    samples = SAMPLES if "drop" in options else None
    out, _ = attention_reference(q, k, v, scale=0.3, mask=mask, sample_ids=samples, **options)
    out.backward(dout)
    return [out.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("case", CASES)
def test_equals_attention_of_one_process(gloo_world, case):
    expected = whole(case)
    for own, found in gloo_world(3).run(run, case):
        for got, want in zip(found, expected, strict=True):
            assert (got - want[own]).abs().max() < 1e-13 * want.abs().max() * LENGTH


def recorded() -> list[tuple[str, int]]:
    """What a rank does in both passes, in order, each with the blocks of keys and values (or of
    their gradients, by "computes") that live then.
    """
    events: list[tuple[str, int]] = []
    blocks: list[weakref.ref] = []
    hop, stack = ring.start_ring_hop, torch.stack

    def alive() -> int:
        return len({ref() for ref in blocks if ref() is not None})

    def stacked(tensors):
        made = stack(tensors)
        blocks.append(weakref.ref(made.untyped_storage()))
        return made

    class Recorded:
        def __init__(self, x, axis):
            self.hop = hop(x, axis)
            if x.dtype == torch.bfloat16:
                blocks.append(weakref.ref(self.hop.result.untyped_storage()))
            self.kind = "keys" if x.dtype == torch.bfloat16 else "gradients"
            events.append((f"posts {self.kind}", alive()))

        def wait(self):
            result = self.hop.wait()
            events.append((f"waits for {self.kind}", alive()))
            return result

    def computing(name):
        real = getattr(BlockAttention, name)

        def computed(*args, **kwargs):
            events.append((f"computes {name}", alive()))
            return real(*args, **kwargs)

        return mock.patch.object(BlockAttention, name, computed)

    with (
        mock.patch.object(ring, "start_ring_hop", Recorded),
        mock.patch.object(torch, "stack", stacked),
        computing("forward"),
        computing("backward"),
    ):
        run("causal", torch.bfloat16)
    return events


def test_every_hop_is_posted_before_the_computation_that_hides_it(gloo_world):
    """And at most three blocks of keys and values live: the own, one that leaves, one that
    arrives.
    """
    size = 4
    forward = [
        *["posts keys", "computes forward", "waits for keys"] * (size - 1),
        "computes forward",
    ]
    backward = [
        *("posts keys", "computes backward", "waits for keys"),
        *("posts keys", "computes backward", "posts gradients", "waits for keys"),
        *("posts keys", "computes backward", "waits for gradients"),
        *("posts gradients", "waits for keys"),
        *("computes backward", "waits for gradients", "posts gradients", "waits for gradients"),
    ]
    for events in gloo_world(size).run(recorded):
        assert [name for name, _ in events] == forward + backward
        assert max(alive for _, alive in events) == 3
