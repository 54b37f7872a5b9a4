"""Runs whose activations wait on the host have the bits of runs that keep them on the device, in
the same layout: of losses, evaluations, gradients and weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
from megatron.tools._plan.engine import PlannedPasses
from parity.test_pipeline_bits import same
from parity.test_recompute_bits import FULL, SELECTIVE, flags_of, parts, ranks_of
from parity.worker import Outcome, run_case

from megatron.parallel.offload import HostCopies, HostPool, OffloadingRunner

AWAY = "--activation-offload --min-offloaded-tensor-size 64"
CHOICES = {
    "all": AWAY,
    "half": f"{AWAY} --activation-offload-fraction 0.5",
    "attention": f"{AWAY} --offload-modules qkv_linear core_attn attn_proj",
    "norms, MLP": f"{AWAY} --offload-modules attn_norm mlp_norm mlp_fc1 mlp_act mlp_fc2",
    "with rebuilt": f"{AWAY} {SELECTIVE} layernorm qkv mlp_act",
    "inputs": f"{AWAY} {FULL}",
    "groups": f"{AWAY} {FULL} --recompute-num-layers 2",
    "shares": f"{AWAY} {FULL} --distribute-saved-activations",
    "by layers": f"{AWAY} --recompute-layers full layernorm+mlp core_attn none",
}
CI = (  # layout, feature, precision, choices; small worlds first
    ("dp1", "dropout", "fp16", ("all", "groups")),
    ("dp1", "documents", "bf16", ("all", "by layers")),
    ("tp2", "dropout", "bf16", ("all", "shares")),
    ("tp2 sp", "gqa2-qknorm", "fp32", ("all", "inputs")),
    ("cp2", "dropout", "bf16", ("all", "inputs")),
    ("cp2 a2a", "gqa2-qknorm", "fp32", ("attention",)),
    ("cp2 p2p", "dropout", "bf16", ("attention",)),
    ("dp2 zero1", "llama", "fp8", ("all",)),
    ("dp2 zero2", "dropout", "fp32", ("norms, MLP",)),
    ("dp2 zero3", "dropout", "bf16", ("all", "groups")),
    ("pp2 gpipe", "dropout", "fp32", ("with rebuilt",)),
    ("pp2 1f1b", "llama", "bf16", ("all", "half")),
    ("pp2 interleaved v2", "dropout", "fp32", ("all", "inputs")),
    ("pp2 zero-bubble", "dropout", "bf16", ("all", "with rebuilt")),
    ("pp2 zero-bubble-v", "gqa2-qknorm", "fp32", ("all",)),
    ("pp2 zero-bubble dp2 zero3", "dropout", "bf16", ("all", "inputs")),
    ("tp2 sp", "mla", "fp32", ("all", "attention")),
)
ROWS = [
    pytest.param(layout, feature, precision, choice, id=f"{layout} {feature} {precision} {choice}")
    for layout, feature, precision, choices in CI
    for choice in choices
]


@pytest.fixture(scope="module")
def kept() -> dict[tuple[str, ...], tuple]:
    """The bits of runs without offload, by their flags."""
    return {}


def counted(flags: tuple[str, ...]) -> tuple[Outcome, int]:
    """A run's outcome, and how many storages it has sent to the host."""
    sent, send = [], HostCopies.send

    def counting(self, storages):
        sent.extend(storages)
        return send(self, storages)

    with mock.patch.object(HostCopies, "send", counting):
        return run_case(flags), len(sent)


@pytest.mark.parametrize("layout, feature, precision, choice", ROWS)
@pytest.mark.default(
    "pp2 interleaved v2 dropout fp32 all",
    "pp2 zero-bubble dp2 zero3 dropout bf16 all",
)
def test_the_same_bits(gloo_world, kept, layout, feature, precision, choice):
    world, flags = gloo_world(ranks_of(layout)), flags_of(layout, feature, precision)
    if flags not in kept:
        kept[flags] = parts(world.run(run_case, flags))
    outcomes, sent = zip(*world.run(counted, (*flags, *CHOICES[choice].split())), strict=True)
    assert all(sent)
    assert all(
        same(one, other) for one, other in zip(parts(list(outcomes)), kept[flags], strict=True)
    )


