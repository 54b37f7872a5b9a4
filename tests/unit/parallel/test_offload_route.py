"""Which forward passes of a schedule send to the host, and when what they sent is read."""

from __future__ import annotations

from collections import Counter

import pytest
from torch import nn

from megatron.model.recompute import NO_RECOMPUTE, WHOLE, LayerRecompute, group_of
from megatron.parallel.offload import HostPool, Route
from megatron.parallel.pipeline import passes_of
from megatron.parallel.schedule import Kind, build_schedule


class Named(nn.Module):
    """Of a layer what a route reads."""

    def __init__(self, name: str, recompute: LayerRecompute = NO_RECOMPUTE, offloaded: bool = True):
        super().__init__()
        self.name, self.recompute = name, recompute
        self.recomputes = name.isdigit()
        self.splits_backward = self.recomputes
        self.offloaded = frozenset(["attn_norm"] if offloaded and self.recomputes else [])


def stage(choices: list[LayerRecompute], head: bool = True) -> list[Named]:
    layers = [
        Named(str(index), choice, not choice.whole or choice.first)
        for index, choice in enumerate(choices)
    ]
    return [Named("embedding"), *layers, *([Named("head")] if head else [])]


def route_of(layers: list[Named], kinds: list[tuple[Kind, int]]) -> Route:
    return Route([(*call, micro) for kind, micro in kinds for call in passes_of(kind, layers)])


def leaving(route: Route) -> set[tuple[str, int]]:
    return {
        (layer.name, micro)
        for (layer, _, micro), leaves in zip(route.passes, route.leaves, strict=True)
        if leaves
    }


ONE_AFTER_ANOTHER = [(kind, micro) for micro in (0, 1) for kind in (Kind.FORWARD, Kind.BACKWARD)]


@pytest.mark.parametrize(
    "layers, head, found", [(4, True, "012"), (4, False, "012"), (1, False, "")]
)
def test_what_would_come_back_before_it_has_left_stays(layers, head, found):
    """The last layer before the turn; of a middle stage with one micro-batch the only one."""
    route = route_of(stage([NO_RECOMPUTE] * layers, head), ONE_AFTER_ANOTHER)
    assert leaving(route) == {(layer, micro) for layer in found for micro in (0, 1)}


def test_all_leave_where_another_micro_batch_comes_first():
    kinds = [(Kind.FORWARD, 0), (Kind.FORWARD, 1), (Kind.BACKWARD, 0), (Kind.BACKWARD, 1)]
    found = leaving(route_of(stage([NO_RECOMPUTE] * 2), kinds))
    assert found == {(layer, micro) for layer in "01" for micro in (0, 1)}


def test_of_groups_the_first_layer_alone_and_not_of_the_last_group():
    layers = stage([*group_of(2), *group_of(3)])
    assert leaving(route_of(layers, ONE_AFTER_ANOTHER)) == {("0", 0), ("0", 1)}
    layers = stage([WHOLE, WHOLE])
    assert leaving(route_of(layers, ONE_AFTER_ANOTHER)) == {("0", 0), ("0", 1)}


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zero-bubble"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_leaves_is_read_once_by_its_first_reader(name, rank):
    schedule = build_schedule(name, 2, 1, 4)
    layers = stage([NO_RECOMPUTE, *group_of(2), WHOLE], head=rank == 1)
    kinds = [(action.kind, action.micro) for action in schedule.actions[rank]]
    route = route_of(layers, kinds)
    sent, read = [], []
    for index, (layer, kind, micro) in enumerate(route.passes):
        if route.leaves[index]:
            assert kind is Kind.FORWARD and layer.offloaded
            sent.append((layer, micro))
        if (key := route.reads[index]) is not None:
            assert key == (layer, micro) and kind is not Kind.FORWARD
            forward = route.passes.index((layer, Kind.FORWARD, micro))
            assert index > forward + 2
            assert not any(
                (other, number) == key for other, _, number in route.passes[forward + 1 : index]
            )
            read.append(key)
    assert sent and Counter(sent) == Counter(read) and max(Counter(read).values()) == 1


def test_buffers_are_made_when_none_of_the_size_is_free():
    pool = HostPool(lambda size: [size])
    first, second, other = pool.take(3), pool.take(3), pool.take(5)
    assert pool.made == [3, 3, 5] and first is not second
    pool.give(3, second)
    pool.give(3, first)
    pool.give(5, other)
    # the one that was read the longest ago
    assert pool.take(3) is second and pool.take(3) is first and pool.take(5) is other
    assert pool.made == [3, 3, 5]