def host_bytes(flags: tuple[str, ...]) -> tuple[int, int]:
    """Bytes of the buffers of the host that a run has made, and that its plan has counted."""
    made: dict[bool, list[HostPool]] = {True: [], False: []}
    expect, planned = OffloadingRunner.prepare_passes, PlannedPasses.prepare_passes

    def noted(self, passes):
        made[True].append(self.copies.pool)
        expect(self, passes)

    def noted_in_the_plan(self, passes):
        made[False].append(self.pool)
        planned(self, passes)

    with (
        mock.patch.object(OffloadingRunner, "prepare_passes", noted),
        mock.patch.object(PlannedPasses, "prepare_passes", noted_in_the_plan),
    ):
        run_case(flags, planned=True)
    return sum(made[True][-1].made), max((sum(pool.made) for pool in made[False]), default=0)


@pytest.mark.parametrize("choice", ["all", "inputs"])
def test_buffers_are_those_of_the_plan_and_are_used_again(gloo_world, choice):
    """Three steps of four micro-batches need the buffers of the first."""
    flags = (*flags_of("pp2 1f1b", "llama", "bf16"), *CHOICES[choice].split())
    (first, planned), (second, _) = gloo_world(2).run(host_bytes, flags)
    assert planned == max(first, second) > 0  # rank 0 plans


# ---- what the copies may get wrong


@contextlib.contextmanager
def another_micro_batch() -> Iterator[None]:
    """What comes back for a layer is what its latest forward pass has sent."""
    send, fetch, latest = HostCopies.send, HostCopies.fetch, {}

    def remembering(self, storages):
        departed = send(self, storages)
        for place, storage in enumerate(storages):
            latest[place, storage.size] = storage.buffer
        return departed

    def mistaken(self, departed):
        for place, storage in enumerate(departed.storages):
            own, other = storage.buffer.memory, latest[place, storage.size].memory
            if own is not other:
                own.copy_(other)
        return fetch(self, departed)

    with (
        mock.patch.object(HostCopies, "send", remembering),
        mock.patch.object(HostCopies, "fetch", mistaken),
    ):
        yield


@contextlib.contextmanager
def buffer_given_away() -> Iterator[None]:
    """A buffer is free as soon as it has been filled."""
    send = HostCopies.send

    def generous(self, storages):
        departed = send(self, storages)
        for storage in storages:
            self.pool.give(storage.size, storage.buffer)
        return departed

    with mock.patch.object(HostCopies, "send", generous):
        yield


@contextlib.contextmanager
def never_copied_back() -> Iterator[None]:
    """The memory that is to receive what was away is read as it is."""

    def idle(self, storage):
        storage.tensor.zero_()
        self.pool.give(storage.size, storage.buffer)

    with mock.patch.object(HostCopies, "_copy_back", idle):
        yield


MUTANTS: dict[str, Callable] = {
    "another micro-batch": another_micro_batch,
    "a buffer given away": buffer_given_away,
    "never copied back": never_copied_back,
}


def mutated(name: str, flags: tuple[str, ...]) -> Outcome:
    with MUTANTS[name]():
        return run_case(flags)


@pytest.mark.parametrize("choice", ["all", "inputs"])
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(gloo_world, kept, name, choice):
    flags = flags_of("pp2 1f1b", "llama", "bf16")
    if flags not in kept:
        kept[flags] = parts(gloo_world(2).run(run_case, flags))
    found = parts(gloo_world(2).run(mutated, name, (*flags, *CHOICES[choice].split())))
    assert not all(same(one, other) for one, other in zip(found, kept[flags], strict=True))


def test_every_choice_is_in_ci():
    assert {choice for *_, choices in CI for choice in choices} == set(CHOICES)
